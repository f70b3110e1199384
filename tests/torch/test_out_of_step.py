"""Ranks that are not in the same call: never a wrong number, never an abort, and no further use of such a ring."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from on_ranks_out_of_step import (
    backward_in_another_order,
    carry_on_after_an_error,
    come_late_and_fail,
    gather_different_things,
    raise_between_forward_and_backward,
    two_contexts_in_another_order,
    two_masks_in_another_order,
)

from ringspun import Causal, Contiguous, Documents, Full
from ringspun.errors import NotDifferentiable, PlanError, RingspunWarning
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.drivers.notes import Notes

pytestmark = [pytest.mark.timeout(60)]
LOUD = {"PeerError", "TransferError", "RingBroken", "PlanMismatchError"}


@pytest.fixture
def pair(pools):
    """A pool of 2 whose group is in disorder afterwards."""
    pool = pools(2)
    yield pool
    pool.restart()


def check_no_wrong_number(outcomes: list[list[tuple[str, str]]], last_good: int) -> None:
    for rank in outcomes:
        for number, (kind, text) in enumerate(rank, start=1):
            assert kind != "ok" or float(text) == pytest.approx(number, rel=1e-5)
            if number > last_good + 1:
                assert kind == "RingBroken" and "Make a new process group and a new ContextParallel" in text


@pytest.mark.processes
@pytest.mark.parametrize(
    ("wrong", "at"), [({"rows": 1}, 2), ({"kernel": "none"}, 2), ({"scale": float("nan")}, 4)], ids=str
)
def test_a_caught_error_does_not_shift_the_calls(pair, wrong, at):
    outcomes = pair.run(carry_on_after_an_error, wrong, at, timeout_s=30)
    assert all(kind == "ok" for rank in outcomes for kind, _ in rank[: at - 1])
    assert outcomes[0][at - 1][0] == "PeerError" and outcomes[1][at - 1][0] not in ("ok", "PeerError")
    check_no_wrong_number(outcomes, at - 1)


@pytest.mark.processes
def test_a_users_error_between_forward_and_backward_is_not_survived_in_silence(pair):
    outcomes = pair.run(raise_between_forward_and_backward, timeout_s=30)
    for rank in outcomes:
        assert all(kind != "ok" or float(text) == pytest.approx(n, rel=1e-5) for n, (kind, text) in enumerate(rank, 1))
        assert rank[-1][0] == "RingBroken"


@pytest.mark.processes
def test_backward_belongs_to_its_forward(pair):
    kinds = [kind for kind, _ in pair.run(backward_in_another_order, timeout_s=30)]
    assert "ok" not in kinds and "TransferError" in kinds


@pytest.mark.processes
@pytest.mark.parametrize("lengths", [(12, 12), (12, 400)], ids=str)
def test_two_contexts_of_one_group_are_told_apart(pair, lengths):
    kinds = [kind for kind, _ in pair.run(two_contexts_in_another_order, lengths, timeout_s=30)]
    assert set(kinds) <= LOUD


@pytest.mark.processes
@pytest.mark.parametrize("whole", [0, 1])
def test_two_masks_of_one_partition_are_told_apart(pair, whole):
    """gloo aborts a process that gets a longer message than it waits for."""
    kinds = [kind for kind, _ in pair.run(two_masks_in_another_order, whole, timeout_s=30)]
    assert set(kinds) <= LOUD


@pytest.mark.processes
@pytest.mark.parametrize("what", ["other dims", "dtype", "dim", "partition"])
def test_ranks_that_gather_different_things_all_hear_of_it(pools, what):
    for kind, text in pools(2).run(gather_different_things, what, timeout_s=30):
        assert kind == "PlanMismatchError" and f"a gather must be the same on all ranks; {what} is " in text


@pytest.mark.processes
def test_a_late_rank_and_a_wrong_one_do_not_abort(pair):
    for rank in pair.run(come_late_and_fail, timeout_s=30):
        assert all(kind != "ok" for kind, _ in rank)
        assert rank[-1][0] == "RingBroken"


class Frozen:
    """A store whose host does not answer."""

    def __init__(self) -> None:
        self.asked = 0

    def _hang(self, *_: object) -> None:
        self.asked += 1
        threading.Event().wait(5)
        raise RuntimeError("its host is gone")

    add = set = get = check = _hang


def test_a_store_that_does_not_answer_is_asked_once_and_not_waited_for():
    store, start = Frozen(), time.perf_counter()
    notes = Notes(store, 0, patience_s=0.2)
    notes.come("the plan", {}, None)
    assert "store does not answer" in notes.last_words(3)
    assert store.asked == 1 and time.perf_counter() - start < 2


@pytest.mark.parametrize("kernel", [None, "eager"])
@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-320])
def test_any_finite_scale_is_exact(scale, kernel):
    from ringspun.core.reference import attention_with_gradients

    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 9, 4, dtype=torch.float64, generator=generator) for _ in range(4))
    ref = attention_with_gradients(q, k, v, dout, allowed=Causal().as_array(9), scale=scale)
    ends = [x.clone().requires_grad_() for x in (q, k, v)]
    plan = ContextParallel(Loopback(2), layout=Contiguous()).plan(9, Causal())
    out = plan.attention(*ends, scale=scale, kernel=kernel)
    out.backward(dout)
    for found, right in zip((out.detach(), *(x.grad for x in ends)), (ref.out, ref.dq, ref.dk, ref.dv), strict=True):
        torch.testing.assert_close(found, torch.from_numpy(right), rtol=0, atol=1e-13)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "a", True, torch.ones(())])
def test_a_scale_that_is_no_finite_number_is_refused(scale):
    plan, x = ContextParallel(Loopback(1)).plan(4, Full()), torch.ones(1, 1, 4, 2)
    with pytest.raises(PlanError, match="scale must be a finite number"):
        plan.attention(x, x, x, scale=scale)


def test_forward_mode_is_refused():
    plan, x = ContextParallel(Loopback(1)).plan(4, Full()), torch.ones(1, 1, 4, 2)
    with pytest.raises(NotDifferentiable, match="reverse mode only"):
        torch.func.jvp(lambda q: plan.attention(q, x, x), (x,), (x,))


def test_a_plan_does_not_travel_to_another_process():
    import copy
    import pickle

    plan = ContextParallel(Loopback(2)).plan(4, Full())
    with pytest.raises(TypeError, match=r"plan must not be pickled; .*|plan must not be pickled: .*context\.geometry"):
        pickle.dumps(plan)
    assert copy.deepcopy({"plan": plan})["plan"] is plan


def test_documents_of_partition_and_mask_must_agree():
    context, docs, x = ContextParallel(Loopback(2)), Documents([5, 7]), torch.ones(1, 1, 12, 2)
    assert context.plan(12, Causal() & docs).partition.documents == docs
    with pytest.raises(PlanError, match=r"documents must be the same in the partition and in the mask"):
        context.partition(12, documents=docs).plan(Causal() & Documents([6, 6]))
    with pytest.warns(RingspunWarning, match="attention crosses them"):
        context.partition(12, documents=docs).plan(Causal())
    assert context.partition(12).plan(Causal() & docs).attention(x, x, x).shape == x.shape


@pytest.mark.parametrize(
    "name", ["dropout_p", "attn_mask", "is_causal", "s_aux", "window_size", "alibi_slopes", "cu_seqlens", "window"]
)
def test_arguments_of_other_attentions_are_refused_with_advice(name):
    plan, x = ContextParallel(Loopback(1)).plan(4, Full()), torch.ones(1, 1, 4, 2)
    with pytest.raises(TypeError, match=rf"{name} must not be given to plan.attention; "):
        plan.attention(x, x, x, **{name: 0.1})
    assert torch.equal(plan.attention(x, x, x, dropout_p=0.0, attn_mask=None), plan.attention(x, x, x))
