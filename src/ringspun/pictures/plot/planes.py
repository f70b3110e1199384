"""A mask and a layout: planes of cells, each as dark as it is full."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure as Drawing

from ringspun.pictures.figures.layout import LayoutFigure
from ringspun.pictures.figures.mask import MaskFigure
from ringspun.pictures.palette import BLUE, RED
from ringspun.pictures.plot.style import EMPTY, SHADES, bare, grouped, page, rank_ticks
from ringspun.pictures.units import count

MOST_LINES = 100
"""Edges of documents that are drawn."""
MOST_BARS = 600
"""Runs that are drawn one by one."""


def of_mask(figure: MaskFigure) -> Drawing:
    """Queries down, keys to the right."""
    drawing = page(figure, 5.6, "Which query sees which key")
    axes = drawing.subplots()
    queries, keys = np.array(figure.queries), np.array(figure.keys)
    area = np.maximum(np.outer(np.diff(queries), np.diff(keys)), 1)
    part = np.array(figure.allowed).reshape(area.shape) / area
    few = max(len(keys), len(queries)) <= 33
    mesh = axes.pcolormesh(
        keys, queries + figure.start, part, cmap=SHADES, vmin=0, vmax=1.25, edgecolors="white",
        linewidth=0.6 if few else 0,
    )  # fmt: skip
    axes.set(aspect="equal", xlabel="key", ylabel="query")
    grouped(axes.xaxis, axes.yaxis)
    axes.invert_yaxis()
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    bare(axes)
    told = f"{figure.pairs:,} pairs allowed, {figure.sparsity:.1%} hidden"
    axes.text(0, -0.02, told, transform=axes.transAxes, va="top", fontsize=8)
    if not figure.exact:
        bar = drawing.colorbar(mesh, ax=axes, shrink=0.4, aspect=18, pad=0.02, boundaries=np.linspace(0, 1, 101))
        bar.set_ticks([0, 0.5, 1], labels=["none", "half", "all"])
        bar.set_label("allowed of each cell")
        bar.outline.set_visible(False)
    return drawing


def of_layout(figure: LayoutFigure) -> Drawing:
    """The sequence to the right, a line for each rank."""
    rows = len(figure.ranks) - 1
    solid = 0 < len(figure.runs) <= MOST_BARS and rows == figure.ranks[-1] and all(r[3] == 1 for r in figure.runs)
    notes = [note for note in figure.notes if not (solid and note.startswith("each cell"))]
    drawing = page(figure, 0.6 + min(0.34 * rows, 5.5), "Who holds which tokens", notes)
    axes = drawing.subplots()
    if solid:
        axes.barh(range(rows), figure.columns[-1], color=EMPTY, height=0.72)
        for row in range(rows):
            mine = [(start, stop - start) for rank, start, stop, _ in figure.runs if rank == row]
            axes.broken_barh(mine, (row - 0.36, 0.72), facecolors=BLUE, edgecolor="white", linewidth=0.8)
    else:
        part = np.array(figure.held) / np.maximum(np.diff(figure.columns), 1)
        axes.pcolormesh(
            figure.columns, np.arange(rows + 1) - 0.5, part, cmap=SHADES, vmin=0, vmax=1.25, edgecolors="white",
            linewidth=1.0 if rows <= 32 else 0,
        )  # fmt: skip
    for start in figure.documents[1:] if len(figure.documents) <= MOST_LINES else ():
        axes.axvline(start, color=RED, linewidth=0.9, linestyle=(0, (3, 2)))
    axes.set(xlim=(0, figure.columns[-1]), ylim=(rows - 0.5, -0.5), xlabel="position in the sequence")
    grouped(axes.xaxis)
    if rows == figure.ranks[-1]:
        rank_ticks(axes, figure.ranks[:-1])
    else:
        every = -(-rows // 16)
        named = [f"ranks {a}-{b - 1}" for a, b in pairwise(figure.ranks)]
        axes.set_yticks(range(0, rows, every), named[::every])
    _tokens(axes.secondary_yaxis("right"), figure)
    bare(axes)
    if 1 < len(figure.documents) <= MOST_LINES:
        axes.set_xlabel("position in the sequence; dashed: where a document begins")
    return drawing


def _tokens(right: object, figure: LayoutFigure) -> None:
    every = -(-len(figure.tokens) // 16)
    places = range(0, len(figure.tokens), every)
    right.set_yticks(places, [count(figure.tokens[i]) for i in places])  # type: ignore[attr-defined]
    right.set_ylabel("tokens")  # type: ignore[attr-defined]
    right.spines[:].set_visible(False)  # type: ignore[attr-defined]
