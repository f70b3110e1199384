"""What a model finds in its context, as a heat map; how well it predicts with it, as lines."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Drawing

from ringspun.pictures.figures.evaluation import LossFigure, RetrievalFigure
from ringspun.pictures.palette import BLUE, GREEN, ORANGE, PURPLE, RED, SKY
from ringspun.pictures.plot.style import INK, SHADES, bare, grouped, page

_DARK = 0.7
"""Shares from which a cell is so dark that its number is white."""


def of_retrieval(figure: RetrievalFigure) -> Drawing:
    """Lengths to the right, depths down, the beginning of the document at the top."""
    asked = np.array(figure.asked).T
    share = np.ma.masked_where(asked == 0, np.array(figure.right).T / np.maximum(asked, 1))
    drawing = page(figure, 0.9 + min(0.34 * len(share), 6), "Exact answers, by length and depth")
    axes = drawing.subplots()
    axes.pcolormesh(share, cmap=SHADES, vmin=0, vmax=1.25, edgecolors="white", linewidth=1)
    for (depth, length), part in np.ndenumerate(share.filled(-1)):
        if part >= 0:
            colour = "white" if part >= _DARK else INK
            axes.text(length + 0.5, depth + 0.5, f"{part:.0%}", ha="center", va="center", fontsize=8, color=colour)
    columns = zip(figure.seq_lens, figure.totals, figure.intervals, strict=True)
    axes.set_xticks(
        np.arange(len(figure.seq_lens)) + 0.5,
        [f"{seq_len:,}\n{total:.1%}\n[{low:.1%}, {high:.1%}]" for seq_len, total, (low, high) in columns],
    )
    axes.set_yticks(range(len(share)), [f"{depth} %" for depth in figure.depths])
    axes.set(xlabel="tokens; all depths together, 95 % interval", ylabel="depth of what is asked for")
    axes.invert_yaxis()
    bare(axes)
    return drawing


def of_loss(figure: LossFigure) -> Drawing:
    """Positions to the right, nats up."""
    drawing = page(figure, 3.2, "Loss by position")
    axes = drawing.subplots()
    middles = (np.array(figure.edges[:-1]) + np.array(figure.edges[1:])) / 2
    rows = zip(figure.contexts, figure.losses, figure.means, strict=True)
    colours = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
    for i, (name, row, mean) in enumerate(rows):
        values = [np.nan if x is None else x for x in row]
        told = "none" if mean is None else f"{mean:.3f}"
        axes.plot(middles, values, color=colours[i % len(colours)], marker="o", label=f"{name}: {told} in the mean")
    axes.set(xlim=(0, figure.edges[-1]), xlabel="position (tokens)", ylabel="loss (nats)")
    grouped(axes.xaxis)
    axes.legend()
    return drawing
