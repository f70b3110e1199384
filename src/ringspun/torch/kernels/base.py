"""What a kernel is: local attention over the tiles of one step, and an honest refusal of everything it cannot do.

A kernel never sees a ring, a mask or a layout: it gets local queries, one block of keys and values, and tiles. It
yields partial results in a fixed order; whoever drives it merges them (`accumulate`, where kernels that keep a state of
their own between steps are told of too). New kernel: one file, one subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ringspun.core import tiles as tl
from ringspun.torch.bias import BlockBias
from ringspun.torch.kernels import windows


@dataclass(frozen=True)
class Call:
    """Facts of one attention call that are equal on all ranks; all that a kernel may judge by.

    Args:
        heads, kv_heads: H and K. head_size, value_size: D and Dv. dtype: of q, k, v. device: "cpu", "cuda", ...
        scale: of the scores. softcap: their bound, 0 for none. bias: what kind is added to them, "" for none.
        across_rings: whether the bits must be the same on rings of every size.
    """

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    dtype: torch.dtype
    device: str
    scale: float = 1.0
    softcap: float = 0.0
    bias: str = ""
    across_rings: bool = False


class Block(NamedTuple):
    """Local queries ``[B, H, Tq, D]`` and one block of keys ``[B, K, Tk, D]`` and values ``[B, K, Tk, Dv]``.

    ``score = c * tanh(scale * q.k / c) + bias`` with ``c = softcap`` (0: no tanh), before what is not allowed is cut.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float = 0.0
    bias: BlockBias | None = None


class Terms(NamedTuple):
    """What enters scores and softmax beside q, k and v, as the op pair carries it.

    Args:
        scale: of the scores. softcap: their bound, 0 for none. sinks: ``[H]``. bias: the tensor of a bias.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    bias: Tensor | None = None


class Rows(NamedTuple):
    """Which rows of the local shard a result belongs to: a range of batch rows and a range of tokens."""

    batch: slice
    tokens: slice

    @property
    def of_all_batch_rows(self) -> bool:
        """Whether the whole batch is meant, as in every plan with one mask."""
        return self.batch == slice(0, None)


class Saved(NamedTuple):
    """What backward knows besides the block: final out, its lse, the incoming gradients of both, and fp32 `delta`.

    ``delta = sum(out * dout, -1) - dlse`` ``[B, H, Tq]``. `dlse` is None where lse has no gradient. `out` is None where
    the rows are another rank's, who sends no more than is needed: then `delta` has all that `dlse` would say.
    """

    out: Tensor | None
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    delta: Tensor

    def rows(self, rows: Rows, flip: bool = False) -> Saved:
        """The part of some query rows, token order reversed where `flip`."""

        def part(x: Tensor) -> Tensor:
            return _turn(x[rows.batch, :, rows.tokens], flip)

        out, dlse = (None if x is None else part(x) for x in (self.out, self.dlse))
        return Saved(out, part(self.lse), part(self.dout), dlse, part(self.delta))

    def heads(self, heads: slice) -> Saved:
        """The part of some query heads."""
        out, dlse = (None if x is None else x[:, heads] for x in (self.out, self.dlse))
        return Saved(out, self.lse[:, heads], self.dout[:, heads], dlse, self.delta[:, heads])


class Partial(NamedTuple):
    """Attention of some query rows over some keys. `lse` in the accumulators' dtype; a row that saw no key is 0 and
    -inf, whatever the op behind it says of one."""

    rows: Rows
    out: Float[Tensor, "b H t Dv"]
    lse: Float[Tensor, "b H t"]


class Gradients(NamedTuple):
    """Shares of the gradients of some query rows and some key rows; and of the bias's tensor, where there is one."""

    q_rows: Rows
    k_rows: Rows
    dq: Float[Tensor, "b H t D"]
    dk: Float[Tensor, "b K s D"]
    dv: Float[Tensor, "b K s Dv"]
    dbias: Tensor | None = None


@dataclass(frozen=True)
class StepTiles:
    """The tiles of one step, lowered at most once.

    Args:
        kept: what kernels made of them, to find it again at the next call; keys begin with a kernel's name.
    """

    tiles: tl.Tiles
    kept: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def bands(self) -> list[list[int]]:
        """Rows of (b0, b1, q0, q1, k0, k1, lo, hi) as Python integers."""
        return [list(map(int, row)) for row in self.tiles]

    @cached_property
    def lowered(self) -> list[tuple[list[int], tl.Kind]]:
        """The same pairs as rectangles of three kinds."""
        table, kinds = tl.lower(self.tiles)
        return [(list(map(int, row)), tl.Kind(kind)) for row, kind in zip(table, kinds, strict=True)]

    @cached_property
    def windows(self) -> list[windows.WindowCall]:
        """The same pairs as calls of an op that knows windows, and sequences packed behind each other."""
        return windows.calls(self.bands)


class Kernel(ABC):
    """Local attention over a list of tiles.

    Args:
        devices: kinds of device that it computes on; None: any. by_name_only: whether nobody gets it who does not ask.
    """

    name: str
    devices: tuple[str, ...] | None = None
    by_name_only: bool = False

    @abstractmethod
    def refuses(self, call: Call) -> str | None:
        """Why this kernel cannot do `call` exactly, or None. Judged only by facts equal on all ranks."""

    @abstractmethod
    def forward(self, block: Block, tiles: StepTiles) -> Iterator[Partial]:
        """Partial results that together cover every pair of `tiles` once."""

    @abstractmethod
    def backward(self, block: Block, saved: Saved, tiles: StepTiles) -> Iterator[Gradients]:
        """Gradient shares that together cover every pair of `tiles` once."""


class LoweredKernel(Kernel):
    """A kernel that knows full and upper-left causal rectangles; this class makes every mask of them. It knows neither
    softcap nor bias, and has to refuse them (`plain_only`)."""

    @abstractmethod
    def partial(self, block: Block, *, causal: bool) -> tuple[Tensor, Tensor]:
        """``(out, lse)`` of one rectangle; `causal` is i >= j from its upper-left corner."""

    @abstractmethod
    def partial_backward(self, block: Block, saved: Saved, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, dk, dv)`` of one rectangle, given the final lse and delta, and out where it is there."""

    def forward(self, block: Block, tiles: StepTiles) -> Iterator[Partial]:
        for tile, kind in tiles.lowered:
            q_rows, k_rows = tile_rows(tile)
            flip = kind == tl.Kind.ANTICAUSAL
            out, lse = self.partial(_cut(block, q_rows, k_rows, flip), causal=kind != tl.Kind.FULL)
            yield Partial(q_rows, _turn(out, flip), _turn(lse, flip))

    def backward(self, block: Block, saved: Saved, tiles: StepTiles) -> Iterator[Gradients]:
        for tile, kind in tiles.lowered:
            q_rows, k_rows = tile_rows(tile)
            flip = kind == tl.Kind.ANTICAUSAL
            part = saved.rows(q_rows, flip)
            grads = self.partial_backward(_cut(block, q_rows, k_rows, flip), part, causal=kind != tl.Kind.FULL)
            yield Gradients(q_rows, k_rows, *(_turn(g, flip) for g in grads))


def plain_only(call: Call) -> str | None:
    """The refusal of a kernel whose scores are ``scale * q.k`` and nothing else."""
    asked = {"softcap": call.softcap, "bias": call.bias}
    reasons = [f"{name} must be None; got {value}" for name, value in asked.items() if value]
    return ", ".join(reasons) or None


def tile_rows(tile: list[int]) -> tuple[Rows, Rows]:
    """The query rows and key rows of a tile."""
    b0, b1, q0, q1, k0, k1 = tile[:6]
    batch = slice(b0, None if b1 < 0 else b1)
    return Rows(batch, slice(q0, q1)), Rows(batch, slice(k0, k1))


def _cut(block: Block, q_rows: Rows, k_rows: Rows, flip: bool) -> Block:
    q = block.q[q_rows.batch, :, q_rows.tokens]
    k, v = (x[k_rows.batch, :, k_rows.tokens] for x in (block.k, block.v))
    return Block(_turn(q, flip), _turn(k, flip), _turn(v, flip), block.scale)


def _turn(x: Tensor, flip: bool) -> Tensor:
    """`x` with its token dimension reversed: an anticausal tile is a causal one seen from its other corner."""
    return x.flip(2) if flip else x


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, but fp64 for fp64: what lse, running results and travelling gradients are held in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
