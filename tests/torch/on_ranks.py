"""What the ranks of a pool are asked to do; they import this file. Every function gets its ring rank first."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from ringspun import Causal, Contiguous, Documents, Full, Window, Zigzag
from ringspun.core.accounting import account
from ringspun.core.wire import Format
from ringspun.testing.cases import Case, Shape, inputs
from ringspun.testing.slow_links import SlowLinks
from ringspun.testing.torch import plan_of, rounded, run_ring
from ringspun.torch import ContextParallel, Gloo, ring_attention
from ringspun.torch.kernels import AtenCpu

PATIENCE_S = 20.0


def run_cases(rank: int, cases: list[Case], kernel: str | None = None) -> list[dict[str, np.ndarray]]:
    """Each case forward and backward over the default group, gathered: out, lse, dq, dk, dv."""
    found = []
    for case in cases:
        context = ContextParallel(dist.group.WORLD, layout=case.layout, timeout_s=PATIENCE_S)
        found.append(run_ring(case, rounded(case, inputs(case)), context, kernel=kernel))
    return found


def run_routes(rank: int, asked: list[tuple[Case, Any]], backward: Any = "auto") -> list[dict[str, np.ndarray]]:
    """Each case by its route."""
    found = []
    for case, route in asked:
        options = {"layout": case.layout, "route": route, "backward": backward}
        found.append(run_ring(case, inputs(case), ContextParallel(dist.group.WORLD, timeout_s=PATIENCE_S, **options)))
    return found


def other_routes(rank: int, options: tuple[dict[str, Any], dict[str, Any]]) -> tuple[str, str]:
    """Rank 1 has other options; what planning says."""
    context = ContextParallel(dist.group.WORLD, timeout_s=PATIENCE_S, **options[rank])
    return caught(lambda: context.plan(12, Full()))


def over_slow_links(rank: int, case: Case, route: str, bytes_per_s: float, folder: str) -> tuple[Any, float]:
    """A case whose ranks are two nodes with a slow link; how long it took (seconds), and what it gave."""
    driver = SlowLinks(Gloo(dist.group.WORLD), node=2, bytes_per_s=bytes_per_s, folder=Path(folder))
    context = ContextParallel(driver, layout=case.layout, route=route)
    plan = plan_of(case, context)
    dist.barrier()
    start = time.monotonic()
    return run_ring(case, inputs(case), context, plan=plan), time.monotonic() - start


def call_with_dtensors(rank: int) -> tuple[str, str, str]:
    """Keys as a DTensor; what the call says of it."""
    from torch.distributed.tensor import Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))
    plan = ContextParallel(dist.group.WORLD, timeout_s=PATIENCE_S).plan(4 * size, Causal())
    q = torch.randn(1, 2, 4, 4)
    k = distribute_tensor(torch.randn(1, 2, 4 * size, 4), mesh, [Shard(2)])
    return ("k", *caught(lambda: plan.attention(q, k, q)))


def caught(call: Callable[[], Any]) -> tuple[str, str]:
    """Class and message of what `call` raises."""
    try:
        call()
    except Exception as problem:
        return type(problem).__name__, str(problem)
    return "nothing", ""


def through_shard_and_gather(rank: int, case: Case) -> dict[str, np.ndarray]:
    """Whole tensors in, the whole result out, on every rank its own loss of it. This rank's shares of the gradients."""
    given = inputs(case)
    context = ContextParallel(dist.group.WORLD, layout=case.layout, timeout_s=PATIENCE_S)
    plan = context.plan(case.seq_len, case.mask)
    part = plan.partition
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in (given.q, given.k, given.v))
    out = part.gather(plan.attention(*(part.shard(x, dim=2) for x in (q, k, v))), dim=2)
    (out * torch.from_numpy(given.dout) * (rank + 1)).sum().backward()
    return {"out": out.detach().numpy(), "dq": q.grad.numpy(), "dk": k.grad.numpy(), "dv": v.grad.numpy()}


# -- disagreement ----------------------------------------------------------------------------------------------------

S, SHAPE = 12, Shape(batch=2, heads=4, kv_heads=2, head_size=6, value_size=5)


def disagree(rank: int, odd: int, what: str) -> tuple[str, str]:
    """Rank `odd` alone does something else; what this rank hears."""
    mine = DISAGREEMENTS[what] if rank == odd else {}
    return caught(lambda: one_call(**mine))


def one_call(
    *,
    seq_len: int = S,
    mask: Any = None,
    layout: Any = None,
    documents: Documents | None = None,
    shape: Shape = SHAPE,
    dtype: torch.dtype = torch.float32,
    gradients: str = "qkv",
    rows: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """A plan, forward and backward over the default group; every argument can be another on one rank."""
    context = ContextParallel(dist.group.WORLD, layout=layout or Zigzag(), timeout_s=PATIENCE_S)
    part = context.partition(seq_len, documents=documents)
    plan = part.plan(Causal() if mask is None else mask)
    tokens = part.local_tokens if rows is None else rows
    sizes = {"q": (shape.heads, shape.head_size), "k": (shape.kv_heads, shape.head_size)}
    sizes["v"] = (shape.kv_heads, shape.value_size)
    x = {n: torch.ones(shape.batch, h, tokens, d, dtype=dtype) for n, (h, d) in sizes.items()}
    for name in gradients:
        x[name].requires_grad_()
    out = plan.attention(**x, **options)
    out.sum().backward()
    return out


DISAGREEMENTS: dict[str, dict[str, Any]] = {
    "seq_len": {"seq_len": S + 1},
    "mask": {"mask": Causal() & Window(5)},
    "layout": {"layout": Contiguous()},
    "documents": {"documents": Documents([5, 7])},
    "dtype": {"dtype": torch.bfloat16},
    "batch": {"shape": replace(SHAPE, batch=3)},
    "heads": {"shape": replace(SHAPE, heads=8)},
    "kv_heads": {"shape": replace(SHAPE, kv_heads=4)},
    "head_size": {"shape": replace(SHAPE, head_size=7)},
    "value_size": {"shape": replace(SHAPE, value_size=3)},
    "scale": {"scale": 0.5},
    "kernel": {"kernel": "eager"},
    "gradients of q, k, v, sinks, bias": {"gradients": "qv"},
    # wrong on one rank alone
    "a mask that does not fit": {"mask": Documents([S + 3])},
    "no mask": {"mask": "causal"},
    "rows that do not fit": {"rows": 1},
    "heads that do not divide": {"shape": replace(SHAPE, heads=5)},
    "integers": {"dtype": torch.int64, "gradients": ""},
    "no such kernel": {"kernel": "flash"},
}


def one_rank_calls_attention_instead_of_plan(rank: int) -> tuple[str, str]:
    """Rank 1 is a plan ahead of the others."""
    context = ContextParallel(dist.group.WORLD, timeout_s=PATIENCE_S)
    plan = context.plan(S, Causal())
    x = torch.ones(1, 1, plan.partition.local_tokens, 4)
    return caught(lambda: plan.attention(x, x, x) if rank == 1 else context.plan(S, Causal()))


def one_rank_uses_ring_attention_wrongly(rank: int) -> tuple[str, str]:
    """Rank 1 forgets a dimension; or holds more rows than the others, where equal shards are meant."""
    q = torch.ones(1, 2, 4, 3)
    first = caught(lambda: ring_attention(*[q[0] if rank == 1 else q] * 3))
    second = caught(lambda: ring_attention(*[torch.cat([q, q], 2) if rank == 1 else q] * 3))
    return (*first, *second)


def one_rank_gathers_wrongly(rank: int) -> tuple[str, str]:
    """Rank 1 has lost a row; the others wait for it in the gather."""
    part = ContextParallel(dist.group.WORLD, timeout_s=1.0).partition(S)
    x = torch.ones(part.local_tokens - (rank == 1), 3)
    return caught(lambda: part.gather(x, dim=0))


def stay_away(rank: int, silent: int, timeout_s: float) -> tuple[str, str, float]:
    """Rank `silent` never calls; what the others hear, and how soon."""
    context = ContextParallel(dist.group.WORLD, timeout_s=timeout_s)
    start = time.monotonic()
    found = caught(lambda: context.plan(S, Causal())) if rank != silent else ("silent", "")
    return (*found, time.monotonic() - start)


def leave_after_the_plan(rank: int, gone: int, timeout_s: float) -> tuple[str, str, float]:
    """All agree on a plan and its first call; rank `gone` takes no part in the second."""
    context = ContextParallel(dist.group.WORLD, timeout_s=timeout_s)
    plan = context.plan(S, Full())
    x = torch.ones(1, 1, plan.partition.local_tokens, 4)
    plan.attention(x, x, x)
    start = time.monotonic()
    found = caught(lambda: plan.attention(x, x, x)) if rank != gone else ("silent", "")
    return (*found, time.monotonic() - start)


def fail_in_the_second_call(rank: int, odd: int, timeout_s: float) -> tuple[str, str, float]:
    """Facts are agreed on; then rank `odd` alone passes something that does not fit."""
    context = ContextParallel(dist.group.WORLD, timeout_s=timeout_s)
    plan = context.plan(S, Full())
    x = torch.ones(1, 1, plan.partition.local_tokens, 4)
    plan.attention(x, x, x)
    start = time.monotonic()
    y = x[:, :, 1:] if rank == odd else x
    found = caught(lambda: plan.attention(y, y, y))
    return (*found, time.monotonic() - start)


def die_while_computing(rank: int, victim: int) -> list[tuple[str, str]]:
    """Rank `victim` is killed in its second step; what the others hear, calling until they hear something."""

    class Deadly(AtenCpu):
        steps = 0

        def forward(self, block, tiles):
            self.steps += 1
            if rank == victim and self.steps == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(block, tiles)

    plan = ContextParallel(dist.group.WORLD, timeout_s=10.0).plan(S, Full())
    x, kernel = torch.ones(1, 1, plan.partition.local_tokens, 4), Deadly()
    return [caught(lambda: plan.attention(x, x, x, kernel=kernel)) for _ in range(2)]


# -- D · distributed -------------------------------------------------------------------------------------------------


class Sleepy(AtenCpu):
    """Sleeps before each step, a while that only this rank's seed knows."""

    def __init__(self, seed: int, longest_s: float) -> None:
        self.random, self.longest_s = random.Random(seed), longest_s

    def forward(self, block, tiles):
        time.sleep(self.random.uniform(0, self.longest_s))
        return super().forward(block, tiles)

    def backward(self, block, saved, tiles):
        time.sleep(self.random.uniform(0, self.longest_s))
        return super().backward(block, saved, tiles)


def run_sleepy(rank: int, case: Case, seed: int, longest_s: float) -> dict[str, np.ndarray]:
    """A case of which no rank knows when the others come."""
    context = ContextParallel(dist.group.WORLD, layout=case.layout, timeout_s=PATIENCE_S)
    return run_ring(case, rounded(case, inputs(case)), context, kernel=Sleepy(100 * seed + rank, longest_s))


def send_much(rank: int, megabytes: int, longest_s: float) -> tuple[float, float, float]:
    """One query a rank sees all keys; whole blocks travel for them. Their out, and gradients of values."""
    heads, size, ranks = 1, 64, dist.get_world_size()
    tokens = megabytes * 2**20 // (2 * heads * size * 4)
    context = ContextParallel(dist.group.WORLD, layout=Contiguous(), timeout_s=PATIENCE_S, backward="keys")
    plan = context.plan(ranks, Full(), key_len=ranks * tokens)
    q, k = torch.zeros(1, heads, 1, size), torch.zeros(1, heads, tokens, size)
    v = torch.full((1, heads, tokens, size), 1.0 + rank, requires_grad=True)
    out = plan.attention(q, k, v, kernel=Sleepy(rank, longest_s))
    out.backward(torch.ones_like(out))
    sent = sum(context.driver.counts.bytes.values())
    assert sent >= 3 * (ranks - 1) * megabytes * 2**20  # keys and values, twice, and their gradients
    return float(out[0, 0, 0, 0]), float(v.grad[0, 0, -1, 0]) * tokens, float(v.grad.sum())


def first_of_a_fresh_group(rank: int, case: Case) -> dict[str, np.ndarray]:
    """Ring attention is the first communication that this group sees."""
    group = dist.new_group(list(range(dist.get_world_size())))
    context = ContextParallel(group, layout=case.layout, timeout_s=PATIENCE_S)
    return run_ring(case, inputs(case), context)


def in_groups(
    rank: int, groups: list[list[int]], cases: list[Case], sort_ranks: bool
) -> tuple[int, tuple[int, int] | None, dict[str, np.ndarray] | None, list[int]]:
    """Each group runs its own case at the same time; groups need not be sorted. Which group this rank was in, where in
    it, what came out, and the positions that it held."""
    order: dict[str, Any] = {} if sort_ranks else {"sort_ranks": False}
    made = [dist.new_group(group, **order) for group in groups]
    for number, (group, case) in enumerate(zip(groups, cases, strict=True)):
        if rank in group:
            context = ContextParallel(made[number], layout=case.layout, timeout_s=PATIENCE_S)
            found = run_ring(case, inputs(case), context)
            held = context.partition(case.seq_len).positions().tolist()
            return number, (context.ring_rank, context.ring_size), found, held
    return -1, None, None, []


def over_meshes(rank: int, case: Case) -> tuple[dict[str, np.ndarray], int, tuple[str, str], tuple[str, str]]:
    """A 2 x 2 mesh: the ring is one of its dimensions; a whole mesh and a foreign group are refused."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    context = ContextParallel(mesh["ring"], layout=case.layout, timeout_s=PATIENCE_S)
    found = run_ring(case, inputs(case), context)
    others = [dist.new_group(ranks) for ranks in ([0], [1, 2, 3])][rank == 0]
    return found, context.ring_rank, caught(lambda: ContextParallel(mesh)), caught(lambda: ContextParallel(others))


def strided(rank: int, kind: str) -> list[torch.Tensor]:
    """Keys and values of odd strides and their contiguous copies; largest difference of each result."""
    context = ContextParallel(dist.group.WORLD, layout=Contiguous(), timeout_s=PATIENCE_S)
    plan = context.plan(12 * dist.get_world_size(), Causal())
    generator = torch.Generator().manual_seed(rank)
    start = [torch.randn(2, 2, 12, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    views = [STRIDED[kind](x) for x in start[:3]]
    assert not any(x.is_contiguous() for x in views)
    copies = [x.contiguous().clone() for x in views]
    results = []
    for x in (views, copies):
        x = [t.detach().requires_grad_() for t in x]
        out = plan.attention(*x)
        results.append([out.detach(), *torch.autograd.grad(out, x, start[3])])
    assert all(torch.equal(x, y) for x, y in zip(views, copies, strict=True))
    return [(a - b).abs().max() for a, b in zip(*results, strict=True)]


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns first": lambda x: x.mT.contiguous().mT,
    "one row for all": lambda x: x[:, :, :1].expand(-1, -1, x.shape[2], -1),
    "one column for all": lambda x: x[..., :1].expand(-1, -1, -1, x.shape[3]),
    "every second row": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], 3).flatten(2, 3)[:, :, ::2],
    "every second column": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], 4).flatten(3, 4)[..., ::2],
}


def leave_at_once(rank: int, calls: int) -> list[float]:
    """Call, drop the tensors, destroy the group, go. What comes out is right all the same."""
    context = ContextParallel(dist.group.WORLD, timeout_s=PATIENCE_S)
    plan = context.plan(S, Full())
    totals = []
    for number in range(calls):
        v = torch.full((1, 2, plan.partition.local_tokens, 4), float(number), requires_grad=True)
        k = torch.ones_like(v, requires_grad=True)
        q = torch.ones_like(v, requires_grad=True)
        out = plan.attention(q, k, v)
        del q, k, v
        totals.append(float(out.detach().mean()))
        out.sum().backward()
        del out
    del plan, context
    dist.destroy_process_group()
    return totals


def call_and_end(rank: int, ranks: int, port: int) -> None:
    """A whole process: join, call, check, end; not with 0 where anything is wrong."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    plan = ContextParallel(dist.group.WORLD, timeout_s=PATIENCE_S).plan(3 * ranks, Full())
    v = torch.full((1, 1, 3, 2), float(rank), requires_grad=True)
    plan.attention(torch.zeros_like(v), torch.zeros_like(v), v).sum().backward()
    assert torch.allclose(v.grad, torch.ones(()))


def alone_in_a_group(rank: int, case: Case) -> tuple[dict[str, np.ndarray], int, int]:
    """A group of one inside a bigger job."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    context = ContextParallel(groups[rank], layout=case.layout)
    found = run_ring(case, inputs(case), context)
    return found, context.ring_size, sum(context.driver.counts.messages.values())


def counted(rank: int, case: Case) -> tuple[dict[Any, int], dict[Any, int], Any, Any]:
    """What this rank sent, forward and then backward, and what accounting says of each."""
    context = ContextParallel(dist.group.WORLD, layout=case.layout, timeout_s=PATIENCE_S)
    plan = context.plan(case.seq_len, case.mask)
    s = case.shape
    tokens = plan.partition.local_tokens
    q, k, v = (
        torch.ones(s.batch, heads, tokens, size, requires_grad=True)
        for heads, size in ((s.heads, s.head_size), (s.kv_heads, s.head_size), (s.kv_heads, s.value_size))
    )
    wire = Format(s.batch, s.heads, s.kv_heads, s.head_size, s.value_size, "float32", 4, 4)
    out = plan.attention(q, k, v)
    forward = dict(context.driver.counts.bytes)
    out.sum().backward()
    both = dict(context.driver.counts.bytes)
    told = [
        account(one, wire, backward=one is plan.schedule.backward)
        for one in (plan.schedule.forward, plan.schedule.backward)
    ]
    backward = {ends: n - forward.get(ends, 0) for ends, n in both.items() if n != forward.get(ends, 0)}
    return forward, backward, told[0].sent_bytes, told[1].sent_bytes


def world_again(rank: int, port: int) -> tuple[float, float, float]:
    """One-off calls alone, then in a group made after them, then in another one: each must find its own ring."""

    def call() -> float:
        q = torch.zeros(1, 1, 2, 1)
        return float(ring_attention(q, q, torch.full_like(q, float(rank)), mask=Full()).mean())

    def join(number: int) -> None:
        store = dist.PrefixStore(str(number), dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    size = dist.get_world_size()
    dist.destroy_process_group()
    alone = call()
    join(1)
    together = call()
    dist.destroy_process_group()
    join(2)
    return alone, together, call()


# -- the pool itself -------------------------------------------------------------------------------------------------


def describe(rank: int, *args: Any) -> tuple[Any, ...]:
    """Who this is and what came with the call."""
    return dist.get_rank(), dist.get_world_size(), *args, torch.get_num_threads()


def sum_over_ranks(rank: int, x: torch.Tensor) -> torch.Tensor:
    """``(1 + 2 + ... + R) x``."""
    total = (rank + 1) * x
    dist.all_reduce(total)
    return total


def pid(rank: int) -> int:
    """This process's number."""
    return os.getpid()


def complain(rank: int, odd: int) -> int:
    """Raises on one rank."""
    if rank == odd:
        raise KeyError(f"rank {rank} complains")
    return rank


def return_a_lambda(rank: int) -> Any:
    """Something that cannot travel."""
    return lambda: rank


def leave(rank: int) -> None:
    """Asks the process to end."""
    raise SystemExit(3)


def hang(rank: int, odd: int) -> int:
    """Does not return on one rank."""
    if rank == odd:
        time.sleep(1000)
    return rank


def die(rank: int, odd: int) -> int:
    """Is killed on one rank."""
    if rank == odd:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def leave_a_group(rank: int) -> None:
    """A group that is used, and left to whoever comes next."""
    dist.all_reduce(torch.ones(1), group=dist.new_group())


def groups_and_threads(rank: int) -> tuple[int, int]:
    """How many this process has; threads are counted where the system tells of them."""
    tasks = "/proc/self/task"
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir(tasks)) if os.path.exists(tasks) else 0


def destroy_group(rank: int) -> None:
    """Leaves the pool without a group."""
    dist.destroy_process_group()
