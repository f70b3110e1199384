"""Targets and their weights: shifted inside documents before they are cut, any number of tokens ahead."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspun import Balanced, Causal, Contiguous, Documents, DocumentZigzag, Striped, Zigzag
from ringspun.errors import DataError, DtypeError, ShapeError
from ringspun.torch import ContextParallel, Loopback
from ringspun.train.losses.loss import IGNORED, multi_token_loss, token_loss
from ringspun.train.losses.mean import StepCount, TokenMean
from ringspun.train.losses.targets import shard_targets

LAYOUTS = (Contiguous(), Zigzag(), Striped(), DocumentZigzag(), Balanced())


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    padding=st.integers(0, 3),
    ring_size=st.integers(1, 8),
    layout=st.sampled_from(LAYOUTS),
    ahead=st.integers(1, 5),
    ignored=st.sets(st.integers(0, 50)),
)
def test_every_pair_inside_a_document_is_there_once(lengths, padding, ring_size, layout, ahead, ignored):
    """Of each rank's rows: (token, tokens ahead, target, weight), as counted document by document; and their number."""
    seq_len = sum(lengths) + padding
    part = ContextParallel(Loopback(ring_size), layout=layout).partition(seq_len, documents=Documents(lengths))
    ids, weights = torch.arange(seq_len)[None], torch.arange(seq_len)[None] / 7
    labels = ids.clone()
    labels[0, [i for i in ignored if i < seq_len]] = IGNORED
    found = shard_targets(part, labels, ahead=ahead, weights=weights)
    held = part.shard(ids, dim=1)[0].tolist()
    pairs = [
        (i, k, target, weight)
        for i, targets, counts in zip(
            held, found["shift_labels"][0].tolist(), found["shift_loss_weights"][0].tolist(), strict=True
        )
        for k, (target, weight) in enumerate(zip(targets, counts, strict=True), 1)
    ]
    expected, first = [], 0
    for length in lengths:
        inside = range(first, first + length)
        expected += [
            (i, k, i + k, float(weights[0, i + k]))
            for i in inside
            for k in range(1, ahead + 1)
            if i + k in inside and i + k not in ignored
        ]
        first += length
    assert sorted(p for p in pairs if p[2] != IGNORED) == sorted(expected)
    assert all(weight == 0 for _, _, target, weight in pairs if target == IGNORED)
    assert found["num_items_in_batch"] == len(expected)
    count = TokenMean(part.context).count([found])
    assert count.targets == tuple(sum(k == j for _, k, _, _ in expected) for j in range(1, ahead + 1))
    assert count.weights == pytest.approx([sum(p[3] for p in expected if p[1] == j) for j in range(1, ahead + 1)])
    one = part.shard_batch({"input_ids": ids, "labels": labels, "loss_weights": weights})
    assert torch.equal(one["shift_labels"], found["shift_labels"][..., 0])
    assert torch.equal(one["shift_loss_weights"], found["shift_loss_weights"][..., 0])
    assert one["total_loss_weight"] == pytest.approx(count.weights[0])


def test_rows_may_have_documents_of_their_own():
    """A mask per row: targets and weights end with each row's own documents."""
    rows = [Documents([3, 5]), Documents([6])]
    part = ContextParallel(Loopback(2)).plan(8, [Causal() & d for d in rows]).partition
    ids = torch.arange(8).expand(2, -1)
    found = shard_targets(part, ids, ahead=2, weights=torch.ones(2, 8))
    whole = part.gather(found["shift_labels"], dim=1)
    assert whole[0, :, 0].tolist() == [1, 2, -100, 4, 5, 6, 7, -100]
    assert whole[0, :, 1].tolist() == [2, -100, -100, 5, 6, 7, -100, -100]
    assert whole[1, :, 1].tolist() == [2, 3, 4, 5, -100, -100, -100, -100]
    assert torch.equal(part.gather(found["shift_loss_weights"], dim=1) == 1, whole != IGNORED)


@pytest.mark.parametrize("weighted", [False, True])
def test_several_heads_are_a_weighted_sum_of_their_means(weighted):
    """Over ranks and micro-batches, against each head by itself in one process."""
    torch.manual_seed(0)
    head_weights, documents = (1.0, 0.3, 0.15), Documents([6, 1, 4])
    part = ContextParallel(Loopback(3)).partition(12, documents=documents)
    ids = [torch.randint(0, 7, (2, 12)) for _ in range(2)]
    weights = torch.rand(2, 12) + 0.1 if weighted else None
    logits = torch.randn(2, 3, 2, 12, 7, dtype=torch.float64)  # micro-batch, head, [B, S, V]
    batches = [shard_targets(part, x, ahead=3, weights=weights) for x in ids]
    count, found = TokenMean(part.context).count(batches), torch.zeros((), dtype=torch.float64)
    for batch, of_heads in zip(batches, logits, strict=True):
        local = part.shard(of_heads, dim=2)
        for rows in part.slices:
            share = multi_token_loss(
                [one[:, rows] for one in local],
                batch["shift_labels"][:, rows],
                total_targets=count.weights,
                head_weights=head_weights,
                weights=batch["shift_loss_weights"][:, rows] if weighted else None,
            )
            found += share
    expected = torch.zeros((), dtype=torch.float64)
    for k, factor in enumerate(head_weights, 1):
        each, counts = [], []
        for x, of_heads in zip(ids, logits, strict=True):
            for first, length in ((0, 6), (6, 1), (7, 4)):
                inside = slice(first, first + length)
                target = x[:, inside][:, k:]
                each.append(of_heads[k - 1][:, inside].log_softmax(-1)[:, : max(0, length - k)])
                each[-1] = -each[-1].gather(-1, target[..., None]).flatten()
                counts.append((torch.ones(2, 12) if weights is None else weights)[:, inside][:, k:].flatten())
        total = torch.cat(counts).double()
        expected += factor * (torch.cat(each) * total).sum() / total.sum()
    torch.testing.assert_close(found, expected)


def test_weights_of_what_is_no_target_are_not_read():
    """NaN there, and in the weight of a token that nobody predicts."""
    logits = torch.randn(1, 4, 5, requires_grad=True)
    targets, weights = torch.tensor([[1, IGNORED, 2, IGNORED]]), torch.tensor([[0.5, torch.nan, 2.0, torch.inf]])
    loss = token_loss(logits, targets, total_targets=2.5, weights=weights)
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all() and not logits.grad[0, 1::2].any()
    batch = {"shift_labels": targets, "shift_loss_weights": weights}
    assert TokenMean(Loopback(1)).count([batch]) == StepCount((2,), (2.5,), 4, 1)


def test_integers_of_any_width_are_labels():
    logits, targets = torch.randn(3, 5), torch.tensor([1, IGNORED, 4], dtype=torch.int16)
    expected = token_loss(logits, targets.long(), total_targets=2)
    assert torch.equal(token_loss(logits, targets, total_targets=2), expected)


def refusals():
    part = ContextParallel(Loopback(2)).partition(4)
    ids, mean, real = torch.zeros(1, 4, dtype=torch.long), TokenMean(Loopback(2)), {"shift_labels": torch.zeros(1, 4)}
    heads = {"targets": ids[..., None].expand(1, 4, 2), "total_targets": (1, 1), "head_weights": (1, 1)}
    wrong = real | {"num_items_in_batch": 5}
    return {
        "ahead must be a number of tokens, at least 1; got 0": lambda: shard_targets(part, ids, ahead=0),
        r"labels must be \[B, 4\]; got shape \(4,\)": lambda: shard_targets(part, ids[0], ahead=1),
        r"weights must be \[B, 4\]; got shape \(2, 4\)": lambda: shard_targets(
            part, ids, ahead=1, weights=torch.ones(2, 4)
        ),
        "loss_weights must be floating; got torch.int64": lambda: shard_targets(part, ids, ahead=1, weights=ids),
        "labels must be int64, int32 or int16": lambda: shard_targets(part, ids.bool(), ahead=1),
        "loss_weights must come with labels": lambda: part.shard_batch({"loss_weights": torch.ones(1, 4)}),
        "of the same number of heads; got 1, 2, 2, 2": lambda: multi_token_loss([torch.zeros(1, 4, 3)], **heads),
        "micro_batches must be a list of at least one batch; got none": lambda: mean.count([]),
        r"Write count\(\[batch\]\)": lambda: mean.count(real),
        "must hold shift_labels; got one of labels": lambda: mean.count([{"labels": ids}]),
        "the same number of tokens ahead; got several": lambda: mean.count(
            [real, {"shift_labels": torch.zeros(1, 4, 2)}]
        ),
        "total must be of one target a token; got 2": lambda: (
            mean.count([{"shift_labels": torch.zeros(1, 4, 2)}]).total
        ),
        r"they hold 4 together, and num_items_in_batch says 5 \(ring of 2\)": lambda: mean.count([wrong]),
        "loss weights must be finite and at least 0": lambda: mean.count(
            [real | {"shift_loss_weights": torch.tensor([[1, 1, -1.0, 1]])}]
        ),
    }


@pytest.mark.parametrize("words", refusals())
def test_what_does_not_fit_says_what_to_do(words):
    with pytest.raises((ShapeError, DtypeError, DataError), match=words):
        refusals()[words]()
