"""From what people paste to plain lines: encodings, escapes, markup and odd blanks go, cells and their order stay.

Nothing here knows what a topology means; it only undoes what terminals, log collectors, web pages and editors add.
"""

from __future__ import annotations

import html
import re

from clusterrun.topology.model import TopologyError

MAX_CHARS = 8_000_000  # far above any paste (a 16-GPU matrix with legend has 5,000); guards against a wrong file

_ESCAPE_NAMES = r"(?:\\x1[bB]|\\u001[bB]|\\033|\\e(?=\[)|\^\[(?=\[)|[\u241b\u2190\ufffd](?=\[))"
_OSC = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")  # terminal titles, hyperlinks
_FORWARD = re.compile(r"\x1b\[(\d{0,3})C")  # "cursor forward": terminal recorders write blanks this way
_CSI = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]")
_OTHER_ESCAPE = re.compile(r"\x1b[@-Z\\^_=><()][0-9A-B]?")
_BARE_SGR = re.compile(r"\[\d{1,3}(?:;\d{1,3})*m")  # what is left of "ESC[4m" when a web form drops the ESC
_LINE_ENDS = re.compile(r"\r\n?|[\v\f\x1c-\x1e\x85\u2028\u2029]")
_BLANKS = re.compile(r"[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060\ufeff\x00-\x08\x0e-\x1b\x1f\x7f]")
_DASHES = re.compile(r"[\u2010-\u2015\u2212\ufe63\uff0d]")
_LITERAL_WHITE = re.compile(r"(?:GPU|NIC)\d+\\[tn]|\\[tn]\s*(?:GPU\d|NIC\d|X\b|NV\d|PIX|PXB|PHB|NODE|SYS|SOC)")
_TAGS = re.compile(r"</?(?:pre|code|span|p|div|b|i|u|em|strong|table|tbody|thead|details|summary|font)\b[^<>]*>", re.I)
_BREAK_TAGS = re.compile(r"<br\s*/?>|</tr\s*>|</p\s*>|</div\s*>", re.I)
_CELL_TAGS = re.compile(r"<(?:td|th)\b[^<>]*>", re.I)
_END_TAGS = re.compile(r"</(?:td|th)\s*>|<tr\b[^<>]*>", re.I)
_RULES = re.compile(r"[|\u2502\u2503\u2551]")
_ROW_START = re.compile(
    r"(?<=[ \t])(?:GPU\d+|NIC\d+|(?:mlx|rocep|ibp|roceo|rdmap|bnxt_re|hfi1_|efa_)\w+)[ \t]+"
    r"(?=(?:X|NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC)(?:[ \t]|$))"
)
_LEGEND_START = re.compile(r"(?<=\S)[ \t]+(?=(?:NIC )?Legend:)")


def decode(data: bytes) -> str:
    """Bytes of a file to text: UTF-8, or UTF-16 as PowerShell's ``>`` writes it. Never fails."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", errors="replace")
    if data[:200].count(b"\x00") > len(data[:200]) // 3:
        return data.decode("utf-16-le", errors="replace")
    return data.decode("utf-8-sig", errors="replace")


def clean_lines(text: str) -> list[str]:
    """The lines of a paste without escapes, markup and odd blanks; tabs stay, and table rules become tabs.

    Raises:
        TopologyError: far too long to be a paste.
    """
    if len(text) > MAX_CHARS:
        raise TopologyError(f"not a topology: {len(text):,} characters, more than any output of nvidia-smi topo -m")
    text = re.sub(_ESCAPE_NAMES, "\x1b", text)
    text = _OSC.sub("", text)
    text = _FORWARD.sub(lambda match: " " * int(match[1] or 1), text)
    text = _CSI.sub("", text)
    text = _OTHER_ESCAPE.sub("", text)
    text = _BARE_SGR.sub("", text)
    text = re.sub(r".\x08", "", text)  # underline by overstriking
    text = _LINE_ENDS.sub("\n", text)
    if "&" in text or "<" in text:
        text = _markup(text)
    text = _DASHES.sub("-", _INVISIBLE.sub("", _BLANKS.sub(" ", text)))
    text = text.replace("\\_", "_")  # markdown escapes the underscore of mlx5_0
    lines: list[str] = []
    for line in text.split("\n"):
        lines.extend(_unfold(line))
    return lines


def _markup(text: str) -> str:
    text = _BREAK_TAGS.sub("\n", text)
    text = _CELL_TAGS.sub("\t", text)
    text = _TAGS.sub("", _END_TAGS.sub("", text))
    return html.unescape(text)


def _unfold(line: str) -> list[str]:
    """The lines that a physical line stands for: quoted ``\\n`` and ``\\t`` undone, lost line ends put back."""
    if _LITERAL_WHITE.search(line):
        line = line.replace("\\r", "").replace("\\n", "\n").replace("\\t", "\t")
        return [part for piece in line.split("\n") for part in _unfold(piece)]
    line = _RULES.sub("\t", line)  # trailing blanks stay: they show that the last cell was not cut
    starts = [match.start() for match in _ROW_START.finditer(line)]
    # A single row start after something without a GPU is a row behind a log prefix; more is a flattened matrix.
    cuts = [at for number, at in enumerate(starts) if number > 0 or re.search(r"(?<![\w])GPU\d", line[:at])]
    pieces = [line[a:b] for a, b in zip([0, *cuts], [*cuts, len(line)], strict=True)]
    return [part for piece in pieces for part in _LEGEND_START.split(piece)]
