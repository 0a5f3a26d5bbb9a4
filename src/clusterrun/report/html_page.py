"""The page around a report: one file, no script, no request to anywhere; light and dark; phone and desktop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from clusterrun import __version__

# Okabe and Ito's colours (colour-blind safe), lighter on dark. ``--c*`` colour charts; the rest is the page.
_STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1d2329;--muted:#5d6871;--line:#e3e6e8;--soft:#f2f4f5;
--accent:#0072b2;--good:#1a7f4b;--bad:#b3341b;--warn:#8a5a00;--unknown:#7a3d8f;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#e69f00;--c4:#cc79a7;--c5:#56b4e9;--c6:#8c6d31;--c7:#9aa4ac}
@media (prefers-color-scheme:dark){:root{--bg:#14181c;--card:#1c2126;--ink:#e8ebee;--muted:#9aa6b0;--line:#2e353c;
--soft:#242a30;--accent:#6cb8ee;--good:#5fd08f;--bad:#ff8a70;--warn:#f0be5a;--unknown:#d9a3ea;
--c0:#4da6e0;--c1:#f0803c;--c2:#2cc295;--c3:#f2bd45;--c4:#e0a0c4;--c5:#8fd0f5;--c6:#c7a35c;--c7:#6f7a83}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:1.55rem;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere;letter-spacing:-.01em}
h2{font-size:1.1rem;margin:0 0 12px;letter-spacing:-.005em}
h3{font-size:.95rem;margin:18px 0 6px;font-weight:600}
p{margin:6px 0 10px}
.sub,.hint{color:var(--muted)}
.hint{font-size:.875rem;margin:4px 0 12px}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px;margin:16px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:10px;margin:18px 0 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 14px;min-width:0}
.tile b{display:block;font-size:1.25rem;line-height:1.25;font-weight:650;overflow-wrap:anywhere;
font-variant-numeric:tabular-nums}
.tile span{display:block;color:var(--muted);font-size:.82rem;line-height:1.3}
.badge{display:inline-block;border-radius:999px;padding:1px 10px;font-size:.85rem;font-weight:600;
border:1px solid currentColor;white-space:nowrap}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}.unknown{color:var(--unknown)}
.two{display:grid;grid-template-columns:1fr 1fr;gap:16px;margin:16px 0}.two section{margin:0}
.scroll{overflow-x:auto;margin:0 -20px;padding:0 20px}
table{border-collapse:collapse;width:100%;font-size:.86rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 12px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--muted);font-weight:600}th:last-child,td:last-child{padding-right:0}
tr:last-child td{border-bottom:0}
td.num,th.num{text-align:right;white-space:nowrap}td.tight{white-space:nowrap}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;margin:0;font-size:.92rem}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere;min-width:0}
pre{background:var(--soft);border-radius:8px;padding:12px 14px;margin:6px 0 12px;overflow-x:auto;
font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre.wrap{white-space:pre-wrap;overflow-wrap:anywhere}
code{font:.88em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
details>summary{cursor:pointer;color:var(--accent);padding:4px 0}
details>summary:focus-visible,a:focus-visible,.scroll:focus-visible,pre:focus-visible{outline:2px solid var(--accent);
outline-offset:2px;border-radius:4px}
a{color:var(--accent)}
svg{display:block;width:100%;height:auto;font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
.narrow{display:none}
.graphs{display:grid;grid-template-columns:repeat(auto-fit,minmax(250px,1fr));gap:10px 24px}
.graphs svg{max-width:320px;margin:0 auto}.graphs figure{margin:0}.graphs figcaption{text-align:center;font-size:.9rem}
svg text{fill:var(--ink)}.tick,.axis{fill:var(--muted)}text.tick,text.axis{fill:var(--muted)}
.grid{stroke:var(--line);stroke-width:1}.mark{stroke:var(--muted);stroke-dasharray:3 4;stroke-width:1.2}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.dashed{stroke-dasharray:5 5;stroke-width:1.5}
.node{fill:var(--soft);stroke:var(--muted)}svg text.nodetext{font-size:11px;fill:var(--ink)}
.edge{stroke-width:2}.edge.unlike{stroke-width:4}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;padding:0;margin:0 0 6px;font-size:.85rem;
color:var(--muted)}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
footer{color:var(--muted);font-size:.82rem;margin-top:22px}
@media (max-width:760px){main{padding:18px 12px 40px}section{padding:14px 14px;border-radius:10px}
.two{grid-template-columns:1fr}.wide{display:none}.narrow{display:block}.scroll{margin:0 -14px;padding:0 14px}
h1{font-size:1.25rem}.tiles{grid-template-columns:1fr 1fr;gap:8px}.tile b{font-size:1.12rem}
table.many{min-width:620px}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:8px}}
@media print{body{background:#fff}section,.tile{break-inside:avoid}}
"""
_COLOUR_RULES = "".join(
    f"path.c{i}{{stroke:var(--c{i})}}rect.c{i},circle.c{i},.b{i}{{fill:var(--c{i});background:var(--c{i})}}"
    f"line.c{i}{{stroke:var(--c{i})}}"
    for i in range(8)
)
# Nothing may be loaded or run, whatever ends up in the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(title: str, subtitle: str, body: Iterable[str], written: str) -> str:
    """A whole document. ``body`` is HTML; ``title`` and ``subtitle``: text and HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<style>{_STYLE}{_COLOUR_RULES}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
<p class="sub">{subtitle}</p>
</header>
{"".join(body)}
<footer>clusterrun {__version__}, written {escape(written)}. This file needs nothing but itself.</footer>
</main>
</body>
</html>
"""


def section(title: str, *content: str, hint: str = "") -> str:
    """A card. ``content`` is HTML, empty pieces are left out; no content, no card."""
    inside = "".join(content)
    if not inside:
        return ""
    said = f'<p class="hint">{escape(hint)}</p>' if hint else ""
    return f"<section><h2>{escape(title)}</h2>{said}{inside}</section>"


def tiles(items: Iterable[tuple[str, str]]) -> str:
    """Big numbers: (what, value)."""
    shown = "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for k, v in items)
    return f'<div class="tiles">{shown}</div>'


def badge(text: str, kind: str) -> str:
    """``kind``: good, bad, warn, unknown, or sub."""
    return f'<span class="badge {kind}">{escape(text)}</span>'


def facts(items: Iterable[tuple[str, str]]) -> str:
    """Terms and what they are; empty ones are left out."""
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in items if v) + "</dl>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = (), label: str) -> str:
    """Cells are HTML. ``numbers``: columns that hold figures. It scrolls by itself where it does not fit."""
    right = set(numbers)

    def cell(tag: str, i: int, content: str) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        kind = ' class="num"' if i in right else ""
        return f"<{tag}{scope}{kind}>{content}</{tag}>"

    head = "".join(cell("th", i, escape(c)) for i, c in enumerate(columns))
    body = "".join("<tr>" + "".join(cell("td", i, c) for i, c in enumerate(row)) + "</tr>" for row in rows)
    many = ' class="many"' if len(columns) > 3 else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label, quote=True)}">'
        f"<table{many}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def block(text: str, *, wrap: bool = False, label: str = "commands") -> str:
    """Text word for word, to be copied."""
    kind = ' class="wrap"' if wrap else f' tabindex="0" role="region" aria-label="{escape(label, quote=True)}"'
    return f"<pre{kind}>{escape(text.rstrip())}</pre>"


def folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
