"""The loss without logits: PyTorch's numbers and gradients, and one chunk of logits alive."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ringspun.errors import DtypeError, NotDifferentiable, ShapeError
from ringspun.torch.memory import peak_memory
from ringspun.train.losses.chunked_loss import Head, Terms, linear_cross_entropy, linear_token_loss
from ringspun.train.losses.loss import IGNORED, token_loss

D, V, C = torch.float64, 11, 5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D).to(dtype)


def labels_of(*shape: int, ignored: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(0, V, shape, generator=generator)
    return found.masked_fill(torch.rand(shape, generator=generator) < ignored, IGNORED)


def expected_losses(hidden: Tensor, head: Head, targets: Tensor, terms: Terms) -> Tensor:
    """By PyTorch, from all logits."""
    logits = F.linear(hidden, head.weight, head.bias) * head.scale
    logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    flat, labels = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    each = F.cross_entropy(flat, labels, reduction="none", label_smoothing=terms.label_smoothing)
    each = each + terms.z_loss * flat.logsumexp(-1).square() * (labels != IGNORED)
    return each.view(targets.shape)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 9),
    chunk=st.integers(1, 10),
    vocab=st.sampled_from([None, 1, 4, 11, 50]),
    biased=st.booleans(),
    scale=st.sampled_from([1.0, 0.25]),
    softcap=st.sampled_from([None, 1.5]),
    smoothing=st.sampled_from([0.0, 0.2, 1.0]),
    z_loss=st.sampled_from([0.0, 0.3]),
    weighted=st.booleans(),
    reduction=st.sampled_from(["none", "sum", "mean"]),
)
def test_it_is_pytorchs_loss_of_the_logits(
    tokens: int, chunk: int, vocab: int | None, biased: bool, scale: float, softcap: float | None,
    smoothing: float, z_loss: float, weighted: bool, reduction: Any,
) -> None:  # fmt: skip
    hidden, weight = random(2, tokens, C).requires_grad_(), random(V, C, seed=1).requires_grad_()
    bias = random(V, seed=2).requires_grad_() if biased else None
    head, terms = Head(weight, bias, scale, softcap), Terms(smoothing, z_loss, chunk, vocab)
    targets = labels_of(2, tokens)
    counts = random(2, tokens, seed=3).abs() + 0.1 if weighted else None
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    used = torch.ones(2, tokens, dtype=D) if counts is None else counts
    each = expected_losses(hidden, head, targets, terms) * used
    if reduction != "none":
        each = each.sum()
    if reduction == "mean":
        each = each / (float(used[targets != IGNORED].sum()) or 1)
    found = linear_cross_entropy(hidden, head, targets, weights=counts, reduction=reduction, terms=terms)
    torch.testing.assert_close(found, each, rtol=1e-12, atol=1e-12)
    upstream = random(*found.shape, seed=4)
    for _ in range(2):  # the second time from the same graph
        grads = torch.autograd.grad(found, leaves, upstream, retain_graph=True)
        for a, b in zip(grads, torch.autograd.grad(each, leaves, upstream, retain_graph=True), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_only_what_needs_gradients_gets_them(needs: tuple[bool, ...], reduction: Any) -> None:
    tensors = [random(7, C), random(V, C, seed=1), random(V, seed=2)]
    for x, need in zip(tensors, needs, strict=True):
        x.requires_grad_(need)
    hidden, weight, bias = tensors
    found = linear_cross_entropy(hidden, Head(weight, bias), labels_of(7), reduction=reduction, terms=Terms(0, 0, 3))
    assert found.requires_grad == any(needs)
    if any(needs):
        found.sum().backward()
    assert [x.grad is not None for x in tensors] == list(needs)


def test_tied_embeddings_get_both_gradients() -> None:
    ids, table = torch.tensor([[1, 4, 2, 1, 0, 3]]), random(V, C).requires_grad_()
    grads = []
    for tied in (False, True):
        hidden, targets = F.embedding(ids, table).tanh(), ids.roll(-1, 1)
        if tied:
            loss = linear_cross_entropy(hidden, Head(table), targets, terms=Terms(chunk_tokens=4))
        else:
            loss = F.cross_entropy(F.linear(hidden, table)[0], targets[0])
        grads.append(torch.autograd.grad(loss, table)[0])
    torch.testing.assert_close(*grads)


def test_the_share_of_a_rank_is_token_loss() -> None:
    hidden, weight, targets, counts = random(1, 9, C), random(V, C, seed=1), labels_of(1, 9), random(1, 9, seed=2)
    found = linear_token_loss(
        hidden, Head(weight), targets, total_targets=20, weights=counts, terms=Terms(chunk_tokens=4)
    )
    torch.testing.assert_close(found, token_loss(hidden @ weight.T, targets, total_targets=20, weights=counts))


def test_where_there_is_no_target_nothing_is_read() -> None:
    hidden, weight, targets = random(1, 9, C), random(V, C, seed=1).requires_grad_(), labels_of(1, 9)
    hidden[targets == IGNORED] = torch.nan
    counts = torch.ones(1, 9).masked_fill(targets == IGNORED, torch.nan)
    loss = linear_cross_entropy(hidden.requires_grad_(), Head(weight), targets, weights=counts)
    loss.backward()
    assert loss.isfinite() and weight.grad.isfinite().all() and hidden.grad.isfinite().all()
    assert (hidden.grad[targets == IGNORED] == 0).all()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_without_any_target_loss_and_gradients_are_zero(reduction: Any) -> None:
    weight = random(V, C).requires_grad_()
    loss = linear_cross_entropy(random(3, C), Head(weight), torch.full((3,), IGNORED), reduction=reduction)
    loss.sum().backward()
    assert (loss == 0).all() and (weight.grad == 0).all()


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_no_farther_from_float64_than_twice_pytorchs_own(autocast: bool) -> None:
    """64 chunks. The gradient of the weight is their sum, in float32."""
    kind = torch.float32 if autocast else torch.bfloat16
    hidden, weight = random(1024, 16, dtype=torch.bfloat16), random(64, 16, seed=1, dtype=torch.bfloat16)
    targets = torch.randint(0, 64, (1024,), generator=torch.Generator().manual_seed(0))
    exact: list[Tensor] = []
    errors: dict[str, list[float]] = {}
    for name in ("exact", "pytorch", "ours"):
        h, w = (x.to(D if name == "exact" else kind).requires_grad_() for x in (hidden, weight))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and name != "exact"):
            if name == "ours":
                loss = linear_cross_entropy(h, Head(w), targets, terms=Terms(chunk_tokens=16))
            else:
                logits = F.linear(h, w)
                loss = F.cross_entropy(logits if name == "exact" else logits.float(), targets)
        found = [loss.detach(), *torch.autograd.grad(loss, [h, w])]
        exact = exact or found
        errors[name] = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)]
    for ours, theirs in zip(errors["ours"], errors["pytorch"], strict=True):
        assert ours <= 2 * theirs + 1e-6, errors


def test_a_scaled_mean_in_float16_keeps_its_small_gradients() -> None:
    """A gradient scaler multiplies the loss; what float16 lost before that is not to be had again."""
    tokens, size, entries, scale = 4096, 8, 5000, 2.0**12
    hidden, weight = random(tokens, size, seed=1), random(entries, size, seed=2) * 0.1
    labels = torch.arange(tokens) % entries
    wide = [x.half().double().requires_grad_() for x in (hidden, weight)]
    narrow = [x.half().requires_grad_() for x in (hidden, weight)]
    expected = torch.autograd.grad(scale * F.cross_entropy(wide[0] @ wide[1].T, labels), wide)
    found = torch.autograd.grad(scale * linear_cross_entropy(narrow[0], Head(narrow[1]), labels), narrow)
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() < 2e-3 * other.norm()


def test_second_derivatives_are_refused() -> None:
    hidden = random(4, C).requires_grad_()
    loss = linear_cross_entropy(hidden, Head(random(V, C, seed=1)), labels_of(4))
    with pytest.raises(NotDifferentiable, match="second derivatives of linear_cross_entropy"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"targets": torch.tensor([0, 1, V])}, ShapeError, "must be from 0 to 10, or -100 for none; got 0 to 11"),
        ({"targets": torch.tensor([0, 1, -1])}, ShapeError, "targets must be from 0 to 10"),
        ({"targets": torch.zeros(3)}, DtypeError, "targets must be integers"),
        ({"targets": torch.zeros(4, dtype=torch.long)}, ShapeError, r"targets must be \[3\]"),
        ({"head": Head(random(C, V))}, ShapeError, r"head.weight must be \[V, 5\]"),
        ({"head": Head(random(V, C), random(C))}, ShapeError, r"head.bias must be \[11\]"),
        ({"head": Head(random(V, C), softcap=0.0)}, ShapeError, "softcap must be above 0"),
        ({"reduction": "max"}, ShapeError, "reduction must be none, sum or mean"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"head": Head(random(V, C)), "targets": torch.tensor([0, 1, 2])} | change
    with pytest.raises(error, match=words):
        linear_cross_entropy(random(3, C), **given)


@pytest.mark.parametrize("wrong", [{"chunk_tokens": 0}, {"chunk_vocab": 0}, {"label_smoothing": 2.0}, {"z_loss": -1.0}])
def test_terms_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ShapeError, match=f"{next(iter(wrong))} must be"):
        Terms(**wrong)


def loss_bytes(tokens: int, vocab: int, terms: Terms | None, reduction: Any = "mean") -> int:
    """Peak of forward and backward, above hidden states and weight, without their gradients."""
    hidden, weight = (random(n, 8, dtype=torch.float32).requires_grad_() for n in (tokens, vocab))
    targets = torch.arange(tokens) % vocab
    with peak_memory() as peak:
        if terms is None:
            loss = F.cross_entropy(F.linear(hidden, weight), targets)
        else:
            loss = linear_cross_entropy(hidden, Head(weight), targets, reduction=reduction, terms=terms).mean()
        loss.backward()
    return peak.bytes - hidden.nbytes - weight.nbytes


def test_Q3_the_loss_holds_a_chunk_of_logits_whatever_the_length() -> None:
    """20,480 x 131,072 in float32 is 10 GiB, twice in backward; here 1/64 of each length, so 1/4096."""
    whole = 20480 * 131072 * 4 / 2**30
    assert whole == 10.0
    tokens, vocab = 20480 // 64, 131072 // 64
    assert loss_bytes(tokens, vocab, None) >= 2 * tokens * vocab * 4
    chunk = Terms(chunk_tokens=32)
    for reduction in ("mean", "none"):
        short, long = (loss_bytes(n, vocab, chunk, reduction) for n in (tokens, 8 * tokens))
        assert short < 3.2 * 32 * vocab * 4
        assert long - short <= 8 * 7 * tokens * 8  # losses, log-sums, labels: numbers of each token, not of V


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_is_constant_in_chunks_of_the_vocabulary(reduction: Any) -> None:
    terms = Terms(chunk_tokens=64, chunk_vocab=128)
    small, large = (loss_bytes(256, vocab, terms, reduction) for vocab in (512, 8192))
    assert large <= 1.05 * small + 1024
