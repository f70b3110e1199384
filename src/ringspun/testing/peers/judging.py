"""Errors of a peer against dense attention in float64, and where wrong begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core.reference import Reference
from ringspun.testing.cases import Case, Inputs, Shape, reference
from ringspun.testing.peers.on_ranks import NAMES, global_inputs
from ringspun.testing.timing import Work
from ringspun.testing.yardstick import dense

WRONG = 16.0
"""Times the error of dense attention in the same dtype. A ring that rounds between ranks stays below; a mistake is
thousands of times larger."""
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float64": 2.0**-53}


@dataclass(frozen=True)
class Judge:
    """The right answer to one piece of work.

    Args:
        oracle: float64. bars: of each tensor, from which on an error is wrong.
    """

    oracle: Reference
    bars: dict[str, float]

    @classmethod
    def of(cls, work: Work) -> Judge:
        """From the inputs that the ranks get."""
        q, k, v, dout = (x.double().numpy() for x in global_inputs(work))
        shape = Shape(work.batch, work.heads, work.kv_heads, work.head_size, work.head_size)
        case = Case(work.ranks, work.seq_len, work.mask, work.layout, work.dtype, shape, lse_gradient=False)
        given = Inputs(q, k, v, dout, np.zeros(q.shape[:3]))
        oracle, usual = reference(case, given), dense(case, given)
        floor = ROUNDING[work.dtype]
        bars = {name: WRONG * max(floor, _relative(usual[name], getattr(oracle, name))) for name in NAMES}
        return cls(oracle, bars)

    def errors(self, parts: list[tuple[np.ndarray, dict[str, np.ndarray]]]) -> dict[str, float]:
        """Largest error of each tensor over its largest entry, all ranks together; infinite where a token is missing,
        there twice, or NaN."""
        order = np.concatenate([positions for positions, _ in parts])
        found = {}
        for name in NAMES:
            right = getattr(self.oracle, name)
            whole = np.full_like(right, np.nan)
            if np.array_equal(np.sort(order), np.arange(right.shape[2])):
                whole[:, :, order] = np.concatenate([tensors[name] for _, tensors in parts], axis=2)
            found[name] = _relative(whole, right)
        return found

    def wrong(self, errors: dict[str, float]) -> list[str]:
        """The tensors that are wrong."""
        return [name for name in NAMES if not errors[name] <= self.bars[name]]


def _relative(x: np.ndarray, right: np.ndarray) -> float:
    error = float(np.abs(x - right).max() / np.abs(right).max())
    return error if np.isfinite(error) else float("inf")
