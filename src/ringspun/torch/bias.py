"""Biases: what positions add to the scores: a tensor, which has a gradient, and a rule that says what goes where.

    score(i, j) = softcap(scale * q_i . k_j) + bias(h, position of i, position of j)

The tensor enters the op pair as an input; the rule is plain data and part of what the ranks agree on.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringspun.core.buckets import Buckets
from ringspun.errors import DtypeError, NotDifferentiable, PlanError, ShapeError
from ringspun.torch.uploads import uploaded

if TYPE_CHECKING:
    from ringspun.torch.kernels.base import Rows

BiasFunction = Callable[[Tensor, Tensor], Tensor]

COARSEST = 0.01
"""Largest spacing of numbers around an lse at which weights ``exp(score - lse)`` still pass for exact."""


class Rule(ABC):
    """Which bias a pair of positions gets, given the tensor; frozen, comparable, and alike on all ranks as a string."""

    name: str

    @abstractmethod
    def scores(self, values: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The bias ``[H or 1, t, s]`` of query positions ``q [t, 1]`` and key positions ``k [1, s]`` (int64)."""

    @abstractmethod
    def gradient(self, ds: Tensor, values: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The share of the gradient of `values` from those of the scores ``ds [B, H, t, s]``."""

    @abstractmethod
    def part(self, values: Tensor, heads: slice) -> tuple[Rule, Tensor]:
        """The rule of some query heads, and the part of `values`, or of their gradient, that is theirs (a view)."""

    def check(self, values: Tensor, heads: int) -> None:  # noqa: B027 (a rule without a tensor has nothing to check)
        """Raise `ShapeError` unless `values` fits H heads."""

    def check_lse(self, lse: Tensor) -> None:
        """Raise unless the normalisers that this bias led to are exact enough.

        A row of nothing but finfo.min would be the sum of v, not its mean: ``lse + log(n)`` rounds to lse there.
        """
        size = torch.where(lse.isinf(), 0.0, lse).abs().amax() if lse.numel() else 0.0
        if size * torch.finfo(lse.dtype).eps > COARSEST:
            raise PlanError(
                f"bias {self.name} must not move all scores of a row further than {lse.dtype} can normalise; got an "
                f"lse of {float(size):.3g} in size. Return -inf for pairs that are not allowed, or write a mask; use "
                "float64 where all keys are far away."
            )


@dataclass(frozen=True, eq=False)  # holds a tensor, whose == is no truth value
class Alibi:
    """Attention with linear biases: ``-slope[h] * |q - k|`` is added to the scores of head h.

    Args:
        slopes: ``[H]``, positive where far keys count less. A parameter, if you like: it has a gradient.

    Source: arXiv 2108.12409, there for causal masks; the absolute value is what others made of it for full ones.
    """

    slopes: Tensor

    @property
    def rule(self) -> Rule:
        """What goes where."""
        return _AlibiRule()

    @property
    def values(self) -> Tensor:
        """The tensor."""
        return self.slopes


@dataclass(frozen=True, eq=False)
class RelativeTable:
    """A learned bias per distance and head: ``table[buckets(q - k), h]`` is added to the scores.

    Args:
        table: ``[N, H]``, as the weight of T5's `relative_attention_bias`. buckets: the row of each distance; their
            `count` is N.
    """

    table: Tensor
    buckets: Buckets

    @property
    def rule(self) -> Rule:
        """What goes where."""
        return _TableRule(self.buckets)

    @property
    def values(self) -> Tensor:
        """The tensor."""
        return self.table


Bias = Alibi | RelativeTable | BiasFunction


@dataclass(frozen=True)
class _FunctionOfHeads:
    """What a free function of positions says of some heads."""

    function: BiasFunction
    first: int
    last: int

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        found = self.function(q, k)
        return found[self.first : self.last] if found.ndim == 3 and found.shape[0] > 1 else found


def of_heads(bias: Bias, first: int, last: int) -> Bias:
    """A bias of the query heads ``[first, last)``. Differentiable."""
    if isinstance(bias, Alibi):
        return Alibi(bias.slopes[first:last])
    if isinstance(bias, RelativeTable):
        return RelativeTable(bias.table[:, first:last], bias.buckets)
    return _FunctionOfHeads(bias, first, last)


@dataclass(frozen=True)
class _AlibiRule(Rule):
    name = "alibi"

    def scores(self, values: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return -values[:, None, None] * (q - k).abs()

    def gradient(self, ds: Tensor, values: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return -(ds.sum(0) * (q - k).abs()).sum((1, 2))

    def part(self, values: Tensor, heads: slice) -> tuple[Rule, Tensor]:
        return self, values[heads]

    def check(self, values: Tensor, heads: int) -> None:
        if values.shape != (heads,):
            raise ShapeError(f"slopes must be [H], one per query head; got {tuple(values.shape)} for {heads} heads.")

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _TableRule(Rule):
    buckets: Buckets
    name = "relative table"

    def scores(self, values: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return values.T[:, self._rows(q - k)]

    def gradient(self, ds: Tensor, values: Tensor, q: Tensor, k: Tensor) -> Tensor:
        per_pair = ds.sum(0).flatten(1).T
        return torch.zeros_like(values).index_add_(0, self._rows(q - k).flatten(), per_pair)

    def part(self, values: Tensor, heads: slice) -> tuple[Rule, Tensor]:
        return self, values[:, heads]

    def check(self, values: Tensor, heads: int) -> None:
        if not isinstance(self.buckets, Buckets):
            raise DtypeError(
                f"buckets must be Buckets; got {type(self.buckets).__name__}. "
                "Write Buckets(edges, rows), Buckets.t5(...) or Buckets.clipped(...)."
            )
        if values.shape != (self.buckets.count, heads):
            raise ShapeError(
                f"table must be [N, H], a row per bucket and a column per query head; got {tuple(values.shape)} "
                f"for {self.buckets.count} buckets and {heads} heads."
            )

    def _rows(self, distance: Tensor) -> Tensor:
        given = self.buckets.edges, self.buckets.rows
        edges, rows = (uploaded(np.array(x, np.int64), distance.device) for x in given)
        return rows[torch.searchsorted(edges, distance, right=True)]

    def __str__(self) -> str:
        return f"{self.name} of {self.buckets}"


@dataclass(frozen=True)
class FunctionRule(Rule):
    """What a function of positions says, whose string is no more than its name.

    Args:
        heads: H. first, last: of which heads; default: all.
    """

    function: BiasFunction
    heads: int
    first: int = 0
    last: int | None = None
    name = "function"

    def scores(self, values: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = self.function(q, k).to(q.device)
        _check_shape(found, self.heads, q, k)
        found = found if found.ndim == 3 else found[None]
        return found if found.shape[0] == 1 else found[self.first : self.last]

    def gradient(self, ds: Tensor, values: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.zeros_like(values)

    def part(self, values: Tensor, heads: slice) -> tuple[Rule, Tensor]:
        return replace(self, first=heads.start, last=heads.stop), values

    def mark(self, q: Tensor, k: Tensor) -> int:
        """A number that stands for what the function says of some positions at this moment."""
        found = self.function(q, k).detach().to("cpu", torch.float64)
        return int.from_bytes(hashlib.blake2b(found.numpy().tobytes(), digest_size=7).digest(), "little")

    def __str__(self) -> str:
        return f"{self.name} {getattr(self.function, '__qualname__', type(self.function).__name__)}"


def function_rule(function: BiasFunction, heads: int, device: torch.device) -> Rule:
    """The rule of a free function of positions, tried once on a few positions on `device`.

    Raises:
        ShapeError, DtypeError: it does not give a float tensor that broadcasts to ``[H, t, s]``.
        NotDifferentiable: what it gives wants a gradient, which could not be delivered.
    """
    if type(function).__hash__ is None:
        raise DtypeError(
            f"bias function must be hashable, to be told from others; got {type(function).__name__}. "
            "A class that defines __eq__ needs __hash__ too."
        )
    q, k = torch.arange(2, device=device)[:, None], torch.arange(3, device=device)[None, :]
    found = function(q, k)
    if not isinstance(found, Tensor) or not found.dtype.is_floating_point:
        got = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise DtypeError(f"bias function must return a floating point tensor; got {got}.")
    _check_shape(found, heads, q, k)
    if found.requires_grad:
        raise NotDifferentiable(
            "bias function must not return what needs a gradient; it would get none. "
            "Use Alibi(slopes) or RelativeTable(table, buckets), or detach."
        )
    return FunctionRule(function, heads)


def _check_shape(found: Tensor, heads: int, q: Tensor, k: Tensor) -> None:
    wanted = heads, q.shape[0], k.shape[1]
    if found.ndim not in (2, 3) or not all(
        n in (1, m) for n, m in zip(reversed(found.shape), reversed(wanted), strict=False)
    ):
        raise ShapeError(
            f"bias function must return [H, t, s] or what broadcasts to it from q [t, 1] and k [1, s]; got "
            f"{tuple(found.shape)} for t={wanted[1]}, s={wanted[2]} and {heads} heads."
        )


class BlockBias(NamedTuple):
    """The bias of one block: the rule, its tensor in the accumulators' dtype, and the positions of the block's rows.

    A rule without a tensor has an empty one.
    """

    rule: Rule
    values: Tensor
    q_positions: Tensor
    k_positions: Tensor

    def scores(self, q_rows: Rows, k_rows: Rows) -> Tensor:
        """The bias of some rows ``[H or 1, t, s]``, in the tensor's dtype."""
        return self.rule.scores(self.values, *self._positions(q_rows, k_rows)).to(self.values.dtype)

    def gradient(self, ds: Tensor, q_rows: Rows, k_rows: Rows) -> Tensor:
        """The share of the tensor's gradient."""
        return self.rule.gradient(ds, self.values, *self._positions(q_rows, k_rows))

    def _positions(self, q_rows: Rows, k_rows: Rows) -> tuple[Tensor, Tensor]:
        return self.q_positions[q_rows.tokens][:, None], self.k_positions[k_rows.tokens][None, :]


@dataclass(frozen=True)
class RankBias:
    """The bias of what one rank computes. `positions` gives those of queries and of keys where it meets a block."""

    rule: Rule
    values: Tensor
    positions: Callable[[int], tuple[Tensor, Tensor]]

    def block(self, source: int, heads: slice) -> BlockBias:
        """Of some query heads, where it meets the block `source`."""
        return BlockBias(*self.rule.part(self.values, heads), *self.positions(source))
