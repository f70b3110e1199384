"""`aten_cpu`: torch's own flash attention for the CPU, forward and backward, called per piece of a tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ringspun.torch.kernels import bands
from ringspun.torch.kernels.base import Block, Call, Gradients, Kernel, Partial, Rows, Saved, StepTiles, tile_rows

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


FEW = 512
"""A bfloat16 piece of up to this many rows or keys is computed in float32: rounding each partial result to bfloat16 would
otherwise be the largest error of a ring (8 ranks over one, rms of dq: 1.25 without, 1.0 with), and costs no time to avoid:
the op's bfloat16 is faster only from 768 rows on. Masked pieces always are; in blocks of 64 it takes half as long again."""


SMALLEST_SCALE = 1e-30


class AtenCpu(Kernel):
    """Any head size, GQA, f64 / f32 / bf16 / f16. The op wants equal head sizes of q, k and v: the shorter are padded.
    float16 is always computed in float32: the CPU's own is 10 to 500 times slower and its scores can overflow.

    The op's own causal flag is not used: it computes a triangle of n as if it had n + 512 columns (twice the work at 512),
    where a strip's triangle costs about n + 64.

    An empty q or k would kill the process in this op; pieces are never empty and empty batches do not reach a kernel.
    Every row of a call sees some key of it: the op's lse of a row that sees none is not -inf.
    """

    name = "aten_cpu"

    def refuses(self, call: Call) -> str | None:
        if call.device != "cpu":
            return f"device must be cpu; got {call.device}"
        if call.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"dtype must be float64, float32, bfloat16 or float16; got {call.dtype}"
        if call.scale < SMALLEST_SCALE:  # the op multiplies its -inf by it: NaN under a causal mask
            return f"scale must be positive, at least {SMALLEST_SCALE}; got {call.scale}"
        return None

    def forward(self, block: Block, tiles: StepTiles) -> Iterator[Partial]:
        for batch, piece in _pieces(tiles):
            q, k, v = _operands(block, batch, piece)
            if piece.masked:
                out, lse = _attend_masked(q, k, v, block.scale, piece)
            else:
                out, lse = _forward(q, k, v, scale=block.scale)
            rows = Rows(batch, slice(piece.q0, piece.q0 + piece.count * piece.rows))
            out = out[..., : block.v.shape[-1]]
            yield Partial(rows, bands.in_a_row(out, piece.count), bands.in_a_row(lse, piece.count))

    def backward(self, block: Block, saved: Saved, tiles: StepTiles) -> Iterator[Gradients]:
        for batch, piece in _pieces(tiles):
            given = _Backward.of(block, saved, batch, piece)
            dq, dk, dv = _gradients_masked(given, piece) if piece.masked else given.gradients()
            sizes = block.q.shape[-1], block.k.shape[-1], block.v.shape[-1]
            each = [
                x[..., :size].unflatten(0, (-1, piece.count)).unbind(1)
                for x, size in zip((dq, dk, dv), sizes, strict=True)
            ]
            for i, grads in enumerate(zip(*each, strict=True)):
                q0, k0 = piece.q0 + i * piece.rows, piece.k0 + i * piece.rows
                q_rows, k_rows = slice(q0, q0 + piece.rows), slice(k0, k0 + piece.keys)
                yield Gradients(Rows(batch, q_rows), Rows(batch, k_rows), *grads)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, scale: float, piece: bands.Piece) -> tuple[Tensor, Tensor]:
    parts = [
        _forward(_rows(q, a, b), _rows(k, c, d), _rows(v, c, d), attn_mask=mask, scale=scale)
        for a, b, c, d, mask in bands.row_blocks(piece, q.dtype)
    ]
    if len(parts) == 1:
        return parts[0][0], parts[0][1]
    # joined in the op's own order of memory, [B, T, H, D]
    out, lse = (torch.cat([x.transpose(1, 2) for x in xs], 1).transpose(1, 2) for xs in zip(*parts, strict=True))
    return out, lse


def _gradients_masked(given: _Backward, piece: bands.Piece) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = [], torch.zeros_like(given.k), torch.zeros_like(given.v)
    for a, b, c, d, mask in bands.row_blocks(piece, given.q.dtype):
        part = given.part(a, b, c, d).gradients(mask)
        dq.append(part[0])
        _rows(dk, c, d).add_(part[1])
        _rows(dv, c, d).add_(part[2])
    return torch.cat(dq, 2), dk, dv


class _Backward(NamedTuple):
    """What the op's backward is given."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    scale: float

    @classmethod
    def of(cls, block: Block, saved: Saved, batch: slice, piece: bands.Piece) -> _Backward:
        """All rows and keys of a piece."""
        q, k, v = _operands(block, batch, piece)
        out, dout = (_queries(x, batch, piece).to(q.dtype) for x in (saved.out, saved.dout))
        if saved.dlse is not None:
            # The op makes delta = sum(out * dout) itself. One more column carries ours, with dlse in it:
            # dout' = [dout, 1], out' = [0, delta], v' = [v, 0]. In the op's dtype, so bf16 rounds it.
            delta = _queries(saved.delta[..., None], batch, piece).to(q.dtype)
            dout = torch.cat([dout, torch.ones_like(delta)], -1)
            out = torch.cat([torch.zeros_like(out), delta], -1)
        size = max(q.shape[-1], dout.shape[-1])
        lse = _queries(saved.lse[..., None], batch, piece).squeeze(-1)
        return cls(*(_pad(x, size) for x in (dout, q, k, v, out)), lse, block.scale)

    def part(self, a: int, b: int, c: int, d: int) -> _Backward:
        """Rows a:b and keys c:d of it."""
        dout, q, out, lse = (_rows(x, a, b) for x in (self.dout, self.q, self.out, self.lse))
        return _Backward(dout, q, _rows(self.k, c, d), _rows(self.v, c, d), out, lse, self.scale)

    def gradients(self, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, dk, dv)``, with the padding of q, k and v."""
        *tensors, lse, scale = self
        dq, dk, dv = _backward(*tensors, lse.contiguous(), 0.0, False, attn_mask=mask, scale=scale)
        return dq, dk, dv


def _pieces(tiles: StepTiles) -> Iterator[tuple[slice, bands.Piece]]:
    """All pieces of a step, with their batch rows."""
    for tile in tiles.bands:
        q0, q1, k0, k1, lo, hi = tile[2:]
        for piece in bands.pieces((q0, q1, k0, k1, lo, hi)):
            yield tile_rows(tile)[0].batch, piece


def _operands(block: Block, batch: slice, piece: bands.Piece) -> tuple[Tensor, Tensor, Tensor]:
    """A piece's q, k and v, of one head size; in float32 where their own dtype would be too coarse or too slow."""
    q = _queries(block.q, batch, piece)
    k, v = (bands.windows(x[batch], piece.k0, piece.keys, piece.rows, piece.count) for x in (block.k, block.v))
    coarse = q.dtype == torch.bfloat16 and (piece.masked or min(piece.rows, piece.keys) <= FEW)
    if coarse or q.dtype == torch.float16:
        q, k, v = q.float(), k.float(), v.float()
    size = max(q.shape[-1], v.shape[-1])
    return _pad(q, size), _pad(k, size), _pad(v, size)


def _queries(x: Tensor, batch: slice, piece: bands.Piece) -> Tensor:
    return bands.windows(x[batch], piece.q0, piece.rows, piece.rows, piece.count)


def _rows(x: Tensor, first: int, last: int) -> Tensor:
    return x.narrow(2, first, last - first)


def _pad(x: Tensor, size: int) -> Tensor:
    """`x` with zeros appended to its last dimension, which change neither scores nor the columns that are kept; and
    with a row's entries next to each other: the op takes that for granted and would read something else."""
    if x.shape[-1] != size:
        return torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
