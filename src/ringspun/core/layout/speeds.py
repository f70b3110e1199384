"""Ranks of unequal speed: what a list of speeds must be, and how tokens are cut in its proportion.

Only ratios count. They become whole weights once, by exact arithmetic, and everything after is integers, so that every
machine cuts alike.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.core.layout.base import Layout
from ringspun.errors import LayoutError

Weights = NDArray[np.int64]
"""Whole numbers ``[R]`` in proportion to the ranks' speeds; all 1 where all are equal."""
_SCALE = 1 << 30
"""What unequal weights add up to: fine enough for any ratio, small enough that products stay below 2**63."""


class UnequalRanks(Layout):
    """A layout with a field `speeds`."""

    speeds: tuple[float, ...] | None

    def __post_init__(self) -> None:
        if self.speeds is not None:
            object.__setattr__(self, "speeds", _checked(type(self).__name__, self.speeds))

    def weights(self, ring_size: int) -> Weights:
        """The speeds as whole weights, one per rank.

        Raises:
            LayoutError: another number of speeds than ranks.
        """
        if self.speeds is None:
            return np.ones(ring_size, np.int64)
        if len(self.speeds) != ring_size:
            raise LayoutError(
                f"{type(self).__name__} speeds must be one per rank; "
                f"got {len(self.speeds)} speeds for {ring_size} ranks."
            )
        if min(self.speeds) == max(self.speeds):
            return np.ones(ring_size, np.int64)
        sums = list(accumulate(map(Fraction, self.speeds), initial=Fraction(0)))
        edges: Weights = np.array([int(part * _SCALE / sums[-1]) for part in sums], np.int64)
        return edges[1:] - edges[:-1]


def _checked(name: str, speeds: Any) -> tuple[float, ...]:
    if isinstance(speeds, str | bytes) or not isinstance(speeds, Sequence | np.ndarray) or np.ndim(speeds) != 1:
        raise LayoutError(f"{name} speeds must be a sequence of numbers, one per rank; got {speeds!r}.")
    return tuple(_positive(name, speed) for speed in speeds)


def _positive(name: str, speed: Any) -> float:
    try:
        number = float(speed) if isinstance(speed, numbers.Real) and not isinstance(speed, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not (0 < number < math.inf):
        raise LayoutError(f"{name} speeds must be positive finite numbers; got {speed!r}.")
    return number


def are_even(weights: Weights) -> bool:
    """Whether all ranks are equally fast."""
    return bool((weights == weights[0]).all())


def share(tokens: NDArray[np.int64], weights: Weights) -> NDArray[np.int64]:
    """Edges ``[..., len(weights) + 1]`` that cut each number of `tokens` in proportion to `weights`, rounded down."""
    sums = np.append(0, np.cumsum(weights))
    whole, rest = np.divmod(tokens[..., None], sums[-1])  # so that no product leaves int64
    edges: NDArray[np.int64] = whole * sums + rest * sums // sums[-1]
    return edges
