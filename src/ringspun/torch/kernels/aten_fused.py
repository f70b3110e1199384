"""`aten_efficient` and `aten_cudnn`: torch's other fused attentions on NVIDIA GPUs, called per lowered piece of a tile.

What is said here of the ops is read in PyTorch's source (ATen/native/transformers/cuda, ATen/native/cudnn, 2.13).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ringspun.torch.kernels.base import Block, Call, LoweredKernel, Saved, accumulator_dtype
from ringspun.torch.kernels.cuda_operands import by_rows, gradients, padded, ready, refusal, scale_refusal

LSE_ROWS = 32
"""Rows of lse that the efficient op's backward reads at once; it must have as many, +inf beyond the last query."""
LARGEST_CUDNN = 128
"""Larger heads depend on the version of cuDNN, on the GPU and on the direction."""


@dataclass(frozen=True)
class FusedOps:
    """A pair of ops. Tensors are ``[B, H, T, D]``; causal is from the upper left corner."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


EFFICIENT = FusedOps(
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
)
CUDNN = FusedOps(
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default,
)


class _Fused(LoweredKernel):
    """What the two have in common.

    Args:
        ops: what is called; others for tests.
    """

    devices = ("cuda",)

    def __init__(self, ops: FusedOps) -> None:
        self._ops = ops

    @abstractmethod
    def _operands(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as the op takes them."""

    def partial(self, block: Block, *, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = self._operands(block)
        out, lse = self._forward(q, k, v, block.scale, causal)
        return out[..., : block.v.shape[-1]], lse

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """``(out, lse [B, H, T])``."""


class AtenEfficient(_Fused):
    """float32 (in products of three TF32 numbers), float16 and bfloat16; any head sizes, of queries and of values.
    Where heads are grouped, keys and values are repeated for the op, which knows no groups."""

    name = "aten_efficient"

    def __init__(self, ops: FusedOps = EFFICIENT) -> None:
        super().__init__(ops)

    def refuses(self, call: Call) -> str | None:
        return refusal(
            call, (torch.float32, torch.float16, torch.bfloat16), (5, 0) if call.dtype != torch.bfloat16 else (8, 0)
        )

    def _operands(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        groups = block.q.shape[1] // block.k.shape[1]
        k, v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (block.k, block.v))
        size, value_size = padded(block.q.shape[-1]), padded(block.v.shape[-1])
        return ready(block.q, size), ready(k, size), ready(v, value_size)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, _, _ = self._ops.forward(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]

    def partial_backward(self, block: Block, saved: Saved, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._operands(block)
        rows = q.shape[2]
        lse = torch.nn.functional.pad(saved.lse, (0, -rows % LSE_ROWS), value=torch.inf).contiguous()
        unused = torch.zeros((), dtype=torch.int64, device=q.device)

        def run(dout: Tensor, v: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            # The op knows no stride of out from row to row: it takes the layout that its own forward makes.
            given = by_rows(dout), q, k, v, None, by_rows(out), lse, unused, unused, 0.0, [True, True, True, False]
            dq, dk, dv, _ = self._ops.backward(*given, causal, scale=block.scale)
            return dq, dk, dv

        known = (None if x is None else ready(x, v.shape[-1]) for x in (saved.dout, saved.out))
        dq, dk, dv = _with_sizes(block, gradients(saved, *_ordered(known, v), run))
        return dq, _by_group(dk, block.k.shape[1]), _by_group(dv, block.k.shape[1])


class AtenCudnn(_Fused):
    """cuDNN's: float16 and bfloat16, GQA, head sizes up to 128. By name alone: every new shape of a tile costs it a
    plan of many milliseconds, and it keeps plans of backward by the strides of q, k and v, not by those of out and
    dout: all are laid out alike here, but another caller in the process may have been first.

    Args:
        ops: what is called; others for tests.
    """

    name = "aten_cudnn"
    by_name_only = True

    def __init__(self, ops: FusedOps = CUDNN) -> None:
        super().__init__(ops)
        self._few = AtenEfficient()

    def refuses(self, call: Call) -> str | None:
        reason = refusal(call, (torch.float16, torch.bfloat16), (8, 0)) or scale_refusal(call)
        if reason is not None:
            return reason
        size = max(call.head_size, call.value_size)
        if size > LARGEST_CUDNN:
            return f"head sizes must be at most {LARGEST_CUDNN}; got {size}"
        version: int = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
        if torch.cuda.is_available() and version < 90000:
            return f"cuDNN must be 9.0 or newer; got {version}"
        return None

    def _operands(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        size, value_size = padded(block.q.shape[-1]), padded(block.v.shape[-1])
        q, k, v = ready(block.q, size), ready(block.k, size), ready(block.v, value_size)
        return q.contiguous(), k.contiguous(), v.contiguous()

    def partial(self, block: Block, *, causal: bool) -> tuple[Tensor, Tensor]:
        if block.k.shape[2] == 1:  # which cuDNN cannot do
            return self._few.partial(block, causal=causal)
        return super().partial(block, causal=causal)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = self._ops.forward(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
        return out, lse.reshape(q.shape[:3])

    def partial_backward(self, block: Block, saved: Saved, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        if block.k.shape[2] == 1:
            return self._few.partial_backward(block, saved, causal=causal)
        q, k, v = self._operands(block)
        lse = saved.lse.contiguous()
        lse = lse[..., None] if _lse_dims(self._ops, q.device, q.dtype) == 4 else lse
        unused = torch.zeros((), dtype=torch.int64, device=q.device)

        def run(dout: Tensor, v: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            given = dout.contiguous(), q, k, v, out.contiguous(), lse, unused, unused, None, None, None
            found: tuple[Tensor, Tensor, Tensor] = self._ops.backward(
                *given, q.shape[2], k.shape[2], 0.0, causal, scale=block.scale
            )
            return found

        known = (None if x is None else ready(x, v.shape[-1]) for x in (saved.dout, saved.out))
        return _with_sizes(block, gradients(saved, *_ordered(known, v), run))


@cache
def _lse_dims(ops: FusedOps, device: torch.device, dtype: torch.dtype) -> int:
    """4 where lse is ``[B, H, T, 1]``, 3 where ``[B, H, T]``: builds differ, and backward wants what forward makes."""
    some = torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)
    lse: Tensor = ops.forward(some, some, some, None, True, 0.0, False, False, scale=1.0)[1]
    return lse.ndim


def _ordered(known: Any, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    dout, out = known
    return dout, v, out


def _with_sizes(block: Block, found: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients without the columns that were added."""
    dq, dk, dv = found
    size = block.q.shape[-1]
    return dq[..., :size], dk[..., :size], dv[..., : block.v.shape[-1]]


def _by_group(x: Tensor, kv_heads: int) -> Tensor:
    """Gradients of repeated keys, summed over those that are one."""
    groups = x.shape[1] // kv_heads
    if groups == 1:
        return x
    grouped = x.reshape(x.shape[0], kv_heads, groups, *x.shape[2:])
    return grouped.sum(2, dtype=accumulator_dtype(x.dtype))
