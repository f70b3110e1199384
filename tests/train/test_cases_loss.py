"""Hard cases of the loss, by the names they have in the list of cases: L1, L3, L4, L6, L8, L10, L12.

On processes: `test_token_mean_on_ranks.py`."""

import math

import hf_rings as hf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, Documents, Zigzag
from ringspun.errors import DtypeError, ShapeError
from ringspun.integrations.transformers import prepare
from ringspun.torch import ContextParallel, Loopback
from ringspun.train.losses.loss import IGNORED, chunked_token_loss, token_loss
from ringspun.train.losses.mean import StepCount, TokenMean
from ringspun.train.losses.metrics import Metrics, token_sums
from ringspun.train.parallel.scaling import gradient_scale


def logits_with_loss(*losses: float) -> torch.Tensor:
    """Two-way logits whose cross-entropy against target 0 is the given number, one row each."""
    x = torch.tensor(losses, dtype=torch.float64)
    return torch.stack([torch.zeros_like(x), torch.log(torch.expm1(x))], dim=1).requires_grad_()


def rank_loss(sums: float, tokens: int, empty: int, total: int) -> torch.Tensor:
    """A rank's share, where `tokens` targets have `sums` of loss and `empty` tokens are no target."""
    logits = logits_with_loss(*[sums / tokens if tokens else 1.0] * (tokens + empty))
    targets = torch.tensor([0] * tokens + [IGNORED] * empty)
    return token_loss(logits, targets, total_targets=total).detach()


def test_L4_rank_without_targets() -> None:
    assert float(rank_loss(12, 4, 0, 4) + rank_loss(0, 0, 3, 4)) == pytest.approx(3.0)


def test_L4_mean_of_tokens_not_of_means() -> None:
    shares = rank_loss(12, 4, 0, 5) + rank_loss(1, 1, 3, 5)
    assert float(shares) == pytest.approx(2.6)


@pytest.mark.parametrize("rows", [0, 3])
def test_L4_no_targets_anywhere(rows: int) -> None:
    logits = torch.randn(rows, 7, requires_grad=True)
    loss = token_loss(logits, torch.full((rows,), IGNORED), total_targets=0)
    loss.backward()
    assert loss == 0 and logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 17])
def test_chunks_change_nothing(rows: int, weighted: bool) -> None:
    torch.manual_seed(0)
    weights = torch.rand(1, rows) if weighted else None
    head = torch.nn.Linear(8, 11, bias=False).double()
    hidden = torch.randn(1, rows, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (1, rows))
    targets[:, ::4] = IGNORED
    whole = token_loss(head(hidden), targets, total_targets=40, weights=weights)
    expected = torch.autograd.grad(whole, [hidden, head.weight])
    chunked = chunked_token_loss(hidden, head, targets, total_targets=40, weights=weights, chunk_tokens=5)
    found = torch.autograd.grad(chunked, [hidden, head.weight])
    torch.testing.assert_close((chunked, *found), (whole, *expected), rtol=1e-14, atol=1e-14)


def test_loss_of_bfloat16_logits_is_float32() -> None:
    logits = torch.randn(4, 9).bfloat16()
    loss = token_loss(logits, torch.tensor([1, 2, 3, 4]), total_targets=4)
    assert loss.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy(logits.float(), torch.tensor([1, 2, 3, 4]))
    torch.testing.assert_close(loss, expected)


def shards(tokens, lengths, ring_size, layout):
    """What each rank of a ring holds: (inputs, targets, count of all targets)."""
    context = ContextParallel(Loopback(ring_size, seed=0), layout=layout)
    part = context.partition(seq_len=tokens.shape[1], documents=Documents(lengths))
    local = part.shard_batch({"input_ids": tokens, "labels": tokens})
    pieces = [(local["input_ids"][0, s], local["shift_labels"][0, s]) for s in part.slices]
    return pieces, int(local["num_items_in_batch"])


@pytest.mark.parametrize("ring_size", [2, 8])
def test_L1_no_shard_loses_its_last_target(ring_size: int) -> None:
    tokens = torch.arange(1, 9)[None]
    pieces, total = shards(tokens, [8], ring_size, Contiguous())
    targets = [t.tolist() for _, t in pieces]
    expected = [2, 3, 4, 5, 6, 7, 8, IGNORED]
    assert total == 7
    assert [t for shard in targets for t in shard] == expected
    assert [len(t) for t in targets] == [8 // ring_size] * ring_size

    torch.manual_seed(0)
    logits = torch.randn(9, 9, dtype=torch.float64)  # a bigram model: the row of a token
    share = [token_loss(logits[i], t, total_targets=total) for i, t in pieces]
    one_process = torch.nn.functional.cross_entropy(logits[tokens[0, :-1]], tokens[0, 1:])
    torch.testing.assert_close(torch.stack(share).sum(), one_process, rtol=1e-14, atol=1e-14)


def test_L3_targets_stay_inside_documents() -> None:
    """Documents of 5, 6 and 5 tokens on a zigzag ring of 2: the 13 pairs inside documents, each once."""
    tokens = torch.arange(100, 116)[None]
    pieces, total = shards(tokens, [5, 6, 5], 2, Zigzag())
    pairs = sorted(
        (int(i), int(t)) for ids, targets in pieces for i, t in zip(ids, targets, strict=True) if t != IGNORED
    )
    inside = [i for i in range(100, 115) if i + 1 not in (105, 111)]
    assert pairs == [(i, i + 1) for i in inside]
    assert total == 13


def test_L3_log_probabilities_of_targets_are_those_of_one_process() -> None:
    """Token by token, at the cuts too."""
    torch.manual_seed(0)
    ids, documents = torch.randint(0, hf.VOCAB, (1, 16)), Documents([5, 6, 5])
    model, found = hf.build("llama", num_hidden_layers=1), []
    prepare(model)
    for ring_size in (1, 2):
        part = hf.loopback(ring_size).partition(16, documents=documents)
        batch = part.shard_batch({"input_ids": ids, "labels": ids})
        plan = part.plan(Causal() & documents)
        logs = model(input_ids=batch["input_ids"], ringspun_plan=plan).logits.log_softmax(-1)
        chosen = logs.gather(-1, batch["shift_labels"].clamp(min=0)[..., None])[..., 0]
        found.append(part.gather(chosen.masked_fill(batch["shift_labels"] == IGNORED, 0), dim=1))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_L6_the_count_of_all_micro_batches_makes_a_model_s_own_loss_a_share() -> None:
    """Hugging Face divides by `num_items_in_batch`; accumulated twice on a ring, it is the mean of both sequences."""
    sequences = [torch.randint(0, hf.VOCAB, (1, hf.S), generator=torch.manual_seed(n)) for n in range(2)]
    whole = hf.build("llama", num_hidden_layers=1)
    logits = torch.cat([whole(input_ids=ids, use_cache=False).logits[0, :-1] for ids in sequences])
    targets = torch.cat([ids[0, 1:] for ids in sequences])
    targets[: hf.S // 2] = IGNORED
    expected = torch.nn.functional.cross_entropy(logits, targets)
    expected.backward()

    model, part = prepare(hf.build("llama", num_hidden_layers=1)), hf.loopback(2).partition(hf.S)
    labels = [ids.clone() for ids in sequences]
    labels[0][:, : hf.S // 2 + 1] = IGNORED
    batches = [part.shard_batch({"input_ids": x, "labels": y}) for x, y in zip(sequences, labels, strict=True)]
    mean = TokenMean(part.context)
    count, logged = mean.count(batches), 0.0
    for batch in batches:
        share = model(**batch | {"num_items_in_batch": count.total}, ringspun_plan=part.plan(Causal())).loss
        share.backward()
        logged += mean.whole(share).item()
    assert logged == pytest.approx(expected.item(), rel=1e-6)  # the model's loss is float32
    assert gradient_scale(model, mean) == 1
    for mine, right in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-5, atol=1e-6 * float(right.grad.abs().max()))


def test_L8_eight_ranks_of_a_hundred_tokens() -> None:
    """Each token's loss is 1: so is the mean, not 1/8; and the mean of scaled gradients is the gradient."""
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    scaled, loss = [], 0.0
    for _ in range(8):
        share = token_loss(
            logits_with_loss(*[1.0] * 100) * weight, torch.zeros(100, dtype=torch.long), total_targets=800
        )
        scaled.append(torch.autograd.grad(8 * share, weight)[0])  # what DDP and FSDP then average
        loss += share.item()
    assert loss == pytest.approx(1.0)
    one = torch.nn.functional.cross_entropy(logits_with_loss(1.0) * weight, torch.zeros(1, dtype=torch.long))
    torch.testing.assert_close(torch.stack(scaled).mean(), torch.autograd.grad(one, weight)[0])


@pytest.mark.parametrize("cut", [2, 5])
def test_L10_micro_batches_of_unequal_counts(cut: int) -> None:
    """Sums 10 over 10 tokens and 6 over 2: 16/12, not 2.0; `cut` tokens of the first are on the first of two ranks."""
    mean, total = TokenMean(Loopback(2)), 0.0
    micro_batches = [
        {"shift_labels": torch.zeros(1, 10, dtype=torch.long), "num_items_in_batch": 10},
        {"shift_labels": torch.tensor([[IGNORED] * 3 + [0, 0]]), "num_items_in_batch": 2},
    ]
    count = mean.count(micro_batches)
    assert count == StepCount((12,), (12.0,), 15, 2)
    for each, batch in ((1.0, micro_batches[0]), (3.0, micro_batches[1])):
        labels = batch["shift_labels"][0]
        for piece in (labels[:cut], labels[cut:]):
            share = token_loss(logits_with_loss(*[each] * len(piece)), piece, total_targets=count.total)
            total += mean.whole(share).item()
    assert total == pytest.approx(16 / 12)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans(), st.integers(0, 2**30))
def test_L10_micro_batches_are_one_big_batch(targets: list[int], weighted: bool, seed: int) -> None:
    """Loss and gradients, whatever is in which; divided at the end as well as at the beginning."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(4, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    batches = []
    for n in targets:
        labels = torch.tensor([[0, 1, 2, 1, 0][:n] + [IGNORED] * (6 - n)])
        batches.append({"x": torch.randn(1, 6, 4, dtype=torch.float64, generator=generator), "shift_labels": labels})
        if weighted:
            batches[-1]["shift_loss_weights"] = torch.rand(1, 6, generator=generator) + 0.1

    def shares(total: float) -> torch.Tensor:
        return sum(
            token_loss(b["x"] @ head, b["shift_labels"], total_targets=total, weights=b.get("shift_loss_weights"))
            for b in batches
        )

    count = TokenMean(Loopback(1)).count(batches)
    assert count.targets == (sum(targets),)
    x, labels = (torch.cat([b[name].flatten(0, 1) for b in batches]) for name in ("x", "shift_labels"))
    weights = torch.cat([b.get("shift_loss_weights", torch.ones(1, 6)).flatten() for b in batches]).double()
    real = labels != IGNORED
    each = torch.nn.functional.cross_entropy((x @ head)[real], labels[real], reduction="none")
    one = (each * weights[real]).sum() / weights[real].sum() if real.any() else each.sum()
    (expected,) = torch.autograd.grad(one, head)
    first = shares(count.total)
    torch.testing.assert_close(first, one)
    torch.testing.assert_close(torch.autograd.grad(first, head)[0], expected)
    (last,) = torch.autograd.grad(shares(1), head)
    torch.testing.assert_close(last / (count.total or 1), expected)


def test_L12_metrics_are_over_exactly_the_completion() -> None:
    """A prompt of 5 tokens, a completion of 3, on two ranks: accuracy and entropy over 3 tokens, worked out by hand."""
    ids, part = torch.tensor([[4, 1, 3, 0, 2, 1, 4, 2]]), ContextParallel(Loopback(2), layout=Contiguous()).partition(8)
    labels = ids.clone()
    labels[:, :5] = IGNORED  # predicted are tokens 5, 6, 7, from positions 4, 5, 6
    batch = part.shard_batch({"input_ids": ids, "labels": labels})
    p = torch.full((8, 5), 0.2, dtype=torch.float64)
    p[4] = torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1])  # right: 1
    p[5] = torch.tensor([0.7, 0.0, 0.0, 0.0, 0.3])  # wrong: 4
    p[6] = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])  # right: 2
    logits = part.shard(p.log()[None], dim=1)
    mean, sums = TokenMean(Loopback(2)), torch.zeros(4, dtype=torch.float64)
    for rows in part.slices:
        sums += token_sums(logits[:, rows], batch["shift_labels"][:, rows], chunk_tokens=1)
    found = mean.metrics(sums)
    entropy = -(0.6 * math.log(0.6) + 4 * 0.1 * math.log(0.1) + 0.7 * math.log(0.7) + 0.3 * math.log(0.3)) / 3
    loss = -(math.log(0.6) + math.log(0.3)) / 3
    assert (found.weight, found.accuracy) == (3.0, pytest.approx(2 / 3))
    assert (found.loss, found.entropy) == (pytest.approx(loss), pytest.approx(entropy))
    assert found.perplexity == pytest.approx(0.18 ** (-1 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_L12_the_loss_of_the_metrics_is_the_loss(dtype: torch.dtype) -> None:
    """With weights too, one of which is 0; and a token that is no target is not looked at."""
    torch.manual_seed(1)
    logits, labels = torch.randn(1, 9, 7).to(dtype), torch.randint(0, 7, (1, 9))
    labels[0, ::3], weights = IGNORED, torch.rand(1, 9)
    weights[0, 1] = 0
    logits[0, ::3] = torch.nan
    logits[0, 1] = torch.nan
    sums = token_sums(logits, labels, weights)
    logits[0, 1] = 0
    total = float(weights[labels != IGNORED].sum())
    expected = token_loss(logits.nan_to_num(), labels, total_targets=total, weights=weights)
    found = TokenMean(Loopback(1)).metrics(sums)
    assert found.loss == pytest.approx(expected.item(), rel=1e-6)
    assert found.weight == pytest.approx(total)


def test_L12_without_loss_tokens() -> None:
    found = TokenMean(Loopback(1)).metrics(token_sums(torch.randn(0, 5), torch.zeros(0, dtype=torch.long)))
    assert found == Metrics(0.0, 0.0, 0.0, 0.0) and found.perplexity == 1
    assert Metrics(1.0, 1e4, 0.0, 0.0).perplexity == math.inf


def test_padding_and_documents_of_one_token_have_no_target() -> None:
    tokens = torch.arange(10, 18)[None]
    pieces, total = shards(tokens, [3, 1, 2], 3, Zigzag())
    pairs = sorted((int(i), int(t)) for ids, ts in pieces for i, t in zip(ids, ts, strict=True) if t != IGNORED)
    assert pairs == [(10, 11), (11, 12), (14, 15)] and total == 3


@pytest.mark.parametrize("loss", ["whole", "chunked", "metrics"])
def test_targets_and_weights_of_another_shape_or_kind_are_refused(loss):
    logits, targets, weights = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3)), torch.ones(2, 3)
    take = {
        "whole": lambda t, w: token_loss(logits, t, total_targets=6, weights=w),
        "chunked": lambda t, w: chunked_token_loss(
            logits, torch.nn.Identity(), t, total_targets=6, weights=w, chunk_tokens=2
        ),
        "metrics": lambda t, w: token_sums(logits, t, w),
    }[loss]
    take(targets, weights)
    for t, w in (
        (targets.T, None),
        (targets, weights.T),
        (targets, torch.ones(5)),
        (targets[:, :2], None),
        (targets, weights[:1, :1]),
    ):
        with pytest.raises(ShapeError, match=r"must be \[2, 3\]"):
            take(t, w)
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        with pytest.raises(DtypeError, match="must be integers"):
            take(targets.to(dtype), None)
