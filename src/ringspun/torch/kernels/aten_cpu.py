"""`aten_cpu`: torch's own flash attention for the CPU, forward and backward, called per tile."""

from __future__ import annotations

import torch
from torch import Tensor

from ringspun.torch.kernels.base import Block, Call, LoweredKernel, Saved, plain_only

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


FEW_KEYS = 256
"""Up to this many keys a bfloat16 tile is computed in float32: rounding each partial result to bfloat16 would otherwise
be the largest error of a ring (8 ranks over one, rms of dq: 1.25 without, 1.0 with), and costs no time to avoid."""


SMALLEST_SCALE = 1e-30


class AtenCpu(LoweredKernel):
    """Any head size, GQA, f64 / f32 / bf16 / f16. The op wants equal head sizes of q, k and v: the shorter are padded.
    float16 is always computed in float32: the CPU's own is 10 to 500 times slower and its scores can overflow.

    An empty q or k would kill the process in this op; tiles are never empty and empty batches do not reach a kernel.
    """

    name = "aten_cpu"

    def refuses(self, call: Call) -> str | None:
        if call.device != "cpu":
            return f"device must be cpu; got {call.device}"
        if call.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"dtype must be float64, float32, bfloat16 or float16; got {call.dtype}"
        if call.scale < SMALLEST_SCALE:  # the op multiplies its -inf by it: NaN under a causal mask
            return f"scale must be positive, at least {SMALLEST_SCALE}; got {call.scale}"
        return plain_only(call)

    def partial(self, block: Block, *, causal: bool) -> tuple[Tensor, Tensor]:
        block = _widened(block)
        size, value_size = max(block.q.shape[-1], block.v.shape[-1]), block.v.shape[-1]
        q, k, v = (_pad(x, size) for x in (block.q, block.k, block.v))
        out, lse = _forward(q, k, v, is_causal=causal, scale=block.scale)
        return out[..., :value_size], lse

    def partial_backward(self, block: Block, saved: Saved, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        block = _widened(block)
        q, k, v = block.q, block.k, block.v
        out, dout = saved.out.to(q.dtype), saved.dout.to(q.dtype)
        head_size, value_size = q.shape[-1], v.shape[-1]
        if saved.dlse is not None:
            # The op makes delta = sum(out * dout) itself. One more column carries ours, with dlse in it:
            # dout' = [dout, 1], out' = [0, delta], v' = [v, 0]. In the op's dtype, so bf16 rounds it.
            one = torch.ones_like(dout[..., :1])
            dout = torch.cat([dout, one], -1)
            out = torch.cat([torch.zeros_like(out), saved.delta[..., None].to(out.dtype)], -1)
            v = torch.cat([v, torch.zeros_like(v[..., :1])], -1)
        size = max(head_size, v.shape[-1])
        q, k, v, out, dout = (_pad(x, size) for x in (q, k, v, out, dout))
        lse = saved.lse.contiguous()
        dq, dk, dv = _backward(dout, q, k, v, out, lse, 0.0, causal, scale=block.scale)
        return dq[..., :head_size], dk[..., :head_size], dv[..., :value_size]


def _widened(block: Block) -> Block:
    """`block` in float32 where its own dtype would be too coarse or too slow."""
    narrow = block.q.dtype == torch.float16 or (block.q.dtype == torch.bfloat16 and block.k.shape[2] <= FEW_KEYS)
    return Block(block.q.float(), block.k.float(), block.v.float(), block.scale) if narrow else block


def _pad(x: Tensor, size: int) -> Tensor:
    """`x` with zeros appended to its last dimension, which change neither scores nor the columns that are kept; and
    with a row's entries next to each other: the op takes that for granted and would read something else."""
    if x.shape[-1] != size:
        return torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
