"""Any history of plans, calls, backward calls out of order, errors, faults and new rings: every number that is returned
is dense attention's, an error that all ranks share leaves the ring usable, any other one makes it refuse."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ringspun import Causal, Contiguous, Documents, Full, Window, Zigzag
from ringspun.errors import MaskError, PlanError, RingBroken, ShapeError, TransferError
from ringspun.testing.cases import Case, Shape, inputs, reference
from ringspun.testing.faults import KINDS, Faulty, random_fault
from ringspun.testing.orders import Ordered
from ringspun.torch import ContextParallel, Loopback, Partition, Plan
from ringspun.torch.buffers import BufferPool

SHAPE = Shape(batch=1, heads=2, kv_heads=1, head_size=3, value_size=2)
MASKS = (Full(), Causal(), Window(3), Causal() & Documents([3, 2], [0, 4]))
numbers = st.integers(0, 2**31)


class Refusing(Ordered):
    """What a ring of processes does: a call that ends with an error ends the ring."""

    def run(self, programs):
        self._check()
        try:
            return super().run(programs)
        except BaseException as failure:
            self.report(failure)
            raise

    def agree(self, topic, digest, fields, failure=None):
        self._check()
        super().agree(topic, digest, fields, failure)

    def report(self, failure):
        self.state.broken = self.state.broken or str(failure)

    def _check(self):
        if self.state.broken is not None:
            raise RingBroken(self.state.broken)


class Watched(BufferPool):
    """Fails when a buffer is handed out that somebody has, or comes back from nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.out: dict[int, torch.Tensor] = {}  # holds them, so that no other gets their address

    def lease(self, n_bytes, device):
        buffer = super().lease(n_bytes, device)
        assert buffer.data_ptr() not in self.out, "a buffer was handed out twice"
        self.out[buffer.data_ptr()] = buffer
        return buffer

    def give_back(self, buffer):
        assert self.out.pop(buffer.data_ptr(), None) is buffer, "a buffer was given back twice"
        super().give_back(buffer)


@dataclass(eq=False)
class Made:
    """A plan, what it is a plan of, and whether it was called."""

    plan: Plan
    case: Case
    called: bool = False


@dataclass(eq=False)
class Done:
    """A forward call that may be followed by its backward call: results, inputs, incoming and right gradients."""

    part: Partition
    results: tuple[torch.Tensor, ...]
    ends: list[torch.Tensor]
    incoming: tuple[torch.Tensor, ...]
    right: tuple[np.ndarray, ...]


class AnyHistory(RuleBasedStateMachine):
    @initialize(ranks=st.integers(2, 4), seed=numbers)
    def new_ring(self, ranks, seed):
        self.ring = Faulty(Refusing(ranks, seed=seed), seed=seed)
        self.context = ContextParallel(self.ring, layout=(Zigzag(), Contiguous())[seed % 2], checks="checksum")
        self.context.pool = Watched()
        self.plans: list[Made] = []
        self.done: list[Done] = []

    @property
    def broken(self) -> bool:
        return self.ring.state.broken is not None

    @rule(mask=st.sampled_from(MASKS), seq_len=st.sampled_from([7, 8]))
    def make_a_plan(self, mask, seq_len):
        if self.broken:
            with pytest.raises(RingBroken):
                self.context.plan(seq_len, mask)
            return
        case = Case(self.ring.size, seq_len, mask, self.context.geometry.layout, shape=SHAPE)
        plan = self.context.plan(seq_len, mask)
        known = [made for made in self.plans if made.plan is plan]  # the context keeps its last plans
        self.plans.append(known[0] if known else Made(plan, case))

    @precondition(lambda self: self.plans)
    @rule(which=numbers, seed=numbers)
    def call(self, which, seed):
        made = self.plans[which % len(self.plans)]
        if self.broken:
            with pytest.raises(RingBroken):
                self._forward(made, seed)
        else:
            self._forward(made, seed)

    @precondition(lambda self: self.done)
    @rule(which=numbers)
    def call_backward_of_any_earlier_call(self, which):
        done = self.done.pop(which % len(self.done))
        if self.broken:
            with pytest.raises(RingBroken):
                self._backward(done)
        else:
            self._backward(done)

    @precondition(lambda self: self.plans and not self.broken)
    @rule(which=numbers)
    def pass_what_does_not_fit(self, which):
        """In a plan's first call all ranks would hear of it in its agreement; later they may be in the call."""
        made = self.plans[which % len(self.plans)]
        x = torch.ones(1, 2, made.case.seq_len + 1, 3)
        with pytest.raises(ShapeError):
            made.plan.attention(x, x[:, :1], x[:, :1])
        assert self.broken == made.called

    @precondition(lambda self: not self.broken)
    @rule()
    def ask_for_a_plan_that_cannot_be(self):
        with pytest.raises(MaskError):
            self.context.plan(7, Documents([8]))
        schedules = self.context.geometry.schedule(Full(), 9)
        with pytest.raises(PlanError):
            self.context.partition(7).plan(schedules)
        assert not self.broken

    @precondition(lambda self: self.plans and not self.broken)
    @rule(which=numbers, kind=st.sampled_from(KINDS), seed=numbers)
    def suffer_a_fault(self, which, kind, seed):
        made = self.plans[which % len(self.plans)]
        peace = Loopback(self.ring.size)
        context = ContextParallel(peace, layout=self.context.geometry.layout)
        x = torch.ones(1, 2, made.case.seq_len, 3)
        context.plan(made.case.seq_len, made.case.mask).attention(x, x[:, :1], x[:, :1])
        if not peace.counts.messages:
            return
        self.ring.arm(random_fault(seed, peace.counts.messages, kinds=[kind]))
        with suppress(TransferError):
            self._forward(made, seed)
        self.ring.arm()

    @precondition(lambda self: self.broken)
    @rule(ranks=st.integers(2, 4), seed=numbers)
    def start_again(self, ranks, seed):
        self.new_ring(ranks, seed)

    def _forward(self, made: Made, seed: int) -> None:
        case = Case(made.case.ranks, made.case.seq_len, made.case.mask, made.case.layout, shape=SHAPE, seed=seed)
        given = inputs(case)
        ref = reference(case, given)
        made.called = made.called or not self.broken
        part = made.plan.partition
        q, k, v, dout = (part.shard(torch.from_numpy(x), dim=2) for x in (given.q, given.k, given.v, given.dout))
        ends = [x.requires_grad_() for x in (q, k, v)]
        out, lse = made.plan.attention(*ends, return_lse=True)
        dlse = part.shard(torch.from_numpy(given.dlse), dim=2)
        self._same(part, (out, lse), (ref.out, ref.lse))
        self.done.append(Done(part, (out, lse), ends, (dout, dlse), (ref.dq, ref.dk, ref.dv)))

    def _backward(self, done: Done) -> None:
        self._same(done.part, torch.autograd.grad(done.results, done.ends, done.incoming), done.right)

    def _same(self, part, found, right) -> None:
        for x, y in zip(found, right, strict=True):
            np.testing.assert_allclose(part.gather(x.detach(), dim=2).numpy(), y, rtol=0, atol=1e-12)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=20, stateful_step_count=20)
