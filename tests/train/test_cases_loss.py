"""Hard cases of the loss, by the names they have in the list of cases: L1, L4; and documents' own targets."""

import pytest
import torch

from ringspun import Contiguous, Documents, Zigzag
from ringspun.train.loss import IGNORED, chunked_token_loss, token_loss


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


@pytest.mark.parametrize("rows", [0, 1, 5, 6, 17])
def test_chunks_change_nothing(rows: int) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 11, bias=False).double()
    hidden = torch.randn(1, rows, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (1, rows))
    targets[:, ::4] = IGNORED
    whole = token_loss(head(hidden), targets, total_targets=40)
    expected = torch.autograd.grad(whole, [hidden, head.weight])
    chunked = chunked_token_loss(hidden, head, targets, total_targets=40, chunk_tokens=5)
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
    from ringspun.torch import ContextParallel, Loopback

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


def test_targets_stay_inside_documents() -> None:
    """Documents of 5, 6 and 5 tokens on a zigzag ring of 2: the 13 pairs inside documents, each once."""
    tokens = torch.arange(100, 116)[None]
    pieces, total = shards(tokens, [5, 6, 5], 2, Zigzag())
    pairs = sorted(
        (int(i), int(t)) for ids, targets in pieces for i, t in zip(ids, targets, strict=True) if t != IGNORED
    )
    inside = [i for i in range(100, 115) if i + 1 not in (105, 111)]
    assert pairs == [(i, i + 1) for i in inside]
    assert total == 13


def test_padding_and_documents_of_one_token_have_no_target() -> None:
    tokens = torch.arange(10, 18)[None]
    pieces, total = shards(tokens, [3, 1, 2], 3, Zigzag())
    pairs = sorted((int(i), int(t)) for ids, ts in pieces for i, t in zip(ids, ts, strict=True) if t != IGNORED)
    assert pairs == [(10, 11), (11, 12), (14, 15)] and total == 3
