"""Results as figures, for `ringspun.pictures`: a heat map of exact answers, lines of losses."""

from __future__ import annotations

import math

from ringspun.evaluation.perplexity import LossByPosition
from ringspun.evaluation.retrieval import Grid
from ringspun.pictures.figures.evaluation import LossFigure, RetrievalFigure


def heatmap(grid: Grid, *, model: str = "", notes: tuple[str, ...] = ()) -> RetrievalFigure:
    """Exact answers by length and depth.

    Args:
        model: what was asked, in a few words. notes: how it was asked.
    """
    asked = sum(map(sum, grid.asked))
    words = f"{grid.task}: {sum(map(sum, grid.right)):,} of {asked:,} answers exact"
    intervals = tuple(grid.interval(seq_len) for seq_len in grid.seq_lens)
    return RetrievalFigure(_of(words, model), notes, grid.task, grid.seq_lens, grid.right, grid.asked, intervals)


def curves(loss: LossByPosition, *, model: str = "", notes: tuple[str, ...] = ()) -> LossFigure:
    """Mean losses by position, of those that are finite. Arguments as for `heatmap`."""
    *rows, means = (tuple(x if math.isfinite(x) else None for x in row) for row in (*loss.losses, loss.means))
    if None in means:
        notes = (*notes, "the model's loss is not a finite number everywhere")
    words = f"perplexity {loss.perplexity:,.4g} over {loss.seq_len:,} tokens"
    return LossFigure(_of(words, model), notes, loss.edges, loss.windows, tuple(rows), means)


def _of(words: str, model: str) -> str:
    return f"{words}, {model}" if model else words
