"""What a model finds in its context, as a plane of cells; how well it predicts with it, as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from ringspun.pictures.figures.evaluation import LossFigure, RetrievalFigure
from ringspun.pictures.palette import BLUE
from ringspun.pictures.terminal.glyphs import SHADES, legend, shade

_MOST_NUMBERS = 10
"""Depths that have room for their numbers."""


def of_retrieval(figure: RetrievalFigure) -> list[Text]:
    """A line for each length, the document from its beginning to the right."""
    label = max(len(f"{seq_len:,}") for seq_len in figure.seq_lens)
    numbers = len(figure.depths) <= _MOST_NUMBERS
    heads = "".join(f"{depth:>5}" for depth in figure.depths) if numbers else "depth"
    lines = [Text(" " * (label + 1) + heads, style="dim")]
    for seq_len, right, asked in zip(figure.seq_lens, figure.right, figure.asked, strict=True):
        line = Text(f"{seq_len:>{label},} ", style="dim")
        for found, of in zip(right, asked, strict=True):
            glyph = shade(found / of) if of else " "
            line.append(glyph if not numbers else f" {glyph}", style=BLUE if found else "dim")
            line.append("" if not numbers else f"{100 * found // of:>3}" if of else "   ", style="")
        lines.append(line)
    totals = [
        Text(f"{seq_len:>{label},}  {sum(right):,} of {sum(asked):,} exact, {total:.1%} [{low:.1%}, {high:.1%}]")
        for seq_len, right, asked, total, (low, high) in zip(
            figure.seq_lens, figure.right, figure.asked, figure.totals, figure.intervals, strict=True
        )
    ]
    told = "tokens down, depth in the document right (percent); in brackets, 95 % intervals"
    parts = ("none", "under 1/3", "under 2/3", "less than all", "all exact")
    shades = legend(*((s, BLUE if i else "dim", word) for i, (s, word) in enumerate(zip(SHADES, parts, strict=True))))
    return [*lines, Text(""), *totals, Text(""), shades, Text(told, style="dim")]


def of_loss(figure: LossFigure) -> list[Text]:
    """A line for each bucket of positions."""
    heads = "".join(f"{name:>24}" for name in figure.contexts)
    lines = [Text(f"{'tokens':>17}{heads}", style="dim")]
    for i, (first, last) in enumerate(zip(figure.edges[:-1], figure.edges[1:], strict=True)):
        told = _told(row[i] for row in figure.losses)
        lines.append(Text(f"{f'{first:,}-{last - 1:,}':>17}{told}"))
    return [
        *lines,
        Text(f"{'all':>17}{_told(figure.means)}", style="bold"),
        Text(""),
        Text("loss in nats per token", style="dim"),
    ]


def _told(losses: Iterable[float | None]) -> str:
    return "".join(f"{'none' if loss is None else f'{loss:.4f}':>24}" for loss in losses)
