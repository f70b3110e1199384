"""What the ranks of a pool do in tests of hybrids of rings and split heads."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from on_ranks import PATIENCE_S, caught
from torch.distributed.device_mesh import init_device_mesh

from ringspun import Causal
from ringspun.testing.cases import Case, inputs
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel
from ringspun.torch.bias import Alibi

GROUPS = {
    "2": (2, 2),
    "4": (1, 4),
    "ring inside": (2, 2),
    "mesh": (2, 2),
    "mesh, ring inside": (2, 2),
    "groups": (2, 2),
}
"""How a context of 4 ranks is made, and its degrees."""


def hybrid(how: str, case: Case) -> ContextParallel:
    asked = {"layout": case.layout, "timeout_s": PATIENCE_S}
    if how.startswith("mesh"):
        names = ("ulysses", "ring") if how.endswith("inside") else ("ring", "ulysses")
        return ContextParallel(init_device_mesh("cpu", (2, 2), mesh_dim_names=names), **asked)
    if how == "groups":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        return ContextParallel(ring_group=mesh.get_group("outer"), ulysses_group=mesh.get_group("inner"), **asked)
    if how == "ring inside":
        return ContextParallel(ulysses=2, inner="ring", **asked)
    return ContextParallel(ulysses=int(how), **asked)


def in_a_hybrid(rank: int, how: str, cases: list[Case]) -> list[dict[str, np.ndarray]]:
    """Each case forward and backward, gathered."""
    found = []
    for case in cases:
        found.append(run_ring(case, inputs(case), hybrid(how, case)))
    return found


def refusals_of_groups(rank: int) -> list[tuple[tuple[str, str], str]]:
    """What contexts of groups and meshes that are no grid say, and what they should."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    row = mesh.get_group("ring")
    return [
        (caught(lambda: ContextParallel(mesh)), "must have one dimension, or the two"),
        (caught(lambda: ContextParallel(ring_group=row, ulysses_group=row)), "the columns and rows of a grid"),
        (caught(lambda: ContextParallel(dist.group.WORLD, ring_group=row, ulysses_group=row)), "come together"),
    ]


TROUBLES = ("late", "batch", "scale", "tokens", "kernel", "gone", "no backward")


def in_trouble(rank: int, trouble: str, at: int) -> tuple[str, str, float]:
    """A second call in which rank `at` alone does otherwise; on a group of its own. What came of it, and when (s)."""
    group = dist.new_group()
    cp = ContextParallel(group, ulysses=2, timeout_s=2)
    plan = cp.plan(64, Causal())
    q = torch.randn(1, 4, plan.partition.local_tokens, 8, requires_grad=True)
    plan.attention(q, q, q).sum().backward()
    odd, start = rank == at, time.monotonic()

    def call() -> None:
        if odd and trouble == "gone":
            return
        if odd and trouble == "late":
            time.sleep(4)
        x = torch.cat([q, q]) if odd and trouble == "batch" else q[:, :, 1:] if odd and trouble == "tokens" else q
        kernel, scale = "none" if odd and trouble == "kernel" else None, 0.3 if odd and trouble == "scale" else None
        out = plan.attention(x, x, x, kernel=kernel, scale=scale)
        if not (odd and trouble == "no backward"):
            out.sum().backward()

    return *caught(call), time.monotonic() - start


def asked_otherwise(rank: int, ulysses: int, what: str) -> tuple[str, str]:
    """The rings of a hybrid ask for different attention, each of them alike on its ranks."""
    cp = ContextParallel(dist.new_group(), ulysses=ulysses, timeout_s=PATIENCE_S)
    plan = cp.plan(32, Causal())
    q = torch.randn(1, 4, plan.partition.local_tokens, 8)
    asked = {
        "scale": {"scale": 0.1},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": torch.zeros(4)},
        "bias": {"bias": Alibi(torch.ones(4))},
        "kernel": {"kernel": "eager"},
    }[what]
    return caught(lambda: plan.attention(q, q, q, **(asked if cp.ulysses_rank == 1 else {})))


def backward_in_another_order(rank: int, ulysses: int) -> tuple[str, str]:
    """Two calls of one plan; ranks of odd Ulysses rank go backward through the first one first."""
    cp = ContextParallel(dist.new_group(), ulysses=ulysses, timeout_s=PATIENCE_S)
    plan = cp.plan(32, Causal())
    q = torch.randn(1, 4, plan.partition.local_tokens, 8, requires_grad=True)
    calls = [plan.attention(q, q, q) for _ in range(2)]

    def backward() -> None:
        for out in calls if cp.ulysses_rank % 2 else reversed(calls):
            out.sum().backward()

    return caught(backward)


def forward_while_others_go_backward(rank: int) -> tuple[str, str]:
    """Rank 3 needs no gradients, and calls forward again."""
    plan = ContextParallel(dist.new_group(), ulysses=2, timeout_s=2).plan(32, Causal())
    q = torch.randn(1, 4, plan.partition.local_tokens, 8, requires_grad=rank != 3)
    out = plan.attention(q, q, q)
    return caught(lambda: plan.attention(q, q, q) if rank == 3 else out.sum().backward())


def after_groups_of_some(rank: int, how: str, case: Case) -> dict[str, np.ndarray]:
    """Ranks are in different numbers of groups when the hybrid makes its own."""
    for ranks in ([0], [0, 1], [2]):
        dist.new_group(ranks)
    return run_ring(case, inputs(case), hybrid(how, case))


def other_degrees(rank: int, odd: dict[str, Any]) -> tuple[str, str]:
    """Rank 1 asks for other degrees."""
    group = dist.new_group()
    return caught(lambda: ContextParallel(group, **(odd if rank == 1 else {"ulysses": 2})).plan(32, Causal()))


def no_grid(rank: int) -> tuple[str, str]:
    """Rings, and groups of which one alone goes with them."""
    mine: list[dist.ProcessGroup] = []
    for groups in ([[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 5], [3, 4]]):
        made = [dist.new_group(ranks) for ranks in groups]
        mine += [group for group, ranks in zip(made, groups, strict=True) if rank in ranks]
    return caught(lambda: ContextParallel(ring_group=mine[0], ulysses_group=mine[1]))
