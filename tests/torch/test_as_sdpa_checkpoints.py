"""Blocks that run again in backward, and compiled ones, under `plan.as_sdpa()`: on the ring both times, or refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from plain_models import on_ring
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringspun import Causal, Documents, Full
from ringspun.errors import UnsupportedByRing
from ringspun.torch import ContextParallel, Loopback, Plan, checkpoint_contexts

B, H, S, D = 1, 2, 10, 4
TOLERANCE = 1e-13
ATTENTION = torch.ops.ringspun.attention.default


def keep_attention(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, keep_attention)
RUNS = {
    "plan": lambda plan: partial(checkpoint, use_reentrant=False, context_fn=plan.checkpoint_contexts),
    "any plan": lambda plan: partial(checkpoint, use_reentrant=False, context_fn=checkpoint_contexts),
    "selective": lambda plan: partial(
        checkpoint, use_reentrant=False, context_fn=partial(plan.checkpoint_contexts, SELECTIVE)
    ),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["gpt", "dit"])
def test_a_model_of_checkpointed_blocks_is_the_model_in_one_process(name, run):
    errors = on_ring(name, ContextParallel(Loopback(3)), RUNS[run])
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_would_recompute_local_attention_is_refused(reentrant):
    """The silent fault: gradients of local attention (reentrant checkpoints notice nothing)."""
    with pytest.raises(
        UnsupportedByRing, match=r"checkpoint must enter plan.as_sdpa\(\) again .* context_fn=plan.check"
    ):
        on_ring("gpt", ContextParallel(Loopback(2)), lambda plan: partial(checkpoint, use_reentrant=reentrant))


def layer(x: Tensor) -> Tensor:
    q, k, v = x.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q * 2.0, k, v, is_causal=True)


def given() -> Tensor:
    return torch.randn(
        B, S, 3 * H * D, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()


def a_plan(mask=None, ranks: int = 2):
    return ContextParallel(Loopback(ranks)).plan(S, mask or Causal())


def gradient(plan, call) -> Tensor:
    """Of `call` under the plan; backward comes when the block is over."""
    x = given()
    with plan.as_sdpa():
        out = call(x)
    return torch.autograd.grad(out.sin().sum(), x)[0]


def test_a_selective_policy_runs_the_ring_once_forward():
    plan = a_plan()
    state, counts = plan._calls.driver.state, []
    for others in (None, SELECTIVE):
        before = state.calls
        run = partial(checkpoint, layer, use_reentrant=False, context_fn=partial(plan.checkpoint_contexts, others))
        assert torch.equal(gradient(plan, run), gradient(plan, layer))
        counts.append(state.calls - before - 2)
    assert counts == [3, 2]


def test_checkpoints_in_one_another_are_each_looked_at():
    plan = a_plan()
    inner_alone = partial(checkpoint, layer, use_reentrant=False)
    inner = partial(inner_alone, context_fn=plan.checkpoint_contexts)
    outer = partial(checkpoint, use_reentrant=False, context_fn=plan.checkpoint_contexts)
    assert torch.equal(gradient(plan, partial(outer, inner)), gradient(plan, layer))
    with pytest.raises(UnsupportedByRing, match="checkpoint must enter"):
        gradient(plan, partial(outer, inner_alone))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_mode_that_begins_inside_the_checkpoint_needs_nothing(reentrant):
    plan, x = a_plan(), given()

    def block(x: Tensor) -> Tensor:
        with plan.as_sdpa():
            return layer(x)

    checkpoint(block, x, use_reentrant=reentrant).sin().sum().backward()
    assert torch.equal(x.grad, gradient(plan, layer))


def test_without_gradients_nothing_is_recomputed_and_nothing_refused():
    plan, x = a_plan(), given()
    right = plan.attention(
        *(x.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4) * torch.tensor([2, 1, 1]).view(3, 1, 1, 1, 1))
    )
    for run in (checkpoint, partial(checkpoint, context_fn=plan.checkpoint_contexts)):
        with torch.no_grad(), plan.as_sdpa():
            assert torch.equal(run(layer, x, use_reentrant=False), right)


def test_contexts_belong_to_the_innermost_plan():
    plan, other = a_plan(), a_plan(Full())
    x = given()
    with pytest.raises(UnsupportedByRing, match=r"of the same plan; got none\. Put the whole"):
        plan.checkpoint_contexts()
    with pytest.raises(UnsupportedByRing, match="of the same plan; got that of another plan"), other.as_sdpa():
        checkpoint(layer, x, use_reentrant=False, context_fn=plan.checkpoint_contexts)
    alone = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)  # no plan: as without it
    assert torch.equal(alone, layer(x))


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiled(call):
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager", fullgraph=True)


def test_compiled_models_equal_uncompiled_ones():
    """Inside the block, around it, and the compiled function as what is checkpointed."""
    plan, x = a_plan(), given()
    right = gradient(plan, layer)
    assert torch.equal(gradient(plan, compiled(layer)), right)
    again = partial(checkpoint, compiled(layer), use_reentrant=False, context_fn=plan.checkpoint_contexts)
    assert torch.equal(gradient(plan, again), right)

    def whole(x: Tensor) -> Tensor:
        with plan.as_sdpa():
            return layer(x)

    compiled(whole)(x).sin().sum().backward()
    assert torch.equal(x.grad, right)
    plan = a_plan()
    with pytest.raises(Exception, match=r"must begin once uncompiled .* Later plans of the context need none"):
        compiled(whole)(x)


def test_a_new_plan_in_every_batch_makes_two_graphs_where_it_is_an_argument():
    """Recompiling for every batch of documents. (Around a compiled function a mode is a global: one graph a plan.)"""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(x: Tensor, plan: Plan) -> Tensor:
        with plan.as_sdpa():
            return layer(x)

    call = torch.compile(step, backend=counter, fullgraph=True)
    context, x = ContextParallel(Loopback(2)), given()
    for i in range(6):
        plan = context.plan(S, Causal() & Documents([2 + i, S - 2 - i]))
        out = (call if i else step)(x, plan)
        assert torch.equal(torch.autograd.grad(out.sin().sum(), x)[0], gradient(plan, layer))
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda x: checkpoint(layer, x, use_reentrant=False),
        lambda x: torch.cond(x.sum() > 0, layer, lambda x: layer(x * 2), (x,)),
    ],
    ids=["checkpoint", "cond"],
)
def test_what_pytorch_traces_without_the_mode_is_refused_inside_a_compiled_function(call):
    """Local attention in a graph of its own: PyTorch says nothing."""
    with pytest.raises(Exception, match=r"must not stand inside a compiled function under plan\.as_sdpa"):
        gradient(a_plan(), compiled(call))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_compiled_block_in_a_checkpoint_without_contexts_is_refused(reentrant):
    with pytest.raises(Exception, match=r"checkpoint must enter plan\.as_sdpa"):
        gradient(a_plan(), partial(checkpoint, compiled(layer), use_reentrant=reentrant))
