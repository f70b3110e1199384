"""The checksum of a message's bytes: which bytes, and where each of them stands."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 18
"""Words that are weighted at once."""
FACTOR = 6364136223846793005
"""5 modulo 8: powers of it agree in few low bits, so that blocks that change places show."""


def checksum(data: Tensor) -> int:
    """An int64 that stands for the bytes of a one-dimensional uint8 tensor and their order.

    On the CPU it is XXH3 (64 bits), elsewhere `weighted_sum`: ranks of one ring are on one kind of device. Damage at
    random is missed once in 2 ** 64.

    Args:
        data: contiguous; its length is a multiple of 4 bytes.
    """
    if data.device.type != "cpu":
        return weighted_sum(data)
    import xxhash  # by those who check bytes: whoever does not needs torch and NumPy alone

    value: int = xxhash.xxh3_64_intdigest(data.numpy().data)
    return value - (value >> 63 << 64)


def checksum_there(data: Tensor) -> Tensor:
    """`checksum` as an int64 ``[1]`` on the data's device: nobody waits for it."""
    if data.device.type == "cpu":
        return torch.tensor([checksum(data)])
    return _weighted_total(data).view(1)


def weighted_sum(data: Tensor) -> int:
    """The same on any device: the sum of 32-bit words times odd pseudo-random 64-bit weights, modulo 2 ** 64.

    One damaged word is always found. Any given damage to more words of a block is missed by at most one choice of
    weights in 2 ** 32, damage at random once in 2 ** 63: words half as long as weights leave no high bits that cancel.
    """
    return int(_weighted_total(data))


def _weighted_total(data: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    weights = _weights(data.device)
    for words in torch.split(data.view(torch.int32), BLOCK):
        total = total * FACTOR + (words.to(torch.int64) * weights[: words.numel()]).sum()
    return total


@cache
def _weights(device: torch.device) -> Tensor:
    """SplitMix64 of 1, 2, ...: a formula, so that every rank has the same ones."""
    z = np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)
