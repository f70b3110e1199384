"""A ring in miniature, in NumPy: dense attention per pair of ranks, partial results merged, gradients summed where
their keys live. Right, slow, and in small methods, so that `ringspun.testing.mutants` can make each wrong in one line.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringspun.core import softmax
from ringspun.core.layout import Layout, Zigzag
from ringspun.core.partition import Partition
from ringspun.testing.comparison import MANY_RANKS
from ringspun.testing.problem import Answer, Candidate, Owners, Problem
from ringspun.testing.yardstick import round_to

Array = np.ndarray


class Miniature(Candidate):
    """A ring of R ranks in NumPy; each of its steps is a method, so that a mutant overrides one.

    Args:
        ranks: R. layout: the rule that deals tokens.
    """

    def __init__(self, ranks: int = 3, layout: Layout | None = None) -> None:
        self.ranks, self.layout = ranks, Zigzag() if layout is None else layout
        self.name = type(self).__name__

    def answer(self, problem: Problem) -> Answer:
        q_rows, k_rows = self.dealt(problem.q.shape[2]), self.dealt(problem.k.shape[2])
        parts = [self.forward(problem, rank, q_rows, k_rows) for rank in range(self.ranks)]
        out, lse = (self.gathered([p[i] for p in parts], q_rows) for i in range(2))
        grads = self.backward(problem, out, lse, q_rows, k_rows)
        held = {name: round_to(x, problem.dtype) for name, x in {"out": out, **grads}.items()}
        return Answer(lse=self.told(lse), **held)

    def owners(self, problem: Problem) -> Owners:
        """The rank of each query and each key."""
        both = self.dealt(problem.q.shape[2]), self.dealt(problem.k.shape[2])
        ranks = [np.repeat(np.arange(self.ranks), [len(r) for r in rows]) for rows in both]
        first, second = (owner[np.argsort(np.concatenate(rows))] for owner, rows in zip(ranks, both, strict=True))
        return first, second

    def alone(self) -> Miniature | None:
        """The same on one rank."""
        return type(self)(1, self.layout) if self.ranks >= MANY_RANKS else None

    def dealt(self, tokens: int) -> list[Array]:
        """The tokens of each rank."""
        part = Partition(tokens, self.ranks, self.layout)
        return [part.indices(rank) for rank in range(self.ranks)]

    def gathered(self, parts: list[Array], rows: list[Array]) -> Array:
        """The ranks' rows in the order of the sequence."""
        return np.concatenate(parts, 2)[:, :, np.argsort(np.concatenate(rows))]

    def source(self, rank: int, step: int) -> int:
        """Whose keys a rank computes with at a step."""
        return (rank - step) % self.ranks

    def held(self, rank: int, step: int) -> int:
        """Whose keys lie in the buffer at that step: those, unless something went wrong."""
        return self.source(rank, step)

    def allowed(self, problem: Problem) -> Array:
        """What may be seen, ``[B or 1, 1, Sq, Sk]``."""
        return problem.allowed if problem.allowed.ndim == 4 else problem.allowed[None, None]

    def scale(self, problem: Problem) -> float:
        """Of the scores."""
        return problem.scale

    def scores(
        self, problem: Problem, q: Array, k: Array, bias: Array | None, seen: Array
    ) -> tuple[Array, Array | float]:
        """Scores of some rows and keys, and their derivative by ``scale * q.k``."""
        scores, slope = (q * self.scale(problem)) @ k.swapaxes(2, 3), 1.0
        if problem.softcap is not None:
            scores, slope = self.bent(scores, problem.softcap)
        scores = scores if bias is None else scores + bias
        return np.where(seen, scores, self.hidden), slope

    hidden = -np.inf

    def bent(self, scores: Array, cap: float) -> tuple[Array, Any]:
        """Scores bounded by a softcap, and the slope of the bound."""
        bent = np.tanh(scores / cap)
        return cap * bent, 1 - bent * bent

    def shifted(self, scores: Array) -> Array:
        """What is taken from the scores of a row before exp: their largest."""
        top = scores.max(-1, initial=-np.inf)
        return np.asarray(np.where(np.isneginf(top), 0, top))

    def block(self, problem: Problem, rows: Array, keys: Array, held: Array) -> tuple[Any, ...]:
        """q, k, v, bias and visibility of some rows and the keys that a step is about; `held`: those in the buffer."""
        kind = np.float64 if problem.dtype == "float64" else np.float32
        seen = self.allowed(problem)[..., rows[:, None], keys[None, :]]
        bias = None if problem.bias is None else self.bias(problem.bias, rows, keys)
        q, k, v = problem.q[:, :, rows], *(self.per_head(x[:, :, held], problem) for x in (problem.k, problem.v))
        by_query, by_key = np.asarray(seen.any(3)), np.asarray(seen.any(2))
        q, k, v = self.clean(q, by_query), self.clean(k, by_key), self.clean(v, by_key)
        return *(x.astype(kind) for x in (q, k, v)), bias, seen

    def per_head(self, x: Array, problem: Problem) -> Array:
        """Key/value heads as many times as query heads read them."""
        return np.repeat(x, problem.q.shape[1] // x.shape[1], 1)

    def bias(self, bias: Array, rows: Array, keys: Array) -> Array:
        """The bias of some rows and keys."""
        return bias[:, rows[:, None], keys[None, :]]

    def clean(self, x: Array, read: Array) -> Array:
        """0 in rows that must not be read."""
        return np.where(read[..., None], x, 0)

    def forward(self, problem: Problem, rank: int, q_rows: list[Array], k_rows: list[Array]) -> tuple[Array, Array]:
        """One rank's ``(out, lse)``."""
        rows = q_rows[rank]
        shape = (*problem.q.shape[:2], len(rows), problem.v.shape[3])
        total = softmax.identity(shape, np.float64 if problem.dtype == "float64" else np.float32)
        for step in range(self.ranks):
            keys, held = k_rows[self.source(rank, step)], k_rows[self.held(rank, step)]
            if len(keys) and self.computes(rank, step):
                total = self.merged(problem, total, self.partial(problem, rows, keys, np.resize(held, len(keys))), step)
        return total if problem.sinks is None else self.with_sinks(problem, *total)

    def computes(self, rank: int, step: int) -> bool:
        """Whether a rank computes at a step."""
        return True

    def partial(self, problem: Problem, rows: Array, keys: Array, held: Array) -> tuple[Array, Array]:
        """``(out, lse)`` of some rows over some keys."""
        q, k, v, bias, seen = self.block(problem, rows, keys, held)
        scores, _ = self.scores(problem, q, k, bias, seen)
        top = self.shifted(scores)
        weights = np.exp(scores - top[..., None])
        total = weights.sum(-1)
        with np.errstate(divide="ignore"):
            lse = np.log(total) + top
        return weights @ v / np.where(total == 0, 1, total)[..., None], lse

    def merged(
        self, problem: Problem, one: tuple[Array, Array], two: tuple[Array, Array], step: int
    ) -> tuple[Array, Array]:
        """Two partial results as one."""
        return softmax.merge(*one, *two)

    def with_sinks(self, problem: Problem, out: Array, lse: Array) -> tuple[Array, Array]:
        """A result with one more key per row, of score sink and value 0."""
        assert problem.sinks is not None
        logits = np.broadcast_to(problem.sinks[:, None], lse.shape)
        return softmax.merge(out, lse, np.zeros_like(out), logits)

    def told(self, lse: Array) -> Array:
        """The lse that is returned."""
        return lse

    def delta(self, problem: Problem, out: Array) -> Array:
        """``sum(out * dout) - dlse``."""
        delta = (out * np.where(out == 0, 0, problem.dout)).sum(-1)
        dlse = 0 if problem.dlse is None else np.where(np.isnan(problem.dlse), 0, problem.dlse)
        return np.asarray(delta - dlse)

    def backward(
        self, problem: Problem, out: Array, lse: Array, q_rows: list[Array], k_rows: list[Array]
    ) -> dict[str, Array]:
        """All gradients, in the order of the sequence."""
        delta, safe = self.delta(problem, out), np.where(np.isneginf(lse), 0, lse)
        grads = {f"d{n}": np.zeros_like(getattr(problem, n), out.dtype) for n in ("q", "k", "v")}
        dense = None if problem.bias is None else np.zeros((problem.q.shape[1], problem.q.shape[2], problem.k.shape[2]))
        for rank in range(self.ranks):
            for step in range(self.ranks):
                rows, keys = q_rows[rank], k_rows[self.source(rank, step)]
                held = np.resize(k_rows[self.held(rank, step)], len(keys)) if len(keys) else keys
                if len(keys) == 0 or not self.computes(rank, step):
                    continue
                q, k, v, bias, seen = self.block(problem, rows, keys, held)
                scores, slope = self.scores(problem, q, k, bias, seen)
                p = np.exp(scores - safe[:, :, rows, None])
                dout = self.clean(problem.dout[:, :, rows], seen.any(3))
                dscores = p * (dout @ v.swapaxes(2, 3) - delta[:, :, rows, None])
                ds = dscores * slope * self.scale(problem)
                grads["dq"][:, :, rows] += ds @ k
                share = self.share(rank, step)
                grads["dk"][:, :, keys] += share * self.to_kv(ds.swapaxes(2, 3) @ q, problem)
                grads["dv"][:, :, keys] += share * self.to_kv(p.swapaxes(2, 3) @ dout, problem)
                if dense is not None:
                    dense[:, rows[:, None], keys[None, :]] += dscores.sum(0)
        if problem.sinks is not None:
            grads["dsinks"] = -(np.exp(problem.sinks[:, None] - lse) * delta).sum((0, 2))
        dbias = None if dense is None else problem.bias_gradient(dense)
        return grads if dbias is None else {**grads, "dbias": dbias}

    def to_kv(self, x: Array, problem: Problem) -> Array:
        """Gradients of query heads summed into the key/value heads that they read."""
        return np.asarray(x.reshape(x.shape[0], problem.k.shape[1], -1, *x.shape[2:]).sum(2))

    def share(self, rank: int, step: int) -> float:
        """How often a rank's share of dk and dv is counted."""
        return 1.0
