"""The softmax monoid: partial attention results ``(out, lse)`` and how two of them become one.

`out` is normalised over the keys seen so far, `lse` is the natural log of the sum of exponentials of their scores. The
merge is associative, commutative up to rounding, and ``(0, -inf)`` (no key seen) is its identity on both sides, bit for
bit. A zero weight selects, it does not multiply: whatever an empty part holds, it cannot spread.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.errors import PlanError

SMALLEST_SOFTCAP, LARGEST_SOFTCAP = 1e-30, 1e30
"""Beyond them float32 scores become 0 / 0 or inf * 0."""
Array = NDArray[np.floating]


def identity(out_shape: tuple[int, ...], dtype: type[np.floating] = np.float64) -> tuple[Array, Array]:
    """The partial result of no keys: zeros ``[..., T, D]`` and -inf ``[..., T]``."""
    return np.zeros(out_shape, dtype), np.full(out_shape[:-1], -np.inf, dtype)


def merge(out1: Array, lse1: Array, out2: Array, lse2: Array) -> tuple[Array, Array]:
    """One partial result from two over disjoint keys. `out` is ``[..., T, D]``, `lse` ``[..., T]``."""
    lse = np.logaddexp(lse1, lse2)
    safe = np.where(np.isneginf(lse), 0, lse)
    w1, w2 = np.exp(lse1 - safe)[..., None], np.exp(lse2 - safe)[..., None]
    out = np.where(w1 == 0, 0, out1 * w1) + np.where(w2 == 0, 0, out2 * w2)
    return out, lse


def checked_softcap(softcap: Any) -> float:
    """The bound of scores; 0 for none.

    Raises:
        PlanError: what is no such bound.
    """
    if softcap is None:
        return 0.0
    number = isinstance(softcap, numbers.Real) and not isinstance(softcap, bool)
    if not number or not SMALLEST_SOFTCAP <= softcap <= LARGEST_SOFTCAP:  # nan too
        raise PlanError(f"softcap must be a number from 1e-30 to 1e30, or None for none; got {softcap!r}.")
    return float(softcap)
