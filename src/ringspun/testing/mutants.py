"""Planted faults: the mistakes that attention on a ring is usually made with, each in a line or two.

What looks for mistakes is worth something only if it is seen to find them: the conformance suite has to fail every
mutant, by the property that the mutant names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringspun.core.mask import And, Band, Causal, Documents, Or, Window
from ringspun.testing.miniature import Array, Miniature
from ringspun.testing.problem import Problem
from ringspun.testing.yardstick import round_to


class Mutant(Miniature):
    """A ring with one mistake; `found_by` is the property that has to tell."""

    found_by: str


class DroppedTile(Mutant):
    """One rank skips one step."""

    found_by = "full attention"

    def computes(self, rank: int, step: int) -> bool:
        return (rank, step) != (2, 1)


class SwappedBlocks(Mutant):
    """The keys of two ranks arrive in each other's place."""

    found_by = "causal"

    def held(self, rank: int, step: int) -> int:
        return {1: 2, 2: 1}.get(self.source(rank, step), self.source(rank, step))


class StaleBuffer(Mutant):
    """The last step computes with the block of the step before."""

    found_by = "full attention"

    def held(self, rank: int, step: int) -> int:
        return self.source(rank, step - 1 if step == self.ranks - 1 else step)


class LayoutNotUndone(Mutant):
    """Results stay in the order of the ranks."""

    found_by = "full attention"

    def gathered(self, parts: list[Array], rows: list[Array]) -> Array:
        return np.concatenate(parts, 2)


class ZeroedGradient(Mutant):
    """The share of one step never comes home."""

    found_by = "full attention"

    def share(self, rank: int, step: int) -> float:
        return float((rank, step) != (1, 1))


class SharesTwice(Mutant):
    """A rank's own share of dk and dv is added before the journey and after it."""

    found_by = "full attention"

    def share(self, rank: int, step: int) -> float:
        return 2.0 if step == 0 else 1.0


class ScaledGradientOfOneHead(Mutant):
    """A right forward; dk of one head is a thousandth too large."""

    found_by = "full attention"

    def backward(self, *given: Any) -> dict[str, Array]:
        grads = super().backward(*given)
        grads["dk"][:, min(1, grads["dk"].shape[1] - 1)] *= 1.001
        return grads


class NotRescaled(Mutant):
    """Partial results are added, not merged."""

    found_by = "full attention"

    def merged(
        self, problem: Problem, one: tuple[Array, Array], two: tuple[Array, Array], step: int
    ) -> tuple[Array, Array]:
        return one[0] + two[0], super().merged(problem, one, two, step)[1]


class BaseTwo(Mutant):
    """lse is a logarithm to base 2."""

    found_by = "full attention"

    def told(self, lse: Array) -> Array:
        return np.asarray(lse / np.log(2))


class LseOfNothing(Mutant):
    """lse is 0 in rows without keys."""

    found_by = "rows without keys"

    def told(self, lse: Array) -> Array:
        return np.where(np.isneginf(lse), 0, lse)


class LargeForInfinite(Mutant):
    """-1e9 for -inf: a row without keys becomes the mean of all values."""

    found_by = "rows without keys"
    hidden = -1e9


class ReadsPadding(Mutant):
    """Hidden numbers are multiplied by 0 instead of left out."""

    found_by = "padding is never read"

    def clean(self, x: Array, read: Array) -> Array:
        return x


class NoMaximum(Mutant):
    """exp of the scores as they are."""

    found_by = "large scores"

    def shifted(self, scores: Array) -> Array:
        return np.zeros(scores.shape[:-1], scores.dtype)


class StrictlyCausal(Mutant):
    """< for <=: a query does not see itself."""

    found_by = "causal"

    def allowed(self, problem: Problem) -> Array:
        seen = super().allowed(problem)
        return np.tril(seen, -1) if problem.mask == Causal() else seen


class PastAndFuture(Mutant):
    """Queries see what comes after them."""

    found_by = "causal"

    def allowed(self, problem: Problem) -> Array:
        seen = super().allowed(problem)
        return np.triu(np.ones_like(seen)) if problem.mask == Causal() else seen


class WindowOffByOne(Mutant):
    """A window of w shows w keys before the query, not w - 1."""

    found_by = "sliding window"

    def allowed(self, problem: Problem) -> Array:
        if not isinstance(problem.mask, Window):
            return super().allowed(problem)
        return Window(1 + (problem.mask.size or 0)).as_array(*_sizes(problem), q_start=problem.query_start)[None, None]


class SidesSwapped(Mutant):
    """The left and right reach of a window are taken for each other."""

    found_by = "two-sided window"

    def allowed(self, problem: Problem) -> Array:
        if not isinstance(problem.mask, Band):
            return super().allowed(problem)
        return Band(problem.mask.right, problem.mask.left).as_array(*_sizes(problem))[None, None]


class OneDocument(Mutant):
    """A causal mask makes the boundaries of documents forgotten."""

    found_by = "documents"

    def allowed(self, problem: Problem) -> Array:
        mask = problem.mask
        if not (isinstance(mask, And) and Causal() in mask.masks and any(isinstance(m, Documents) for m in mask.masks)):
            return super().allowed(problem)
        return Causal().as_array(*_sizes(problem), q_start=problem.query_start)[None, None]


class HalfOfAnOr(Mutant):
    """Of a mask a | b only a is computed."""

    found_by = "prefix"

    def allowed(self, problem: Problem) -> Array:
        if not isinstance(problem.mask, Or):
            return super().allowed(problem)
        return problem.mask.masks[0].as_array(*_sizes(problem), q_start=problem.query_start)[None, None]


class LastBlockCut(Mutant):
    """Keys beyond the last whole block are not computed with."""

    found_by = "long sequences"

    def allowed(self, problem: Problem) -> Array:
        seen = super().allowed(problem).copy()
        if seen.shape[3] > 128:
            seen[..., seen.shape[3] // 128 * 128 :] = False
        return seen


class OneMaskForAllRows(Mutant):
    """The mask of the first batch row serves all."""

    found_by = "rows of a batch"

    def allowed(self, problem: Problem) -> Array:
        return super().allowed(problem)[:1]


class PositionFromShapes(Mutant):
    """The last query is taken for the last key's, whatever was asked."""

    found_by = "cross-attention"

    def allowed(self, problem: Problem) -> Array:
        if isinstance(problem.mask, tuple):
            return super().allowed(problem)
        q_len, k_len = _sizes(problem)
        return problem.mask.as_array(q_len, k_len, q_start=k_len - q_len)[None, None]


class HeadsInterleaved(Mutant):
    """Query head h reads key/value head h mod K."""

    found_by = "grouped heads"

    def per_head(self, x: Array, problem: Problem) -> Array:
        return np.tile(x, (1, problem.q.shape[1] // x.shape[1], 1, 1))


class ScaleIgnored(Mutant):
    """The scale is always D ** -0.5."""

    found_by = "scale"

    def scale(self, problem: Problem) -> float:
        return float(problem.q.shape[3] ** -0.5)


class ScaleOfValues(Mutant):
    """The usual scale is made of the size of the values."""

    found_by = "value size"

    def scale(self, problem: Problem) -> float:
        return float(problem.v.shape[3] ** -0.5) if problem.has_default_scale else problem.scale


class SoftcapAfterMask(Mutant):
    """What is hidden comes back as -softcap."""

    found_by = "softcap"

    def scores(
        self, problem: Problem, q: Array, k: Array, bias: Array | None, seen: Array
    ) -> tuple[Array, Array | float]:
        scores, slope = super().scores(problem, q, k, bias, seen)
        return (scores, slope) if problem.softcap is None else (np.maximum(scores, -problem.softcap), slope)


class SoftcapWithoutSlope(Mutant):
    """Backward takes bounded scores for plain ones."""

    found_by = "softcap"

    def bent(self, scores: Array, cap: float) -> tuple[Array, Any]:
        return super().bent(scores, cap)[0], 1.0


class SinksEveryStep(Mutant):
    """Every partial result has the sinks in it."""

    found_by = "sinks"

    def partial(self, problem: Problem, rows: Array, keys: Array, held: Array) -> tuple[Array, Array]:
        out, lse = super().partial(problem, rows, keys, held)
        return (out, lse) if problem.sinks is None else super().with_sinks(problem, out, lse)

    def with_sinks(self, problem: Problem, out: Array, lse: Array) -> tuple[Array, Array]:
        return out, lse


class LocalPositions(Mutant):
    """A bias counts positions within the shard."""

    found_by = "bias"

    def bias(self, bias: Array, rows: Array, keys: Array) -> Array:
        return bias[:, : len(rows), : len(keys)]


class DlseIgnored(Mutant):
    """The incoming gradient of lse is dropped."""

    found_by = "lse gradient"

    def delta(self, problem: Problem, out: Array) -> Array:
        return np.asarray((out * np.where(out == 0, 0, problem.dout)).sum(-1))


class RoundedEveryStep(Mutant):
    """Partial results are kept in the dtype of the inputs. Shows in bfloat16 alone, from 8 ranks on."""

    found_by = "full attention"

    def merged(
        self, problem: Problem, one: tuple[Array, Array], two: tuple[Array, Array], step: int
    ) -> tuple[Array, Array]:
        out, lse = super().merged(problem, one, two, step)
        return round_to(out, problem.dtype), lse


def _sizes(problem: Problem) -> tuple[int, int]:
    return problem.q.shape[2], problem.k.shape[2]


IN_BFLOAT16: tuple[type[Mutant], ...] = (RoundedEveryStep,)
"""Mutants that only bfloat16 shows."""

MUTANTS: tuple[type[Mutant], ...] = tuple(m for m in Mutant.__subclasses__() if m not in IN_BFLOAT16)
"""The mutants of every dtype."""
