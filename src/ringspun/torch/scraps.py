"""Scraps: tensors a few tokens at a time, so that what is computed of them in between stays small."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

SCRAP = 1 << 16
"""Elements of an intermediate result that are alive at once (256 KiB in float32, which a core's cache holds)."""
SCRAP_OF_A_GPU = 1 << 24
"""There (64 MiB in float32), where every call costs microseconds and no cache holds a layer."""


def scraps(first: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors ``[..., T, D]`` a few tokens at a time, about `SCRAP` elements of the first; on other devices than CPUs
    `SCRAP_OF_A_GPU`."""
    tokens = first.shape[-2]
    few = max(1, (SCRAP if first.device.type == "cpu" else SCRAP_OF_A_GPU) * tokens // max(1, first.numel()))
    for start in range(0, tokens, few):
        yield tuple(x.narrow(-2, start, min(few, tokens - start)) for x in (first, *others))
