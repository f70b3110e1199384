"""Measuring links: how long messages between ranks of a process group take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspun.core.links import Link

SIZES = tuple(1 << n for n in range(10, 27, 2))
"""1 KiB to 64 MiB."""


def measure_links(sizes: Sequence[int] = SIZES, *, repeats: int = 9, group: dist.ProcessGroup | None = None) -> Link:
    """How long a message to the next rank takes: with nobody else sending, and with all. Collective.

    Args:
        sizes: message lengths (bytes). repeats: of each; the median counts. group: default: the default group.
    Returns:
        the slowest rank's times, the same on every rank.
    """
    rows = [(_time(n, repeats, group, everybody=False), _time(n, repeats, group, everybody=True)) for n in sizes]
    table = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    alone, together = table.T.tolist()
    return Link(tuple(sizes), tuple(alone), tuple(max(a, t) for a, t in zip(alone, together, strict=True)))


def links_on_rank(ring_rank: int, sizes: Sequence[int], repeats: int) -> Link:
    """`measure_links` on every rank of a pool."""
    torch.set_num_threads(1)
    return measure_links(sizes, repeats=repeats)


def _time(n_bytes: int, repeats: int, group: dist.ProcessGroup | None, *, everybody: bool) -> float:
    """Median of the seconds from the common start until a rank has what it receives; 0 for one that receives nothing.
    The first exchange, which makes connections, does not count."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent, got = torch.zeros(n_bytes, dtype=torch.uint8), torch.empty(n_bytes, dtype=torch.uint8)
    sends, receives = everybody or rank == 0, everybody or rank == 1 % size
    operations: list[tuple[Any, Tensor, int]] = []
    if sends:
        operations.append((dist.isend, sent, (rank + 1) % size))
    if receives:
        operations.append((dist.irecv, got, (rank - 1) % size))
    times = [_once(operations, group) for _ in range(repeats + 1)][1:]
    return median(times) if receives else 0.0


def _once(operations: Sequence[tuple[Any, Tensor, int]], group: dist.ProcessGroup | None) -> float:
    on = dist.group.WORLD if group is None else group
    dist.barrier(on)
    start = time.perf_counter()
    if not operations:
        return 0.0
    works = dist.batch_isend_irecv([dist.P2POp(op, x, group=on, group_peer=peer) for op, x, peer in operations])
    for work in works:
        work.wait()
    return time.perf_counter() - start
