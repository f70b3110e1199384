"""A schedule and its balance: the score matrix, and a line for each rank with a column for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection, PolyCollection
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Patch, Polygon
from numpy.typing import NDArray

from ringspun.pictures.figures.balance import BalanceFigure, PassBalance
from ringspun.pictures.figures.base import Kind
from ringspun.pictures.figures.schedule import PassFigure, ScheduleFigure, outline
from ringspun.pictures.palette import BLUE, KIND_COLOURS, ORANGE
from ringspun.pictures.plot.style import EMPTY, INK, PALE, SHADES, STEPS, bare, grouped, page, rank_ticks
from ringspun.pictures.units import count, n_bytes

MOST_NUMBERS = 10
"""Columns and rows of cells that have numbers in them."""
MOST_LINKS = 12
_SHAPES: Mapping[Kind, Sequence[tuple[float, float]]] = {
    Kind.FULL: [(0, 0), (1, 0), (1, 1), (0, 1)],
    Kind.CAUSAL: [(0, 0), (0, 1), (1, 1)],
    Kind.ANTICAUSAL: [(0, 0), (1, 0), (1, 1)],
    Kind.BAND: [(0, 0), (0.45, 0), (1, 0.55), (1, 1), (0.55, 1), (0, 0.45)],
    Kind.MIXED: [(0, 0), (0.3, 0), (0.3, 0.3), (0.65, 0.3), (0.65, 0.65), (1, 0.65), (1, 1), (0, 1)],
}
"""Of a cell (right, down)."""
_MIDDLES = {Kind.CAUSAL: (0.32, 0.7), Kind.ANTICAUSAL: (0.68, 0.33)}


def of_schedule(figure: ScheduleFigure) -> Drawing:
    """The score matrix by steps at the left, what each rank computes at each step at the right."""
    drawing = page(figure, 4.9, "What is computed when")
    if figure.forward.tiles:
        grid = drawing.subplot_mosaic([["matrix", "forward"], ["matrix", "backward"]], width_ratios=[1.25, 1])
        _matrix(grid["matrix"], figure)
    else:
        grid = drawing.subplot_mosaic([["forward", "backward"]])
    for name, one in (("forward", figure.forward), ("backward", figure.backward)):
        _kinds(grid[name], figure, one)
        what = "keys and values" if one.travels == "keys" else "queries"
        grid[name].set_title(f"{name}: {what} travel")
    shown = {k for one in (figure.forward, figure.backward) for row in one.kinds for k in row} - {Kind.IDLE}
    patches = [Patch(color=KIND_COLOURS[k], label=k.value) for k in Kind if k in shown]
    drawing.legend(handles=patches, loc="outside lower right", ncols=5, handlelength=1, handleheight=1)
    return drawing


def _matrix(axes: Axes, figure: ScheduleFigure) -> None:
    one = figure.forward
    last = max(one.steps[-1] - 1, 1)
    axes.add_patch(Polygon([(0, 0), (figure.keys, 0), (figure.keys, figure.queries), (0, figure.queries)], fc=EMPTY))
    corners = [[(k, q) for q, k in outline(tile)] for tile in one.tiles]
    colours = [STEPS(tile[1] / last) for tile in one.tiles]
    axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.5))
    if figure.ring_size <= MOST_NUMBERS:
        _numbers(axes, figure)
    axes.set(xlim=(0, figure.keys), ylim=(figure.queries, 0), aspect="equal", ylabel=f"query, {_order(figure)}")
    axes.xaxis.tick_top()
    bare(axes)
    swatches = min(one.steps[-1], 8)
    named = np.unique(np.linspace(0, one.steps[-1] - 1, swatches).astype(int)).tolist()
    patches = [Patch(color=STEPS(step / last), label=f"step {step}") for step in named]
    axes.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(0, -0.02), ncols=4, handlelength=1, handleheight=1,
        borderaxespad=0, title="forward; in each tile, the rank that computes it", title_fontsize=8, alignment="left",
    )  # fmt: skip
    grouped(axes.xaxis, axes.yaxis)


def _order(figure: ScheduleFigure) -> str:
    return "in the sequence's order" if figure.order == "sequence" else "rank by rank"


def _numbers(axes: Axes, figure: ScheduleFigure) -> None:
    """The rank in each tile that is large enough."""
    least = max(figure.queries, figure.keys) / 24
    last = max(figure.forward.steps[-1] - 1, 1)
    for tile in figure.forward.tiles:
        q, k = _middle(np.array(outline(tile)))
        if min(tile[4] - tile[3], tile[6] - tile[5]) < least:
            continue
        red, green, blue, _ = STEPS(tile[1] / last)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        axes.text(k, q, str(tile[0]), ha="center", va="center", fontsize=7, color="white" if dark else INK)


def _middle(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """The centre of mass of a polygon, by triangles from its first corner."""
    first, second = corners[1:-1] - corners[0], corners[2:] - corners[0]
    areas = np.abs(first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0])
    middle: NDArray[np.float64] = corners[0] + ((first + second) * areas[:, None]).sum(0) / (3 * areas.sum())
    return middle


def _kinds(axes: Axes, figure: ScheduleFigure, one: PassFigure) -> None:
    columns, rows = len(one.steps) - 1, len(figure.ranks)
    numbers = columns == one.steps[-1] <= MOST_NUMBERS + 1 and rows <= MOST_NUMBERS
    patches: list[Polygon] = []
    for row, kinds in enumerate(one.kinds):
        for column, kind in enumerate(kinds):
            patches.append(_cell(_SHAPES[Kind.FULL], column, row, EMPTY))
            if kind != Kind.IDLE:
                patches.append(_cell(_SHAPES[kind], column, row, KIND_COLOURS[kind]))
            source = one.sources[row][column]
            if numbers and source >= 0 and kind != Kind.IDLE:
                x, y = _MIDDLES.get(kind, (0.5, 0.5))
                axes.text(column + x, row + y, str(source), ha="center", va="center", fontsize=7, color=_on(kind))
    axes.add_collection(PatchCollection(patches, match_original=True))
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    rank_ticks(axes, figure.ranks, [i + 0.5 for i in range(rows)])
    _step_ticks(axes, one.steps, 0.5)
    label = "step" + (f"; in each cell, whose {'keys' if one.travels == 'keys' else 'queries'}" if numbers else "")
    axes.set_xlabel(label)
    bare(axes)


def _on(kind: Kind) -> str:
    return "white" if kind in (Kind.FULL, Kind.ANTICAUSAL) else INK


def _cell(shape: Sequence[tuple[float, float]], column: int, row: int, colour: str) -> Polygon:
    inset = 0.06
    scale = 1 - 2 * inset
    return Polygon([(column + inset + scale * x, row + inset + scale * y) for x, y in shape], fc=colour, ec="none")


def _step_ticks(axes: Axes, steps: tuple[int, ...], shift: float) -> None:
    columns = len(steps) - 1
    every = -(-columns // 12)
    axes.set_xticks([i + shift for i in range(0, columns, every)], [str(steps[i]) for i in range(0, columns, every)])


def of_balance(figure: BalanceFigure) -> Drawing:
    """Pairs of each rank and step above, most over mean of each step in the middle, bytes of links below."""
    rows = len(figure.ranks)
    links = figure.links[:MOST_LINKS]
    heights = [max(1.2, min(0.3 * rows, 3.2)), 0.9, max(0.6, 0.22 * len(links))]
    drawing = page(figure, sum(heights) + 1.7, "Who works how much, and what goes over the links")
    names: Any = [["forward", "backward"], ["f", "b"], ["links", "links"]]
    grid = drawing.subplot_mosaic(names, height_ratios=heights)
    most = max((max(row, default=0) for one in (figure.forward, figure.backward) for row in one.pairs), default=1) or 1
    for name, short in (("forward", "f"), ("backward", "b")):
        one = figure.forward if name == "forward" else figure.backward
        _pairs(grid[name], figure, one, most)
        grid[name].set_title(f"{name}: pairs of a head")
        _imbalance(grid[short], one)
    _links(grid["links"], links, len(figure.links))
    patches = [Patch(color=BLUE, label="forward"), Patch(color=ORANGE, label="backward")]
    drawing.legend(handles=patches, loc="outside lower right", ncols=2, handlelength=1, handleheight=1)
    return drawing


def _pairs(axes: Axes, figure: BalanceFigure, one: PassBalance, most: int) -> None:
    part = np.array(one.pairs) / most
    rows, columns = part.shape
    axes.pcolormesh(part, cmap=SHADES, vmin=0, vmax=1.25, edgecolors="white", linewidth=1.0 if rows <= 32 else 0)
    if rows <= MOST_NUMBERS and columns <= MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(np.array(one.pairs)):
            colour = "white" if part[row, column] > 0.55 else INK
            axes.text(column + 0.5, row + 0.5, count(int(value)), ha="center", va="center", fontsize=7, color=colour)
    axes.invert_yaxis()
    rank_ticks(axes, figure.ranks, [i + 0.5 for i in range(rows)])
    _step_ticks(axes, one.steps, 0.5)
    bare(axes)


def _imbalance(axes: Axes, one: PassBalance) -> None:
    found = [max(one.imbalance[a:b]) for a, b in pairwise(one.steps)]
    axes.bar(range(len(found)), [x - 1 for x in found], bottom=1, color=ORANGE, width=0.8)
    axes.axhline(1, color=PALE, linewidth=0.8)
    axes.set(xlim=(-0.5, len(found) - 0.5), ylim=(0.98, max(*found, 1.5) * 1.06), xlabel="step")
    axes.set_ylabel("most / mean")
    told = f"waiting for the busiest at every step: {one.wait:.2f} x balance"
    axes.text(0.0, 1.02, told, transform=axes.transAxes, ha="left", va="bottom", fontsize=8, color=PALE)
    _step_ticks(axes, one.steps, 0.0)


def _links(axes: Axes, links: tuple[tuple[int, ...], ...], count_of_all: int) -> None:
    named = [f"{a} → {b}" for a, b, _, _ in links]
    forward, backward = (np.array([link[i] for link in links]) for i in (2, 3))
    axes.barh(named, forward, color=BLUE, height=0.7)
    axes.barh(named, backward, left=forward, color=ORANGE, height=0.7)
    for i, (a, b) in enumerate(zip(forward.tolist(), backward.tolist(), strict=True)):
        axes.text(a + b, i, f" {n_bytes(a)} + {n_bytes(b)}", va="center", fontsize=7)
    axes.invert_yaxis()
    axes.set_xticks([])
    left = count_of_all - len(links)
    axes.set_title("bytes of a link" + (f"; {left:,} more have no more" if left else ""))
    axes.set_xlim(0, 1.25 * max((forward + backward).tolist(), default=1))
    bare(axes)
