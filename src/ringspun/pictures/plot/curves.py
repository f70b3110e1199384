"""A training run: its panels one above the other, on one axis of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter

from ringspun.pictures.figures.run import Panel, RunFigure, shown
from ringspun.pictures.palette import BLUE, GREEN, ORANGE, PURPLE, RED, SKY
from ringspun.pictures.plot.style import LINE, PALE, grouped, page

FEW = 40
"""Points that are drawn as dots, too."""
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
_STYLES = ("-", "--", ":", "-.")


def of_run(figure: RunFigure) -> Drawing:
    """Curves of each stage apart; a dotted line where a stage begins."""
    drawing = page(figure, 0.4 + 1.5 * len(figure.panels), "A training run")
    panels = np.atleast_1d(drawing.subplots(len(figure.panels), 1, sharex=True))
    for axes, panel in zip(panels, figure.panels, strict=True):
        _panel(axes, panel)
        for stage in figure.stages[1:]:
            axes.axvline(stage.first_step - 1, color=PALE, linewidth=0.9, linestyle=(0, (1, 2)))
    for stage in figure.stages if len(figure.stages) > 1 else ():
        words = f"{stage.seq_len:,} tokens" if stage.seq_len else f"stage {stage.number + 1}"
        panels[0].annotate(words, (stage.first_step - 1, 1), (3, -2), ("data", "axes fraction"), "offset points",
                           va="top", fontsize=7, color=PALE)  # fmt: skip
    panels[-1].set(
        xlim=(0, max(figure.steps, 1)), xlabel="step; dotted: a stage begins" if figure.stages[1:] else "step"
    )
    grouped(panels[-1].xaxis)
    return drawing


def _panel(axes: Axes, panel: Panel) -> None:
    for i, name in enumerate(panel.names):
        style: Any = {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _STYLES[i % len(_STYLES)], "linewidth": 1.4}
        for n, curve in enumerate(c for c in panel.curves if c.name == name):
            dots = "." if len(curve.steps) <= FEW else None
            axes.plot(curve.steps, curve.values, marker=dots, markersize=4, label=None if n else name, **style)
    axes.set_title(panel.title)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, panel.unit)))
    if panel.unit:
        axes.set_ylim(bottom=0)
    if len(panel.names) > 1:
        axes.legend(loc="best", handlelength=2)
