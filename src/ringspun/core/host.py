"""The host: its cores, and integers that live on it. The core reads boundaries; it never synchronises with a device."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.errors import DtypeError, MaskError


def host_integers(name: str, values: Any) -> NDArray[np.int64]:
    """`values` as a one-dimensional int64 array.

    Raises:
        DtypeError: a tensor that lives on a device, or values that are not integers.
        MaskError: not one-dimensional.
    """
    device = str(getattr(values, "device", "cpu"))
    if not device.lower().startswith(("cpu", "tfrt_cpu")):
        raise DtypeError(
            f"{name} must be host data; got a tensor on {device}. "
            "Build the documents in the collator, or write `boundaries.cpu()` where a synchronisation is acceptable."
        )
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{name} must be integers; got {array.dtype}.")
    if array.ndim != 1:
        raise MaskError(f"{name} must be one-dimensional (one row); got shape {array.shape}.")
    return array.astype(np.int64)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
