"""Tables that lose nothing in a narrow terminal or a file."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.segment import Segments

_WIDTH = 400  # columns


def print_wide(console: Console, content: RenderableType) -> None:
    """Print without squeezing: a squeezed table loses cells, lines that the terminal wraps itself do not."""
    segments = console.render(content, console.options.update_width(_WIDTH))
    console.print(Segments(segments), end="", soft_wrap=True)
