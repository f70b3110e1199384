"""From the host to a device without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def staged(array: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """An array of the host where a copy of it to a device can be queued (``non_blocking=True``): in pinned memory,
    which torch uses again only when that copy is done. A copy from other memory waits for the device to come to it."""
    x = array if isinstance(array, Tensor) else torch.from_numpy(array)
    return x.pin_memory() if on_gpu(device) else x


def on_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU that is there; a fake one is not."""
    return device.type == "cuda" and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def uploaded(array: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """An array of the host on a device, its copy queued; on the CPU it shares the array's memory."""
    return staged(array, device).to(device, non_blocking=True)
