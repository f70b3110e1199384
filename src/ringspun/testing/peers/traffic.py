"""Bytes that a rank sends, counted from the collectives that a block calls.

Counted is what the arguments say: a send its tensor, an all-to-all what is not for the rank itself, an all-gather the
rank's own part once for every other rank. What a transport adds to that is not seen.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SILENT = {"barrier", "recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd"}
"""What sends nothing of its own."""


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, counts what this thread sends; `bytes` is None once something unknown was called.

    A collective inside of a custom operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int | None = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            sent = _sent(func._opname, args)
            self.bytes = None if sent is None or self.bytes is None else self.bytes + sent
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Any) -> int | None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if name in SILENT:
        return 0
    if name == "send":
        return sum(_bytes(x) for x in args[0])
    if name == "alltoall_base_":
        return _exchanged(args[1], args[4], rank, size)
    if name == "all_to_all_single":
        return _exchanged(args[0], args[2], rank, size)
    if name == "all_gather_into_tensor":
        return (size - 1) * _bytes(args[0])
    if name == "_allgather_base_":
        return (size - 1) * _bytes(args[1])
    return None


def _exchanged(x: Tensor, splits: Any, rank: int, size: int) -> int:
    """Of an all-to-all's input, what goes to others."""
    if not splits:
        return _bytes(x) * (size - 1) // size
    rows = sum(splits)
    return _bytes(x) * (rows - splits[rank]) // rows if rows else 0


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
