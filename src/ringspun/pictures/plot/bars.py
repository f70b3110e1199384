"""Memory, time and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Patch

from ringspun.pictures.figures.compare import CompareFigure, Way
from ringspun.pictures.figures.memory import MemoryFigure
from ringspun.pictures.figures.timeline import Run, TimelineFigure
from ringspun.pictures.palette import BLUE, GREEN, ITEM_COLOURS, ITEM_WORDS, ORANGE, SKY
from ringspun.pictures.plot.style import EMPTY, INK, LINE, PALE, bare, page, rank_ticks
from ringspun.pictures.units import n_bytes, seconds

FAR = 2.2
"""Times the fullest bar beyond which one rank alone is told, not drawn."""


def of_memory(figure: MemoryFigure) -> Drawing:
    """Stacked bars, a line for each rank; a mark for one rank alone."""
    rows = len(figure.ranks)
    drawing = page(figure, 0.8 + min(0.3 * rows, 5), "What each rank holds at the worst moment")
    axes = drawing.subplots()
    held, left = np.array(figure.held).reshape(rows, -1), np.zeros(rows)
    for i, item in enumerate(figure.items):
        if held[:, i].any():
            axes.barh(range(rows), held[:, i], left=left, color=ITEM_COLOURS[item], height=0.72, label=ITEM_WORDS[item])
        left = left + held[:, i]
    for row in range(rows) if rows <= 32 else ():
        axes.text(left[row], row, f" {n_bytes(left[row])}", va="center", fontsize=8)
    most, alone = float(left.max(initial=1)), sum(figure.whole)
    if alone <= FAR * most:
        axes.axvline(alone, color=INK, linewidth=1, linestyle=(0, (3, 2)))
    told = (
        f"one rank with the whole sequence: {n_bytes(alone)}; the fullest of the ring holds {most / max(alone, 1):.0%}"
    )
    axes.set_title(told, fontsize=9, fontweight="normal", color=PALE)
    axes.set(xlim=(0, max(1.18 * most, 1.05 * alone if alone <= FAR * most else 0)), ylim=(rows - 0.4, -0.6), xticks=[])
    rank_ticks(axes, figure.ranks)
    bare(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.02), ncols=5, handlelength=1, handleheight=1, columnspacing=1.2)
    return drawing


def of_timeline(figure: TimelineFigure) -> Drawing:
    """A line for each rank of each run, all on one axis."""
    rows = len(figure.ranks)
    drawing = page(figure, 0.7 + len(figure.runs) * (0.5 + min(0.32 * rows, 4)), "What each rank does when")
    panels = np.atleast_1d(drawing.subplots(len(figure.runs), 1, sharex=True))
    for axes, run in zip(panels, figure.runs, strict=True):
        _run(axes, run, figure.ranks)
    whole = max(run.total_s for run in figure.runs)
    panels[-1].set_xlim(0, whole)
    ticks = [x for x in panels[-1].get_xticks() if 0 <= x <= whole]
    panels[-1].set_xticks(ticks, [seconds(x) if x else "0" for x in ticks])
    patches = [
        Patch(color=BLUE, label="computes, even steps"), Patch(color=SKY, label="odd steps"),
        Patch(facecolor=EMPTY, edgecolor=LINE, hatch="////", label="waits"),
        Patch(color=ORANGE, label="a message comes in"),
    ]  # fmt: skip
    drawing.legend(handles=patches, loc="outside lower left", ncols=4, handlelength=1, handleheight=1)
    return drawing


def _run(axes: Axes, run: Run, ranks: Sequence[int]) -> None:
    for row, rank in enumerate(ranks):
        mine = [s for s in run.spans if s.ring_rank == rank]
        here = (row - 0.4, 0.56)
        waits = [(s.start_s, s.end_s - s.start_s) for s in mine if s.what == "wait"]
        axes.broken_barh(waits, here, facecolors=EMPTY, edgecolor=LINE, hatch="////", linewidth=0)
        for parity, colour in ((0, BLUE), (1, SKY)):
            spans = [(s.start_s, s.end_s - s.start_s) for s in mine if s.what == "compute" and s.step % 2 == parity]
            axes.broken_barh(spans, here, facecolors=colour, linewidth=0)
        comes = [(t.start_s, t.end_s - t.start_s) for t in run.transfers if t.receiver == rank]
        axes.broken_barh(comes, (row + 0.2, 0.14), facecolors=ORANGE, linewidth=0)
    parts = " + ".join(f"{word} {seconds(s)}" for word, s in zip(("forward", "backward"), run.seconds, strict=False))
    axes.set_title(f"{run.name}: {parts}")
    if len(run.seconds) > 1:
        axes.axvline(run.seconds[0], color=INK, linewidth=0.8)
    axes.set_ylim(len(ranks) - 0.5, -0.6)
    rank_ticks(axes, ranks)
    bare(axes)


def of_compare(figure: CompareFigure) -> Drawing:
    """A line for each way; a panel for each number, all from zero."""
    rows = len(figure.ways)
    drawing = page(figure, 1.0 + 0.5 * rows, "Which one for this")
    panels = drawing.subplots(1, 4, sharey=True, width_ratios=[1.5, 1.2, 1, 1])
    named = [f"{w.layout}\n{w.route}" for w in figure.ways]
    _bars(panels[0], figure.ways, lambda w: w.seconds, seconds, "time, predicted", quickest=figure.quickest)
    _imbalance(panels[1], figure.ways)
    _bars(panels[2], figure.ways, lambda w: w.sent_bytes, n_bytes, "a rank sends")
    _bars(panels[3], figure.ways, lambda w: [w.memory_bytes], n_bytes, "a rank holds")
    panels[0].set_yticks(range(rows), named)
    for label in [panels[0].get_yticklabels()[figure.quickest]] if rows > 1 else ():
        label.set(fontweight="bold", color=INK)
    panels[0].set_ylim(rows - 0.5, -0.5)
    patches = [Patch(color=BLUE, label="forward, or both together"), Patch(color=ORANGE, label="backward")]
    drawing.legend(handles=patches, loc="outside lower left", ncols=2, handlelength=1, handleheight=1)
    return drawing


def _imbalance(axes: Axes, ways: Sequence[Way]) -> None:
    """Most over mean of each step of forward as little bars, and what waiting comes to."""
    most = max(max(way.imbalance) - 1 for way in ways) or 1.0
    for row, way in enumerate(ways):
        places = (np.arange(len(way.imbalance)) + 0.5) / len(way.imbalance)
        heights = 0.55 * (np.array(way.imbalance) - 1) / most
        axes.bar(places, -heights, bottom=row + 0.3, width=0.8 / len(places), color=GREEN)
        axes.plot([0, 1], [row + 0.3] * 2, color=LINE, linewidth=0.8)
        axes.text(1.05, row, f"{max(way.wait):.2f}", va="center", fontsize=8)
    axes.set_title("waiting, x balance", fontsize=9)
    axes.set_xlabel("step by step")
    axes.set(xlim=(0, 1.35), xticks=[])
    bare(axes)


def _bars(
    axes: Axes, ways: Sequence[Way], numbers: Callable[[Way], Sequence[float]], words: Callable[[float], str],
    title: str, *, quickest: int | None = None,
) -> None:  # fmt: skip
    most = max((sum(numbers(way)) for way in ways), default=1) or 1
    for row, way in enumerate(ways):
        left = 0.0
        for value, colour in zip(numbers(way), (BLUE, ORANGE), strict=False):
            axes.barh(row, value, left=left, color=colour, height=0.6)
            left += value
        bold = "bold" if row == quickest and len(ways) > 1 else "normal"
        axes.text(left + 0.02 * most, row, words(left), va="center", fontsize=8, fontweight=bold)
    axes.set_title(title, fontsize=9)
    axes.set(xlim=(0, 1.45 * most), xticks=[])
    bare(axes)
