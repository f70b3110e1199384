"""`aten_cpu`: torch's own flash attention for the CPU, forward and backward, called per piece of a tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ringspun.torch.kernels import bands
from ringspun.torch.kernels.base import (
    Block,
    Call,
    Gradients,
    Kernel,
    Partial,
    Rows,
    Saved,
    StepTiles,
    plain_only,
    tile_rows,
)
from ringspun.torch.scraps import scraps

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


FEW = 512
"""A bfloat16 piece of up to this many rows or keys is computed in float32: rounding each partial result to bfloat16
would otherwise be the largest error of a ring (8 ranks over one, rms of dq: 1.25 without, 1.0 with), and costs no time
to avoid: the op's bfloat16 is faster only from 768 rows on. Masked pieces always are; their blocks are slower in it."""


ROWS = 2048
"""Rows of one call of the op's backward at most: its dq, and the copy that it makes of dout, are no longer."""


class AtenCpu(Kernel):
    """Any head size, GQA, f64 / f32 / bf16 / f16. The op wants equal head sizes of q, k and v: the shorter are padded.
    float16 is always computed in float32: the CPU's own is 10 to 500 times slower and its scores can overflow.

    The op's causal flag is not used: it takes a triangle of n as if it had n + 512 columns, twice the work at 512.
    Strips and masked blocks (`bands`) take what is allowed and little more.

    An empty q or k would kill the process in this op; pieces are never empty and empty batches do not reach a kernel.
    Every row of a call sees some key of it: the op's lse of a row that sees none is not -inf.
    """

    name = "aten_cpu"
    devices = ("cpu",)
    sizes = bands.Sizes()

    def refuses(self, call: Call) -> str | None:
        if call.device != "cpu":
            return f"device must be cpu; got {call.device}"
        if call.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"dtype must be float64, float32, bfloat16 or float16; got {call.dtype}"
        return plain_only(call)

    def forward(self, block: Block, tiles: StepTiles) -> Iterator[Partial]:
        for q_rows, k_rows, piece in _pieces(tiles, self.sizes):
            if not piece.masked:
                yield _whole(block, q_rows, k_rows)
                continue
            q, k, v = _operands(block, q_rows, k_rows, piece.masked)
            parts = (
                (a, b, *_forward(_rows(q, a, b), _rows(k, c, d), _rows(v, c, d), attn_mask=mask, scale=block.scale))
                for a, b, c, d, mask in bands.row_blocks(piece, self.sizes.block, q.dtype)
            )
            if piece.alone:  # nothing to merge with, in this tile: each block is written where it belongs
                for a, b, out, lse in parts:
                    yield Partial(_within(q_rows, a, b), _columns(out, block.v.shape[-1]), lse)
            else:
                outs, lses = list(zip(*parts, strict=True))[2:]
                joined = torch.cat(outs, 2), torch.cat(lses, 2)
                del outs, lses
                yield Partial(q_rows, _columns(joined[0], block.v.shape[-1]), joined[1])
                del joined
            del q, k, v  # copies, perhaps; gone before those of the next piece are made

    def backward(self, block: Block, saved: Saved, tiles: StepTiles) -> Iterator[Gradients]:
        for q_rows, k_rows, piece in _pieces(tiles, self.sizes):
            if not piece.masked:
                for first in range(piece.q0, piece.q1, ROWS):
                    some = Rows(q_rows.batch, slice(first, min(first + ROWS, piece.q1)))
                    yield Gradients(some, k_rows, *_Backward.of(block, saved, some, k_rows, False).gradients())
                continue
            given = _Backward.of(block, saved, q_rows, k_rows, piece.masked)
            for a, b, c, d, mask in bands.key_blocks(piece, self.sizes.block, given.q.dtype):
                rows = _within(q_rows, a, b), _within(k_rows, c, d)
                yield Gradients(*rows, *given.part(a, b, c, d).gradients(mask))
            del given  # copies, perhaps; gone before those of the next piece are made


def _whole(block: Block, q_rows: Rows, k_rows: Rows) -> Partial:
    """All keys of a piece for all its rows."""
    out, lse = _forward(*_operands(block, q_rows, k_rows, masked=False), scale=block.scale)
    return Partial(q_rows, _columns(out, block.v.shape[-1]), lse)


class _Backward(NamedTuple):
    """What the op's backward is given, in its order; and `sizes`, D and Dv without padding."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    sizes: tuple[int, int]

    @classmethod
    def of(cls, block: Block, saved: Saved, q_rows: Rows, k_rows: Rows, masked: bool) -> _Backward:
        """All rows and keys of a piece."""
        q, k, v = _operands(block, q_rows, k_rows, masked)
        dout = saved.dout[q_rows.batch, :, q_rows.tokens].to(q.dtype)
        delta = saved.delta[q_rows.batch, :, q_rows.tokens, None]
        out = _stand_in(dout, delta) if saved.out is None else saved.out[q_rows.batch, :, q_rows.tokens].to(q.dtype)
        if out is None or saved.dlse is not None:
            # The op makes delta = sum(out * dout) itself. One more column carries ours, with dlse in it:
            # dout' = [dout, 1], out' = [0, delta], v' = [v, 0]. In the op's dtype, so bf16 rounds it.
            delta = delta.to(q.dtype)
            dout, out = torch.cat([dout, torch.ones_like(delta)], -1), torch.cat([torch.zeros_like(dout), delta], -1)
        size = max(q.shape[-1], dout.shape[-1])
        dout, q, k, v, out = (_pad(x, size) for x in (dout, q, k, v, out))
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)  # the op would copy each part of it to this
        lse = saved.lse[q_rows.batch, :, q_rows.tokens]
        return cls(dout, q, k, v, out, lse, block.scale, (block.q.shape[-1], block.v.shape[-1]))

    def part(self, a: int, b: int, c: int, d: int) -> _Backward:
        """Rows a:b and keys c:d of it."""
        dout, q, out, lse = (_rows(x, a, b) for x in (self.dout, self.q, self.out, self.lse))
        return _Backward(dout, q, _rows(self.k, c, d), _rows(self.v, c, d), out, lse, self.scale, self.sizes)

    def gradients(self, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, dk, dv)``."""
        dout, q, k, v, out, lse, scale, (size, value_size) = self
        dq, dk, dv = _backward(dout, q, k, v, out, lse.contiguous(), 0.0, False, attn_mask=mask, scale=scale)
        return _columns(dq, size), _columns(dk, size), _columns(dv, value_size)


def _stand_in(dout: Tensor, delta: Tensor) -> Tensor | None:
    """Something for `out`, where it is not there, that the op makes the same `delta` of: ``dout * delta / |dout|^2``.
    It takes no column more, which would cost a tenth of the op's time, and rounding it to bf16 is no worse than
    rounding `out`. None where no such thing can be written: where dout is zero, or next to it, and delta is not."""
    found = torch.empty_like(dout)
    for into, some, its in scraps(found, dout, delta):
        wide = some.to(delta.dtype)
        most = wide.abs().amax(-1, keepdim=True)  # taken out first, so that no square over- or underflows
        unit = torch.where(most == 0, 0.0, wide / most)
        unit *= its / most / unit.square().sum(-1, keepdim=True)
        into.copy_(unit).masked_fill_((most == 0) & (its == 0), 0.0)
        if not bool(into.isfinite().all()):
            return None
    return found


def _pieces(tiles: StepTiles, sizes: bands.Sizes) -> Iterator[tuple[Rows, Rows, bands.Piece]]:
    """All pieces of a step, with their query rows and key rows."""
    for tile in tiles.bands:
        b0, b1, q0, q1, k0, k1, lo, hi = tile
        for piece in bands.pieces((q0, q1, k0, k1, lo, hi), sizes):
            yield *tile_rows([b0, b1, *piece]), piece


def _operands(block: Block, q_rows: Rows, k_rows: Rows, masked: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Some rows of q, k and v, of one head size; in float32 where their own dtype would be too coarse or too slow."""
    q = block.q[q_rows.batch, :, q_rows.tokens]
    k, v = (x[k_rows.batch, :, k_rows.tokens] for x in (block.k, block.v))
    coarse = q.dtype == torch.bfloat16 and (masked or min(q.shape[2], k.shape[2]) <= FEW)
    if coarse or q.dtype == torch.float16:
        q, k, v = q.float(), k.float(), v.float()
    size = max(q.shape[-1], v.shape[-1])
    return _pad(q, size), _pad(k, size), _pad(v, size)


def _rows(x: Tensor, first: int, last: int) -> Tensor:
    return x if last - first == x.shape[2] else x.narrow(2, first, last - first)


def _columns(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else x[..., :size]


def _within(rows: Rows, first: int, last: int) -> Rows:
    start: int = rows.tokens.start
    return Rows(rows.batch, slice(start + first, start + last))


def _pad(x: Tensor, size: int) -> Tensor:
    """`x` with zeros appended to its last dimension, which change neither scores nor the columns that are kept; and
    with a row's entries next to each other: the op takes that for granted and would read something else."""
    if x.shape[-1] != size:
        return torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
