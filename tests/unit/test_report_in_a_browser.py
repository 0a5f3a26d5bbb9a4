"""The HTML reports in a real headless chromium: nothing is loaded, nothing complains, nothing sticks out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import sample_runs
from browser import Page, chromium
from clusterrun import cli

# Text whose contrast to what is behind it is below WCAG 2 AA (4.5; 3 for large text), of what is seen.
CONTRAST = """
(() => {
  const rgb = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => { const [r, g, b] = rgb(c).slice(0, 3).map(v => { v /= 255; return v <= .03928 ? v / 12.92
    : Math.pow((v + .055) / 1.055, 2.4); }); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (rgb(c)[3] !== 0 && c !== 'transparent') return c; } return 'rgb(255,255,255)'; };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.tagName === 'title' || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), svg = e.namespaceURI.endsWith('svg');
    const [a, b] = [light(svg ? style.fill : style.color), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
    if (ratio < least) bad.push(e.textContent.slice(0, 30) + ' ' + ratio.toFixed(2));
  }
  return bad;
})()
"""
SMALL_TEXT = """
[...document.querySelectorAll('svg text')].filter(e => e.getClientRects().length)
  .map(e => e.getBoundingClientRect().height).filter(h => h < 9.5).length
"""
# Text in charts that is cut off at an edge of its drawing.
CUT_OFF = """
[...document.querySelectorAll('svg')].filter(s => s.getClientRects().length).flatMap(s => {
  const box = s.getBoundingClientRect();
  return [...s.querySelectorAll('text')].filter(t => { const b = t.getBoundingClientRect();
    return b.left < box.left - 2 || b.right > box.right + 2; }).map(t => t.textContent.slice(0, 40)); })
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shared = tmp_path_factory.mktemp("shared")
    run, sweep = sample_runs.hopper(shared).root, sample_runs.scaling_sweep(shared)
    for directory in (run, sweep):
        assert cli.main(["report", str(directory), "--html"]) == 0
    return {"run": run / "report.html", "sweep": sweep / "report.html"}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("what", ["run", "sweep"])
def test_looks_right(pages: dict[str, Path], page: Page, tmp_path: Path, what: str, width: int, dark: bool) -> None:
    page.requests.clear()
    page.complaints.clear()
    page.open(pages[what], width=width, dark=dark)
    assert page.requests == [pages[what].as_uri()]
    assert page.complaints == []
    assert page.value("document.documentElement.scrollWidth") == width  # nothing sticks out
    background = page.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 24, 28)" if dark else "rgb(251, 251, 250)")
    assert page.value(CONTRAST) == []
    assert page.value(CUT_OFF) == []
    assert page.value(SMALL_TEXT) == 0
    shown = "document.querySelector('.{}').getClientRects().length > 0"
    assert page.value(shown.format("narrow")) is (width < 760)
    assert page.value(shown.format("wide")) is (width > 760)
    shot = tmp_path / "page.png"
    page.screenshot(shot)
    assert shot.stat().st_size > 20_000


def test_for_screen_readers_and_keyboards(pages: dict[str, Path], page: Page) -> None:
    for path in pages.values():
        page.open(path, width=1200)
        assert page.value("document.documentElement.lang") == "en"
        assert page.value("document.querySelectorAll('h1').length") == 1
        assert page.value("[...document.querySelectorAll('svg')].every(s => s.getAttribute('aria-label').length > 3)")
        assert page.value("[...document.querySelectorAll('svg')].every(s => s.getAttribute('role') === 'img')")
        # What scrolls can be reached by keyboard.
        scrolling = "[...document.querySelectorAll('*')].filter(e => getComputedStyle(e).overflowX === 'auto')"
        assert page.value(f"{scrolling}.every(e => e.tabIndex === 0 || e.matches('pre.wrap'))")
        assert page.value("[...document.querySelectorAll('th')].every(t => t.scope === 'col')")
