"""Biases: what positions add to the scores."""

from __future__ import annotations

from dataclasses import dataclass

from jax import Array


@dataclass(frozen=True, eq=False)  # holds an array, whose == is no truth value
class Alibi:
    """Attention with linear biases: ``-slope[h] * |q - k|`` is added to the scores of head h.

    Args:
        slopes: ``[H]``, positive where far keys count less. A parameter, if you like: it has a gradient.

    Source: arXiv 2108.12409, there for causal masks; the absolute value is what others made of it for full ones.
    """

    slopes: Array
