"""What torch's fused attentions on GPUs want of their operands, and what stands in for a gradient of lse."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ringspun.torch.kernels.base import Call, Saved, plain_only

ALIGNED_BYTES = 16
"""They read so many bytes at once: rows begin at multiples of it."""
HEAD_SIZES = 8
"""Head sizes are multiples of it."""

Gradients = tuple[Tensor, Tensor, Tensor]
Run = Callable[[Tensor, Tensor, Tensor], Gradients]
"""Runs an op's backward: ``(dout, v, out) -> (dq, dk, dv)``, given that it makes ``sum(dout * out)`` its delta."""


def padded(size: int) -> int:
    """A head size as the ops take it."""
    return -(-size // HEAD_SIZES) * HEAD_SIZES


def ready(x: Tensor, size: int) -> Tensor:
    """`x` ``[..., D]`` with zeros up to `size`, which change neither scores nor the columns that are kept, and with
    every row where the ops can read it; a copy where that is not so."""
    if x.shape[-1] != size:
        return torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    step = ALIGNED_BYTES // x.itemsize
    fits = x.stride(-1) == 1 and not any(n % step for n in (x.storage_offset(), *x.stride()[:-1]))
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def by_rows(x: Tensor) -> Tensor:
    """`x` ``[B, H, T, D]`` as it is, lying in memory as ``[B, T, H, D]``."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def gradients(saved: Saved, dout: Tensor, v: Tensor, out: Tensor | None, run: Run) -> Gradients:
    """``(dq, dk, dv)`` by an op that makes delta itself and knows no gradient of lse.

    What is missing of delta (minus dlse; all of it where `out` is not there) comes by a second run. Gradients are
    linear in dout and delta; with v = 0 and ``dout' . out'`` of the missing part nothing else is in it, and dv is not
    touched. It costs a second backward, and works in every head size.

    Args:
        saved: of the rows in question. dout, v, out: theirs, ready for the op.
    """
    if out is not None and saved.dlse is None:
        return run(dout, v, out)
    missing = saved.delta if out is None or saved.dlse is None else -saved.dlse
    dq, dk, dv = run(dout, v, torch.zeros_like(dout) if out is None else out)
    more_q, more_k, _ = run(*_carriers(missing, dout, v))
    return dq.to(missing.dtype) + more_q, dk.to(missing.dtype) + more_k, dv


def _carriers(missing: Tensor, dout: Tensor, v: Tensor) -> Gradients:
    """``(dout', v', out')`` in the op's dtype with ``sum(dout' * out') = missing``: in two columns, for one would round
    it, and as a product of roots, so that float16 holds it."""
    root = missing.abs().sqrt().to(dout.dtype)
    other = torch.where(root == 0, 0.0, missing / root.to(missing.dtype))
    high = other.to(dout.dtype)
    low = (other - high.to(missing.dtype)).to(dout.dtype)
    carrier, found = torch.zeros_like(dout), torch.zeros_like(dout)
    carrier[..., 0], carrier[..., 1] = root, root
    found[..., 0], found[..., 1] = high, low
    return carrier, torch.zeros_like(v), found


def refusal(call: Call, dtypes: tuple[torch.dtype, ...], capability: tuple[int, int]) -> str | None:
    """Why none of these ops can do a call, or None.

    Args:
        dtypes: that the op computes in. capability: the oldest GPU that can.
    """
    if call.device != "cuda":
        return f"device must be cuda; got {call.device}"
    if torch.version.hip is not None:
        return f"device must be a GPU of NVIDIA; got ROCm {torch.version.hip}"
    if call.dtype not in dtypes:
        return f"dtype must be {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}; got {call.dtype}"
    if call.across_rings:
        return "deterministic must be None; got across_rings, which nobody has seen this op keep"
    here = compute_capability()
    if here is not None and here < capability:
        return f"compute capability must be {_dotted(capability)} or more; got {_dotted(here)}"
    return plain_only(call)


def scale_refusal(call: Call) -> str | None:
    """Why ops that look for the largest score before they scale it cannot do a call, or None: a score that is hidden
    is -inf then, and times a scale below 0 it would be the largest of all, times 0 no number."""
    return None if call.scale > 0 else f"scale must be positive; got {call.scale}"


def compute_capability() -> tuple[int, int] | None:
    """Of the current GPU; None where there is none, and tensors have shapes alone."""
    return _capability_of(torch.cuda.current_device()) if torch.cuda.is_available() else None


@cache
def _capability_of(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
