"""Loopback rings timed beside one call of PyTorch's own attention for the same tokens, in turns; with the peak of their
memory, and which part of the time is the kernel's and which is merging."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from ringspun.core.accounting import account
from ringspun.core.layout import Zigzag
from ringspun.core.mask import Causal
from ringspun.errors import KernelRefused
from ringspun.testing.gpu.memory import expected_peak
from ringspun.testing.work import Work
from ringspun.torch import ContextParallel, Loopback, Plan
from ringspun.torch.execution import call_of, wire_of
from ringspun.torch.kernels import Kernel, choose
from ringspun.torch.kernels.base import Block, Call, Gradients, Partial, Saved, StepTiles
from ringspun.torch.memory import peak_memory

REPEATS = 3
UNKNOWN_TFLOPS = 20.0
"""Of a device that nothing is known of yet: a slow one, so that the first work does not take all the time."""
ASKED, GIVEN, ADDED = "asked", "given", "added"
RAISED = "raised"
"""How the reason of a row begins that is no reason but a fault."""
RUNS_OF_A_WORK = 2 * REPEATS + 4
"""Forward + backward passes that measuring a work takes: of both in turns, and those before and after."""


@dataclass(frozen=True)
class Measured:
    """What was measured of one work.

    Args:
        kernel: its name. alone: what PyTorch took for the one call. ring_s, alone_s: seconds of forward + backward, in
            pairs. peak_bytes: of the ring's first, all ranks, inputs included. expected_bytes: by the accounting.
            flops: of the work. kernel_share: of the ring's time, on the device. merge_share: of it, adding up results
            and gradients.
    """

    kernel: str
    alone: str
    ring_s: tuple[float, ...]
    alone_s: tuple[float, ...]
    peak_bytes: int
    expected_bytes: int
    flops: int
    kernel_share: float
    merge_share: float

    @property
    def ratio(self) -> float:
        """Of the one call's time to the ring's: 1 where the ring costs nothing, median of the pairs."""
        return median(a / r for a, r in zip(self.alone_s, self.ring_s, strict=True))

    @property
    def memory_ratio(self) -> float:
        """Measured over expected."""
        return self.peak_bytes / self.expected_bytes

    @property
    def ring_tflops(self) -> float:
        """Of all virtual ranks together."""
        return self.flops / median(self.ring_s) / 1e12

    @property
    def alone_tflops(self) -> float:
        """Of the one call."""
        return self.flops / median(self.alone_s) / 1e12


@dataclass(frozen=True)
class Row:
    """One work and what came of it: measured, or why not."""

    work: Work
    kernel: str
    measured: Measured | None = None
    reason: str = ""


Measure = Callable[[Work, str], Measured]
"""Measures a work with a kernel, by name ("auto": the one that plans take)."""


def works(kernels: Sequence[str], *, quick: bool = False) -> list[tuple[Work, str]]:
    """What is timed, the most telling first: bfloat16, causal, D=128; 8K, 16K and 64K tokens per virtual rank of 4, and
    rings of 1, 2 and 8; and every kernel at 16K on 4.

    Args:
        kernels: by name, beside the one that plans take. quick: tiny ones, for CPUs.
    """
    plain = Work(4, 4 * 16384, 16, 4, 128, "bfloat16", Causal(), Zigzag())
    if quick:
        plain = Work(4, 256, 2, 1, 16, "float32", Causal(), Zigzag())
        return [(plain, "auto"), (replace(plain, ranks=1), "auto")]
    short, long = replace(plain, seq_len=4 * 8192), replace(plain, seq_len=4 * 65536)
    others = [replace(plain, ranks=ranks, seq_len=ranks * 16384) for ranks in (2, 8, 1)]
    of_auto = [(work, "auto") for work in (plain, short, long, *others)]
    return [of_auto[0], *((plain, name) for name in kernels), *of_auto[1:]]


def flops_of(work: Work) -> int:
    """Of forward + backward, allowed pairs only."""
    plan = _plan(work)
    wire = wire_of(*(x.to("meta") for x in _shapes(work)))
    passes = [(p, back) for s in _schedules(plan) for p, back in ((s.forward, False), (s.backward, True))]
    return sum(account(one, wire, backward=back).flops for one, back in passes)


def timed(
    what: Sequence[tuple[Work, str]],
    measure: Measure,
    *,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
    told: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Every work that fits into the budget, by how fast those before it were; for the others, why not.

    Args:
        budget_s: seconds from now on. told: hears each row as it comes.
    """
    end, flops_per_s, rows = clock() + budget_s, UNKNOWN_TFLOPS * 1e12, []
    for work, kernel in what:
        needs = RUNS_OF_A_WORK * flops_of(work) / flops_per_s
        if clock() + needs > end:
            rows.append(
                Row(work, kernel, reason=f"skipped: about {needs:.0f} s, and {max(0, end - clock()):.0f} were left")
            )
        else:
            rows.append(_row(work, kernel, measure))
        found = rows[-1].measured
        if found is not None and kernel == "auto":
            flops_per_s = found.flops / (sum(found.ring_s + found.alone_s) / (2 * len(found.ring_s)))
        told(rows[-1])
    return rows


def _row(work: Work, kernel: str, measure: Measure) -> Row:
    try:
        return Row(work, kernel, measure(work, kernel))
    except torch.cuda.OutOfMemoryError:
        return Row(work, kernel, reason="out of memory")
    except KernelRefused as refusal:
        return Row(work, kernel, reason=str(refusal))
    except Exception as problem:  # what was certified and measured so far is still to be written
        return Row(work, kernel, reason=f"{RAISED} {type(problem).__name__}: {problem}")


class Device:
    """Measures on a device.

    Args:
        device: "cuda" or "cpu".
    """

    def __init__(self, device: torch.device, repeats: int = REPEATS) -> None:
        self._device, self._repeats = device, repeats
        self._cuda = device.type == "cuda"

    def __call__(self, work: Work, kernel: str) -> Measured:
        """A `Measure`."""
        if self._cuda:
            torch.cuda.empty_cache()
        plan, before = _plan(work), self._held()
        given = self._tensors(work)
        chosen = choose(_call(given, plan), None if kernel == "auto" else kernel)

        def ring(of: Kernel = chosen) -> None:
            q, k, v, dout = given
            torch.autograd.grad(plan.attention(q, k, v, kernel=of), (q, k, v), dout)

        def alone() -> None:
            q, k, v, dout = given
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            torch.autograd.grad(out, (q, k, v), dout)

        peak = self._peak(ring, given, before)
        alone()
        pairs = [(self._seconds(ring), self._seconds(alone)) for _ in range(self._repeats)]
        marked = Marked(chosen, self._mark)
        total = self._between(lambda: ring(marked))
        kernel_share, merge_share = (marked.seconds(what, self._elapsed) / total for what in (GIVEN, ADDED))
        plan._calls.pool.forget()  # plans used last are kept for backward calls to come, and their buffers with them
        expected = expected_peak(_schedules(plan), wire_of(*given[:3]), chosen.name)
        ring_s, alone_s = (tuple(each) for each in zip(*pairs, strict=True))
        return Measured(
            chosen.name,
            _taken_alone(*given[:3]),
            ring_s,
            alone_s,
            peak,
            expected,
            flops_of(work),
            kernel_share,
            merge_share,
        )

    def _tensors(self, work: Work) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        dtype = getattr(torch, work.dtype)
        made = [torch.randn(x.shape, device=self._device, dtype=torch.float32).to(dtype) for x in _shapes(work)]
        q, k, v = (x.requires_grad_() for x in made)
        return q, k, v, torch.randn_like(q)

    def _held(self) -> int:
        return torch.cuda.memory_allocated() if self._cuda else 0

    def _peak(self, ring: Callable[[], None], given: tuple[Tensor, ...], before: int) -> int:
        if not self._cuda:
            with peak_memory() as peak:
                ring()
            return peak.bytes + sum(x.nbytes for x in given)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        ring()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def _seconds(self, run: Callable[[], None]) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _between(self, run: Callable[[], None]) -> float:
        first = self._mark()
        run()
        return self._elapsed(first, self._mark())

    def _mark(self) -> Any:
        """A moment, on the device where it has its own time."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _elapsed(self, first: Any, last: Any) -> float:
        if not self._cuda:
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class Marked(Kernel):
    """Another kernel, with a mark where it is asked for a step's first result, where it gives one, and where it is
    asked for the next. Ranks of a loopback take turns at any of these, so a stretch of time is named by the mark that
    ends it: the kernel's before a result; merging, with what arrives to be added, before the next is asked for; the
    rest is packing and sending."""

    def __init__(self, inner: Kernel, mark: Callable[[], Any]) -> None:
        self._inner, self._mark, self.name, self.devices = inner, mark, inner.name, inner.devices
        self.marks: list[tuple[str, Any]] = []

    def refuses(self, call: Call) -> str | None:
        return self._inner.refuses(call)

    def forward(self, block: Block, tiles: StepTiles) -> Iterator[Partial]:
        yield from self._marking(self._inner.forward(block, tiles))

    def backward(self, block: Block, saved: Saved, tiles: StepTiles) -> Iterator[Gradients]:
        yield from self._marking(self._inner.backward(block, saved, tiles))

    def _marking(self, results: Iterator[Any]) -> Iterator[Any]:
        self.marks.append((ASKED, self._mark()))
        for result in results:
            self.marks.append((GIVEN, self._mark()))
            yield result
            del result
            self.marks.append((ADDED, self._mark()))

    def seconds(self, what: str, elapsed: Callable[[Any, Any], float]) -> float:
        """Of all stretches that such a mark ends."""
        return sum(elapsed(first, last) for (_, first), (kind, last) in pairwise(self.marks) if kind == what)


def _taken_alone(q: Tensor, k: Tensor, v: Tensor) -> str:
    grouped = q.shape[1] != k.shape[1]
    which: int = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=grouped)
    return SDPBackend(which).name.lower()


def _plan(work: Work) -> Plan:
    return ContextParallel(Loopback(work.ranks), layout=work.layout).plan(work.seq_len, work.mask)


def _schedules(plan: Plan) -> Any:
    return plan._everybody


def _shapes(work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v without memory."""
    dtype = getattr(torch, work.dtype)
    q, k, v = (
        torch.empty(work.batch, heads, work.seq_len, work.head_size, dtype=dtype, device="meta")
        for heads in (work.heads, work.kv_heads, work.kv_heads)
    )
    return q, k, v


def _call(given: tuple[Tensor, ...], plan: Plan) -> Call:
    q, k, v = given[:3]
    return call_of(q, k, v, q.shape[-1] ** -0.5, 0.0, None, plan.schedule.grid)
