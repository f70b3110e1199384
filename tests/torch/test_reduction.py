"""Gradients over a ring of one's own model: who reduces them, what that gives, and what is said when nobody does."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from plain_models import Gpt, alone_on_both, over_ring_and_data, reduce_oddly, seeded, train, trained_alone
from torch import nn

from ringspun.errors import PlanError, RingspunWarning, UnsupportedByRing
from ringspun.torch import ContextParallel, Loopback, reduce_gradients, watch_gradients


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("reducer", ["reduce_gradients", "by hand", "ddp", "ddp with a hook", "fsdp2"])
def test_five_steps_without_data_parallelism_are_those_of_one_process(pools, reducer):
    """Replicas that drift apart, or take R times the step; a watch that cries wolf."""
    expected = trained_alone()
    results = pools(2).run(train, reducer)
    for weights, warned in results:
        assert warned == []
        for mine, theirs, right in zip(weights, results[0][0], expected, strict=True):
            assert np.array_equal(mine, theirs)
            np.testing.assert_allclose(mine, right, rtol=1e-11, atol=1e-12)


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_one_reduction_serves_a_group_of_rings_and_replicas(pools):
    """A ring of a mesh, and a group that holds more than the ring."""
    expected = alone_on_both()
    for grads in pools(4).run(over_ring_and_data):
        for found, right in zip(grads, expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-11, atol=1e-13)


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_gradients_that_nobody_reduces_are_warned_of_once_on_every_rank(pools):
    """A loss that goes down, on models that are no longer one."""
    (first, warned), (second, _) = results = pools(2).run(train, "nobody")
    assert not all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(len(w) == 1 for _, w in results)
    assert "those of wte.weight, wpe.weight, h.0.ln_1.weight and " in warned[0] and "at step 1: " in warned[0]
    assert "Call ringspun.torch.reduce_gradients(model, cp)" in warned[0]


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_gradient_on_one_rank_alone_is_one_on_all_and_none_stays_none(pools):
    last = "torch.float64", [2 + 2.0**-39]  # in its own precision, whatever travels beside it
    for kind, _, grads in pools(2).run(reduce_oddly, "fine"):
        assert kind == "nothing"
        # 1 + (1 + 1/128), rounded once, to bfloat16
        assert grads == [("torch.float32", [1.0, 1.0]), ("torch.bfloat16", [2.0, 2.0, 2.0]), None, last]


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("what", "kinds", "words"),
    [
        ("sparse", ("PeerError", "UnsupportedByRing"), "that of parameter 0 is torch.sparse_coo"),
        ("fewer", ("PlanMismatchError", "PlanMismatchError"), "parameters is 3 on ring rank 1 and 4 on ring rank 0"),
    ],
)
def test_what_one_rank_cannot_reduce_is_refused_on_all(pools, what, kinds, words):
    results = pools(2).run(reduce_oddly, what)
    assert tuple(kind for kind, _, _ in results) == kinds
    assert all(words in text for _, text, _ in results)
    pools(2).restart()


def test_in_one_process_nothing_is_summed_and_nothing_warned_of():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    watch_gradients(optimizer, Loopback(3))
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RingspunWarning)
        reduce_gradients(model, ContextParallel(Loopback(3)))
        reduce_gradients([model.weight, model.weight])
        optimizer.step()
    assert torch.equal(model.weight.grad, before)


def test_what_cannot_be_reduced_says_what_to_do():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedByRing, match=r"that of weight is torch.sparse_coo. Build the embedding with sparse"):
        reduce_gradients(table, Loopback(2))

    class DistributedDataParallel(nn.Sequential):
        """Known by its name."""

    with pytest.raises(UnsupportedByRing, match="reduced twice; got a DistributedDataParallel, which averages"):
        reduce_gradients(DistributedDataParallel(nn.Linear(1, 1)), Loopback(2))
    with pytest.raises(PlanError, match="bucket_bytes must be a number of bytes, at least 1; got 0"):
        reduce_gradients(seeded(Gpt), Loopback(2), bucket_bytes=0)
    with pytest.raises(PlanError, match="every must be a number of steps, at least 1; got 0"):
        watch_gradients(torch.optim.SGD(seeded(Gpt).parameters()), Loopback(2), every=0)
