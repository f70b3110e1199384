"""A mask and a layout: planes of cells, each as dark as it is full."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from ringspun.pictures.figures.layout import LayoutFigure
from ringspun.pictures.figures.mask import MaskFigure
from ringspun.pictures.palette import BLUE
from ringspun.pictures.terminal.glyphs import SHADES, legend, shade
from ringspun.pictures.units import count

WIDTH = 64


def of_mask(figure: MaskFigure) -> list[Text]:
    """Queries down, keys to the right."""
    wide = 2 if 2 * (len(figure.keys) - 1) <= WIDTH else 1  # characters are about twice as high as wide
    label = len(f"{figure.queries[-1] + figure.start:,}")
    lines = [Text(" " * (label + 3) + _ruler(figure.keys, wide), style="dim")]
    for i, row in enumerate(figure.allowed):
        line = Text(f"{figure.queries[i] + figure.start:>{label},} │ ", style="dim")
        for j, pairs in enumerate(row):
            area = (figure.queries[i + 1] - figure.queries[i]) * (figure.keys[j + 1] - figure.keys[j])
            line.append(shade(pairs / max(area, 1)) * wide, style=BLUE if pairs else "dim")
        lines.append(line)
    told = f"queries down, keys right; {figure.pairs:,} pairs allowed, {figure.sparsity:.1%} hidden, "
    regions = "1 region" if figure.regions == 1 else f"{figure.regions:,} regions"
    return [*lines, Text(""), *_shades(figure.exact, "allowed"), Text(told + regions, style="dim")]


def of_layout(figure: LayoutFigure) -> list[Text]:
    """The sequence to the right, a line for each rank."""
    cells = len(figure.columns) - 1
    wide = max(1, min(4, WIDTH // max(cells, 1)))
    names = _names(figure.ranks)
    label = max(map(len, names), default=0)
    lines = [Text(" " * (label + 8) + _ruler(figure.columns, wide), style="dim")]
    for name, row, tokens in zip(names, figure.held, figure.tokens, strict=True):
        line = Text(f"{name:>{label}} {count(tokens):>6} ", style="dim")
        for held, (first, last) in zip(row, pairwise(figure.columns), strict=True):
            line.append(shade(held / (last - first)) * wide, style=BLUE if held else "dim")
        lines.append(line)
    exact = figure.columns[-1] == cells
    told = "the sequence to the right; beside each rank its tokens"
    return [*lines, Text(""), *_shades(exact and len(figure.ranks) > 1, "held"), Text(told, style="dim")]


def _names(ranks: Sequence[int]) -> list[str]:
    return [f"rank {a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(ranks)]


def _ruler(edges: Sequence[int], wide: int) -> str:
    """Every so many cells the position at which one begins."""
    room = max(8, len(f"{edges[-1]:,}") + 2)
    line, place = "", 0
    for i, edge in enumerate(edges[:-1]):
        if i * wide >= place:
            line = line.ljust(i * wide) + f"{edge:,}"
            place = i * wide + room
    return line[: (len(edges) - 1) * wide]


def _shades(exact: bool, word: str) -> list[Text]:
    if exact:
        return [legend((SHADES[-1], BLUE, word), (SHADES[0], "dim", "not"))]
    parts = ("none", "under 1/3", "under 2/3", "less than all", f"all {word}")
    return [legend(*((s, BLUE if i else "dim", w) for i, (s, w) in enumerate(zip(SHADES, parts, strict=True))))]
