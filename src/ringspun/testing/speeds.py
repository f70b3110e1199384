"""Measuring kernels: how fast each computes tiles of several sizes, beside a matrix product of the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from ringspun.torch.gemm import gemm_seconds, timed
from ringspun.torch.kernels import Call, Kernel, choose, kernels_on
from ringspun.torch.kernels.base import Block, Saved, StepTiles, accumulator_dtype


@dataclass(frozen=True)
class Speed:
    """How fast a kernel computed one tile.

    Args:
        kernel: name. dtype: name. tokens: of the tile, queries and keys each. causal: whether a triangle of it.
        forward, backward: allowed pairs' FLOP per second (two products forward, five backward, a multiply-add is two).
        gemm: FLOP per second of a large matrix product. refusal: why it was not measured.
    """

    kernel: str
    dtype: str
    tokens: int
    causal: bool
    forward: float = 0.0
    backward: float = 0.0
    gemm: float = 0.0
    refusal: str | None = None


def measure_kernels(
    tokens: Sequence[int], dtypes: Sequence[str], *, heads: int, head_size: int, repeats: int = 5,
    kernels: Sequence[Kernel] | None = None,
) -> Iterator[Speed]:  # fmt: skip
    """Kernels on full and causal tiles, in this process and with its number of threads; medians."""
    for dtype in dtypes:
        gemm = _gemm(dtype, repeats)
        for kernel in kernels_on("cpu") if kernels is None else kernels:
            for n in tokens:
                for causal in (False, True):
                    yield _speed(kernel, dtype, n, causal, heads, head_size, gemm, repeats)


def speeds_on_rank(
    ring_rank: int, tokens: Sequence[int], dtypes: Sequence[str], heads: int, head_size: int, repeats: int
) -> list[Speed]:
    """On every rank of a pool, all at once: the kernel that plans of such tensors take, by one thread."""
    torch.set_num_threads(1)
    found: list[Speed] = []
    for dtype in dtypes:
        of = getattr(torch, dtype)
        kernel = choose(Call(heads, heads, head_size, head_size, of, "cpu", head_size**-0.5))
        found += measure_kernels(tokens, [dtype], heads=heads, head_size=head_size, repeats=repeats, kernels=[kernel])
    return found


def _speed(
    kernel: Kernel, dtype: str, n: int, causal: bool, heads: int, head_size: int, gemm: float, repeats: int
) -> Speed:
    of = getattr(torch, dtype)
    refusal = kernel.refuses(Call(heads, heads, head_size, head_size, of, "cpu", head_size**-0.5))
    if refusal is not None:
        return Speed(kernel.name, dtype, n, causal, refusal=refusal)
    q, k, v, dout = (torch.randn(1, heads, n, head_size).to(of) for _ in range(4))
    block = Block(q, k, v, head_size**-0.5)
    tiles = StepTiles(np.array([[0, -1, 0, n, 0, n, 0 if causal else 1 - n, n - 1]]))
    parts = list(kernel.forward(block, tiles))
    out = torch.cat([part.out for part in parts], 2) if len(parts) > 1 else parts[0].out
    lse = torch.cat([part.lse for part in parts], 2) if len(parts) > 1 else parts[0].lse
    saved = Saved(out, lse, dout, None, lse.new_zeros(lse.shape, dtype=accumulator_dtype(of)))
    flop = 2 * (n * (n + 1) // 2 if causal else n * n) * heads * head_size
    forward = _seconds(lambda: list(kernel.forward(block, tiles)), repeats)
    backward = _seconds(lambda: list(kernel.backward(block, saved, tiles)), repeats)
    return Speed(kernel.name, dtype, n, causal, 2 * flop / forward, 5 * flop / backward, gemm)


def _gemm(dtype: str, repeats: int, n: int = 1024) -> float:
    return 2 * n**3 / median(gemm_seconds(getattr(torch, dtype), repeats, n))


def _seconds(work: Callable[[], object], repeats: int) -> float:
    return median(timed(work, repeats))
