"""The host: its cores, and arrays that live on it. The core reads boundaries; it never synchronises with a device."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import connection
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ringspun.errors import DtypeError, MaskError


def host_array(name: str, values: Any, variable: str = "boundaries") -> NDArray[Any]:
    """`values` as an array of whatever type and shape; `variable` is what an error calls them in a line of code.

    Raises:
        DtypeError: a tensor that lives on a device, or whose type NumPy does not know (bfloat16).
        MaskError: rows of different lengths.
    """
    device = str(getattr(values, "device", "cpu"))
    if not device.lower().startswith(("cpu", "tfrt_cpu")):
        raise DtypeError(
            f"{name} must be host data; got a tensor on {device}. "
            f"Build the mask in the collator, or write `{variable}.cpu()` where a synchronisation is acceptable."
        )
    try:
        return np.asarray(values)
    except ValueError:
        raise MaskError(f"{name} must have rows of one length; got rows of different lengths.") from None
    except (TypeError, RuntimeError):  # torch's bfloat16, or a tensor that requires a gradient
        kind = getattr(values, "dtype", type(values).__name__)
        raise DtypeError(f"{name} must be integers or booleans; got {kind}.") from None


def host_integers(name: str, values: Any) -> NDArray[np.int64]:
    """`values` as a one-dimensional int64 array.

    Raises:
        DtypeError: a tensor that lives on a device, or values that are not integers.
        MaskError: not one-dimensional.
    """
    array = host_array(name, values)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{name} must be integers; got {array.dtype}.")
    if array.ndim != 1:
        raise MaskError(
            f"{name} must be one-dimensional (one row); got shape {array.shape}. "
            "For a batch make one mask per row and give plan() the list."
        )
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise MaskError(f"{name} must fit int64; got {int(array.max())}.")
    return array.astype(np.int64)


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether `value` is a whole number, Python's or NumPy's; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent() -> None:
    """Has this process end as soon as the one that started it is gone, however that ended (SIGKILL too).

    Without effect in a process that multiprocessing did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:  # pragma: no cover (in a child)
        threading.Thread(target=_outlive_nobody, args=(parent.sentinel,), daemon=True).start()


def _outlive_nobody(sentinel: int) -> None:  # pragma: no cover (runs in a child, and ends it)
    connection.wait([sentinel])
    os._exit(1)
