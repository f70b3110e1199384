"""What the ranks of a pool are asked to do to die, fail or come late. Every function gets its world rank first."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from ringspun import Causal, Contiguous, Full, Zigzag
from ringspun.core import tiles as tl
from ringspun.core.route.base import Action
from ringspun.steplog import dump, dump_on_signal
from ringspun.torch import ContextParallel, Gloo
from ringspun.torch.kernels import AtenCpu

S, TIMEOUT_S = 12, 1.0


@dataclass(frozen=True)
class Fault:
    """Ring rank `victim` of the group `ranks` does `how` at `where`; step logs go to `folder`."""

    how: str
    where: str
    victim: int
    ranks: tuple[int, ...]
    folder: str
    timeout_s: float = TIMEOUT_S

    def strike(self) -> None:
        """Do it."""
        if self.how == "raise":
            raise ArithmeticError("the victim's own words")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.timeout_s + 0.7)


class Trap(AtenCpu):
    """Computes as ever, but for the victim at its step 1."""

    def __init__(self, fault: Fault, mine: bool) -> None:
        self.fault, self.mine, self.steps = fault, mine, 0

    def _step(self, where: str) -> None:
        self.steps += 1
        if self.mine and self.fault.where == where and self.steps == 2:
            self.fault.strike()

    def forward(self, block, tiles):
        self._step("forward")
        return super().forward(block, tiles)

    def backward(self, block, saved, tiles):
        self._step("backward")
        yield from super().backward(block, saved, tiles)


class Layer(torch.nn.Module):
    """What a message can name."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x, x, x)


def suffer(rank: int, fault: Fault) -> tuple[str, str, float]:
    """Two calls, forward and backward, and the fault in the second, or before all; kind and words of the error, and how
    long after the fault's place it came (seconds)."""
    order: dict[str, Any] = {} if list(fault.ranks) == sorted(fault.ranks) else {"sort_ranks": False}
    group = dist.new_group(list(fault.ranks), **order)
    if rank not in fault.ranks:
        return "apart", "", 0.0
    mine = dist.get_rank(group) == fault.victim
    start = time.monotonic()
    try:
        if mine and fault.where == "before":
            fault.strike()
        context = ContextParallel(group, layout=Zigzag(), timeout_s=fault.timeout_s, log_dir=fault.folder)
        plan, trap = context.plan(S, Full()), Trap(fault, mine)
        model = torch.nn.Sequential(torch.nn.Identity(), Layer(lambda *x: plan.attention(*x, kernel=trap)))
        x = torch.ones(1, 1, plan.partition.local_tokens, 4, requires_grad=True)
        plan.attention(x, x, x).sum().backward()
        plan.attention(x, x, x, kernel=AtenCpu()).sum().backward()
        if fault.where != "before":  # the trap's kernel object differs, its name and so the agreed facts do not
            start = time.monotonic()
        if mine and fault.where == "between":
            fault.strike()
        out = model(x)
        start, trap.steps = time.monotonic(), 0
        out.sum().backward()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", 0.0


def suffer_all(rank: int, faults: list[Fault]) -> list[tuple[str, str, float]]:
    """Several, each in a group of its own."""
    outcomes = []
    for fault in faults:
        outcomes.append(suffer(rank, fault))
        dist.barrier()
    return outcomes


def hang_and_tell(rank: int, folder: str) -> dict[str, Any]:
    """Rank 0 sits in a wait of gloo; rank 1 asks it for a dump, gets it, and only then lets it go on."""
    plan = ContextParallel(timeout_s=20).plan(S, Full())
    x = torch.ones(1, 1, plan.partition.local_tokens, 4)
    plan.attention(x, x, x)
    pid, file = Path(folder, "pid"), None
    if rank == 0:
        heard: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
        dump_on_signal(folder)
        pid.write_text(str(os.getpid()))
    else:
        while not pid.exists() or not pid.read_text():
            time.sleep(0.01)
        time.sleep(0.3)  # until rank 0 waits
        os.kill(int(pid.read_text()), signal.SIGUSR1)
        until = time.monotonic() + 5
        while not (file := next(Path(folder).glob("ringspun-*.json"), None)) and time.monotonic() < until:
            time.sleep(0.01)
        dump(folder)
    total = float(plan.attention(x, x, x).sum())
    return {"total": total, "file": file and file.name, "heard": rank == 0 and heard == [signal.SIGUSR1]}


class SlowLink(Gloo):
    """Messages from one rank to another leave late, one after the other."""

    def __init__(self, group: dist.ProcessGroup, sender: int, receiver: int, late_s: float) -> None:
        super().__init__(group, timeout_s=20)
        self.slow, self.late_s, self.line = (sender, receiver), late_s, ThreadPoolExecutor(1)

    def _post(self, transfers):
        late = [t for t in transfers if t.action == Action.SEND and (self.ring_rank, t.peer) == self.slow]
        ticket = super()._post([t for t in transfers if t not in late])
        ticket.works += [_Late(self.line.submit(self._post_late, t)) for t in late]
        ticket.whats += [t.what for t in late]
        return ticket

    def _post_late(self, transfer):
        time.sleep(self.late_s)
        return super()._post([transfer]).works[0]


class _Late:
    def __init__(self, work: Future) -> None:
        self.work = work

    def wait(self, timeout):
        return self.work.result().wait(timeout)


class PairByPair(AtenCpu):
    """Takes 0.1 ms a pair."""

    def forward(self, block, tiles):
        time.sleep(1e-4 * int(tl.count_pairs(tiles.tiles).sum()))
        return super().forward(block, tiles)

    def backward(self, block, saved, tiles):
        time.sleep(1e-4 * int(tl.count_pairs(tiles.tiles).sum()))
        yield from super().backward(block, saved, tiles)


def leave_logs(rank: int, folder: str, slow: tuple[int, int] | None) -> None:
    """A contiguous causal ring, or a balanced one with a slow link."""
    group = dist.new_group(list(range(dist.get_world_size())))
    driver = group if slow is None else SlowLink(group, *slow, 0.03)
    context = ContextParallel(driver, layout=Contiguous() if slow is None else Zigzag(), timeout_s=20)
    plan = context.plan(48, Causal())
    x = torch.ones(1, 1, plan.partition.local_tokens, 2, requires_grad=True)
    for _ in range(2):
        plan.attention(x, x, x, kernel=PairByPair() if slow is None else None).sum().backward()
    dump(folder)


def end_of_a_rank(rank: int, size: int, port: int, fault: Fault) -> None:
    """The whole life of a rank whose errors nobody catches."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    kind, words, _ = suffer(rank, fault)
    raise {"PeerError": RuntimeError}.get(kind, ArithmeticError)(words)


def in_step(rank: int, victim: int) -> tuple[bool, str, str]:
    """Two contexts, one of which keeps its ranks in step: whether their bits are the same. Then one rank sleeps in a
    step; kind and words of what this rank hears."""
    plans = [
        ContextParallel(timeout_s=timeout_s, sync_steps=together).plan(S, Causal())
        for together, timeout_s in ((False, 20), (True, TIMEOUT_S))
    ]
    generator = torch.Generator().manual_seed(rank)
    shape = (1, 2, plans[0].partition.local_tokens, 4)
    x = [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3)]
    results = []
    for plan in plans:
        out = plan.attention(*x)
        results.append([out, *torch.autograd.grad(out.square().sum(), x)])
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    fault = Fault("sleep", "forward", victim, tuple(range(dist.get_world_size())), "")
    try:
        plans[1].attention(*x, kernel=Trap(fault, rank == victim))
    except Exception as error:
        return same, type(error).__name__, str(error)
    return same, "nothing", ""


def unlike(rank: int) -> tuple[str, str]:
    """Rank 2 alone wants to be kept in step."""
    try:
        ContextParallel(timeout_s=20, sync_steps=rank == 2).plan(S, Causal())
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""
