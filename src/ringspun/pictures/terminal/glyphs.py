"""What things look like in one character."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from ringspun.pictures.figures.base import Kind
from ringspun.pictures.palette import KIND_COLOURS

KINDS: Mapping[Kind, str] = {
    Kind.IDLE: "·",
    Kind.FULL: "█",
    Kind.CAUSAL: "◣",
    Kind.ANTICAUSAL: "◥",
    Kind.BAND: "▚",
    Kind.MIXED: "▒",
}
SHADES = "·░▒▓█"
"""None, less than a third, less than two thirds, less than all, all."""
HEIGHTS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans({
    "·": ".", "█": "#", "◣": "L", "◥": "7", "▚": "\\", "▒": "+", "░": "-", "▓": "*", "│": "|", "─": "-", "→": ">",
    "▁": "_", "▂": "_", "▃": "-", "▄": "-", "▅": "=", "▆": "=", "▇": "#", "◀": "<", "╵": "'", "└": "+", "◆": "o",
})  # fmt: skip


def kind(of: Kind, width: int = 1) -> Text:
    """The glyph of a kind, in its colour."""
    return Text(KINDS[of] * width, style=KIND_COLOURS[of])


def shade(part: float) -> str:
    """How full a cell is, from 0 to 1."""
    if part <= 0:
        return SHADES[0]
    return SHADES[-1] if part >= 1 else SHADES[1 + min(int(3 * part), 2)]


def legend(*entries: tuple[str, str, str]) -> Text:
    """A line of (glyph, style, word)."""
    line = Text()
    for glyph, style, word in entries:
        line.append("   " if line else "")
        line.append(glyph, style=style)
        line.append(f" {word}", style="dim")
    return line


def in_ascii(text: Text) -> Text:
    """The same in ASCII, glyph by glyph."""
    return Text(text.plain.translate(_ASCII), style=text.style, spans=list(text.spans))
