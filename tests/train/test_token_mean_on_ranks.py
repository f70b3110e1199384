"""The mean loss over rings and their replicas, on processes: the cases L4, L6, L8, L9, H4 and H11."""

from __future__ import annotations

import functools

import mean_rings as mr
import pytest
import torch
import torch.nn.functional as F

from ringspun.train.losses.mean import Progress, StepCount

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@functools.cache
def one_process(data: int, steps: int) -> mr.Run:
    return mr.alone(data, steps)


def judge(runs: list[mr.Run], expected: mr.Run, rel: float = 1e-10) -> None:
    """All ranks alike, and as one process.

    Args:
        rel: largest difference, relative (of weights: to the largest).
    """
    assert (
        min(expected.norms) < mr.MAX_NORM[expected.counts[0].sequences // mr.MICRO_BATCHES] < max(expected.norms)
    )  # some steps are clipped, some are not
    for run in runs:
        assert run.warned == []
        for name in ("losses", "norms"):
            assert getattr(run, name) == pytest.approx(getattr(expected, name), rel=rel), name
        for mine, right in zip(run.metrics, expected.metrics, strict=True):
            for name in ("weight", "loss", "accuracy", "entropy", "perplexity"):
                assert getattr(mine, name) == pytest.approx(getattr(right, name), rel=rel), name
        for mine, right in zip(run.counts, expected.counts, strict=True):
            assert (mine.targets, mine.tokens, mine.sequences) == (right.targets, right.tokens, right.sequences)
            assert mine.total == pytest.approx(right.total, rel=1e-12)
        for mine, first, right in zip(run.weights, runs[0].weights, expected.weights, strict=True):
            assert torch.equal(mine, first)
            assert float((mine - right).abs().max()) <= rel * float(right.abs().max())


@pytest.mark.parametrize("wrapper", ["bare", "ddp", "ddp without sync", "fsdp1", "fsdp2", "fsdp2 that sums", "hsdp"])
def test_L8_two_rings_of_two_are_one_process(pools, wrapper):
    """Descent, clipped, over two micro-batches of unequal numbers of targets: a factor of 2 or 4 would show."""
    judge(pools(4).run(mr.train, wrapper, 2, 2, 3), one_process(2, 3), 1e-5 if wrapper == "fsdp1" else 1e-10)


@pytest.mark.parametrize("wrapper", ["bare", "ddp", "fsdp2"])
def test_H4_a_ring_without_replicas_is_one_process(pools, wrapper):
    """Five steps."""
    judge(pools(2).run(mr.train, wrapper, 1, 2, 5), one_process(1, 5))


@pytest.mark.timeout(60)
def test_H4_gradients_that_nobody_reduces_are_warned_of(pools):
    """Models that drift apart, one on each rank."""
    for run in pools(2).run(mr.train, "nobody", 1, 2, 1):
        (warning,) = run.warned
        assert "those of embed.weight, block.qkv.weight, block.qkv.bias and " in warning
        assert "differ at step 1: each rank takes its share for the whole" in warning


def test_wrappers_and_counts_that_do_not_fit_are_refused_on_every_rank(pools):
    found = pools(4).run(mr.refused)
    for rank, heard in enumerate(found):
        kind, words = heard["other tokens"]
        assert kind == ("DataError" if rank < 2 else "PeerError")
        assert "ranks of a ring must hold each target once; they hold " in words
        assert "and num_items_in_batch says " in words
        assert heard["fewer"][0] in ("PlanMismatchError", "PeerError")
        assert "micro_batches is 1 on ring rank 1 and 2 on ring rank 0" in heard["fewer"][1]
        assert heard["negative"][0] == ("DataError" if rank == 2 else "PeerError")
        assert "loss weights must be finite and at least 0; got one that is not." in heard["negative"][1]
        assert heard["another total"][0] == ("PlanMismatchError" if rank < 2 else "PeerError")
        assert "num_items_in_batch is [3, " in heard["another total"][1]
        assert heard["and then"] == ("nothing", "")
        assert heard["data"][0] == "PlanError"
        assert "in this rank's ring [0, 1]" in heard["data"][1] or "in this rank's ring [2, 3]" in heard["data"][1]


def test_L8_a_factor_that_cannot_be_known_is_refused(pools):
    """Ranks that reduce over others than the ring and its replicas: nobody would sum over the ring (H4)."""
    column = {0: "[0, 2]", 1: "[1, 3]", 2: "[0, 2]", 3: "[1, 3]"}
    for rank, heard in enumerate(pools(4).run(mr.refused)):
        for name in (
            "ddp over data",
            "ddp over others",
            "ddp over all",
            "fsdp2 over data",
            "a hook",
            "left out",
            "two ways",
        ):
            assert heard[name][0] == "UnsupportedByRing", name
        words = f"DistributedDataParallel must reduce over the 4 ranks of ring x data; got {column[rank]}, where this "
        words += f"rank's ring and data ranks are {[[0, 1], [2, 3]][rank // 2]} and {column[rank]}. "
        assert words in heard["ddp over data"][1]
        assert f"over the 2 ranks of ring x data; got {column[rank]}, " in heard["ddp over others"][1]
        assert f"FSDP2 must reduce over the 4 ranks of ring x data; got {column[rank]}, " in heard["fsdp2 over data"][1]
        assert "must reduce over the 2 ranks of ring x data; got [0, 1, 2, 3]" in heard["ddp over all"][1]
        assert "must have no communication hook for its factor to be known" in heard["a hook"][1]
        assert "must all be sharded for one factor to fit; head.weight is not (2 in all)" in heard["left out"][1]
        assert f"FSDP2 over ranks [0, 1, 2, 3] by 4, FSDP2 over ranks {column[rank]} by 2" in heard["two ways"][1]


def test_sharded_and_plain_parameters_have_one_norm(pools):
    """FSDP2 was told to leave the head alone."""
    model = mr.build()
    loss, _, _ = mr.step_alone(model, 2, 0)
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    for scale, found, grads in pools(4).run(mr.mixed):
        assert scale == 1 and found == pytest.approx(norm, rel=1e-10)
        agree(grads, model)


@pytest.mark.parametrize("with_targets", [(), (1,)])
def test_L4_rings_without_targets(pools, with_targets):
    """0 and zero gradients where nobody has one; one ring's mean where the other has none; never a NaN."""
    model = mr.build()
    loss = torch.zeros((), dtype=torch.float64)
    for data_rank in with_targets:
        logs, targets, _ = mr.predictions(model, [mr.sequence(0, data_rank, 0)])
        loss = F.nll_loss(logs, targets)
        loss.backward()
    for found, count, metrics, grads in pools(4).run(mr.empty, with_targets):
        assert found == pytest.approx(loss.item()) and metrics.loss == pytest.approx(found)
        assert (count.total > 0) == bool(with_targets) and count.sequences == 2 and count.tokens == 2 * mr.S
        assert metrics.perplexity == pytest.approx(loss.exp().item())
        agree(grads, model)


def agree(grads: list[torch.Tensor], model: mr.Model) -> None:
    """Gradients are those of a model in one process."""
    for mine, right in zip(grads, model.parameters(), strict=True):
        expected = torch.zeros_like(right) if right.grad is None else right.grad
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


def test_L6_means_of_each_data_rank_are_those_of_data_parallelism_alone(pools):
    """`average_tokens_across_devices` off, two micro-batches: scaled by data ranks, not by processes. (On is L8.)"""
    model, logged = mr.build(), 0.0
    for data_rank in range(2):
        logs, targets, _ = mr.predictions(model, [mr.sequence(0, data_rank, m) for m in range(mr.MICRO_BATCHES)])
        loss = F.nll_loss(logs, targets) / 2
        loss.backward()
        logged += loss.item()
    for found, grads in pools(4).run(mr.per_process_means):
        assert found == pytest.approx(logged, rel=1e-10)
        agree(grads, model)


@pytest.mark.parametrize("gathered", [False, True])
def test_L9_what_every_rank_of_a_ring_has_whole_counts_once(pools, gathered):
    """A loss from gathered log-probabilities: metric doubled, and gradients halved or doubled."""
    model = mr.build()
    logs, targets, weights = mr.predictions(model, [mr.sequence(0, d, 0) for d in range(2)])
    loss = -(logs[torch.arange(len(targets)), targets] * weights).sum() / weights.sum()
    loss.backward()
    for found, grads in pools(4).run(mr.from_gathered, gathered):
        assert found == pytest.approx(loss.item(), rel=1e-10)
        agree(grads, model)


def test_H11_a_hundred_samples_are_fifty_steps_and_tokens_count_once(pools):
    """World size in the place of data-parallel size."""
    for steps, count in pools(4).run(mr.epoch, 100):
        assert steps == 50
        progress = Progress(samples=100)
        for _ in range(steps):
            progress.add(count)
        assert progress.epoch == 1.0 and progress.sequences == 100
        assert progress.tokens == 100 * mr.S and progress.targets == 50 * count.targets[0]
        assert count == StepCount(count.targets, count.weights, 2 * mr.S, 2)


def test_what_one_rank_cannot_count_is_told_on_all(pools):
    assert pools(4).run(mr.malformed_on_one_rank, timeout_s=30) == [
        "RuntimeError",
        "PeerError",
        "PeerError",
        "PeerError",
    ]


def test_parameters_that_ddp_does_not_reduce_have_no_factor(pools):
    for said in pools(4).run(mr.outside_of_ddp, timeout_s=30):
        assert said == ["1.weight", "module.1.weight", "4"]
