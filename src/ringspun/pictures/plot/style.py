"""How all pictures look: quiet axes, words at the left, one blue."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from ringspun.pictures.figures.base import Figure
from ringspun.pictures.palette import BLUE

INK, PALE, LINE = "#1A1A1A", "#6B6B6B", "#D8D8D8"
EMPTY = "#F2F2F2"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": PALE,
    "axes.labelsize": 9,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "ringspun",
    "svg.fonttype": "none",
}
SHADES = LinearSegmentedColormap.from_list("ringspun", [EMPTY, "#A9CCE6", "#4C97CB", BLUE, "#00385A"])
STEPS = LinearSegmentedColormap.from_list(
    "ringspun-steps", ["#00385A", BLUE, "#56B4E9", "#9BCFB8", "#F0E442", "#E69F00"]
)
"""From the first step to the last: dark to light in grey, too."""
WIDE = 8.0
"""Inches of a picture."""


def page(figure: Figure, height: float, name: str, notes: Sequence[str] | None = None) -> Drawing:
    """An empty picture with its words: what it is, of what, and what it sums up.

    Args:
        height: of all but the words (inches). notes: default all of the figure's.
    """
    told = figure.notes if notes is None else notes
    words = "\n".join([fill(figure.words, 100), *(fill(f"({note})", 100) for note in told)])
    top = 0.62 + 0.18 * (words.count("\n") + 1)
    height += top
    drawing = Drawing(figsize=(WIDE, height))
    drawing.set_layout_engine("constrained", rect=(0, 0, 1, 1 - top / height))
    drawing.text(0.012, 1 - 0.1 / height, name, ha="left", va="top", fontsize=13, fontweight="bold")
    drawing.text(0.012, 1 - 0.38 / height, words, ha="left", va="top", fontsize=9, color=PALE)
    return drawing


def bare(axes: Axes) -> None:
    """No frame."""
    axes.spines[:].set_visible(False)


def grouped(*axis: Axis) -> None:
    """Whole numbers with their thousands parted."""
    for one in axis:
        one.set_major_locator(MaxNLocator(integer=True))
        one.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def rank_ticks(axes: Axes, ranks: Sequence[int], places: Sequence[float] | None = None) -> None:
    """Ranks down the side: all, or as many as can be read."""
    every = -(-len(ranks) // 16)
    where = list(range(len(ranks)) if places is None else places)
    axes.set_yticks(where[::every], [f"rank {r}" for r in ranks[::every]])
