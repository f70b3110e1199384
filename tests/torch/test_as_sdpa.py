"""A plan in the place of `scaled_dot_product_attention`: models that know nothing of it, and calls that it refuses."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain_models import on_ring, over_processes, refused_on_one_rank
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import _get_current_function_mode_stack

from ringspun import Band, Causal, Documents, Full, Window
from ringspun.errors import RingspunWarning, ShapeError, UnsupportedByRing
from ringspun.torch import ContextParallel, Loopback

B, H, K, S, D = 2, 4, 2, 11, 6
TOLERANCE = 1e-13


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def a_plan(mask=None, ranks: int = 3, **options):
    return ContextParallel(Loopback(ranks)).plan(options.pop("seq_len", S), mask or Causal(), **options)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt", "dit"])
def test_a_plain_model_on_a_loopback_is_the_model_in_one_process(name, ranks):
    """Outputs, loss and every gradient; learned positions, tied embeddings; a bidirectional model with a condition."""
    errors = on_ring(name, ContextParallel(Loopback(ranks)))
    assert len(errors) > 25 and max(errors.values()) < TOLERANCE, errors


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["gpt", "dit"])
def test_a_plain_model_over_processes_is_the_model_in_one_process(pools, name):
    for errors in pools(2).run(over_processes, name):
        assert len(errors) > 25 and max(errors.values()) < TOLERANCE, errors


def test_scale_and_grouped_heads_are_those_of_the_call():
    plan = a_plan()
    q, k, v = random(B, H, S, D, seed=1), random(B, K, S, D, seed=2), random(B, K, S, 5, seed=3)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    local = [plan.partition.shard(x, dim=2) for x in (q, k, v)]
    with plan.as_sdpa():
        found = F.scaled_dot_product_attention(*local, is_causal=True, scale=0.3, enable_gqa=True)
        with pytest.raises(UnsupportedByRing, match=r"equal heads; got 4 and 2\. Call with enable_gqa=True"):
            F.scaled_dot_product_attention(*local, is_causal=True)
    torch.testing.assert_close(plan.partition.gather(found, dim=2), right)


def test_three_dimensions_are_one_head():
    plan = a_plan(Full())
    q, k, v = (random(B, S, D, seed=n) for n in range(3))
    with plan.as_sdpa():
        found = F.scaled_dot_product_attention(*(plan.partition.shard(x, dim=1) for x in (q, k, v)))
        for bad in ([random(S, D)] * 3, [q, k.unsqueeze(1), v], [q[None, None]] * 3):
            with pytest.raises(UnsupportedByRing, match=r"must be \[B, H, T, D\] or \[B, T, D\]; got \("):
                F.scaled_dot_product_attention(*bad)
        with pytest.raises(ShapeError, match="must hold 11 tokens in dim 2"):
            F.scaled_dot_product_attention(q[:, :-1], k[:, :-1], v[:, :-1])
    torch.testing.assert_close(plan.partition.gather(found, dim=1), F.scaled_dot_product_attention(q, k, v))


def test_autocast_casts_as_it_does_without_a_ring():
    plan = a_plan()
    x = random(B, H, S, D, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        right = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        with plan.as_sdpa():
            found = F.scaled_dot_product_attention(*[plan.partition.shard(x, dim=2)] * 3, is_causal=True)
    assert found.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(plan.partition.gather(found, dim=2), right, atol=0.02, rtol=0.02)


AGREES = [
    (Causal(), {}, True),
    (Full(), {}, False),
    (Window(3), {}, True),
    (Band(2, 0), {}, True),
    (Band(2, 2), {}, False),
    (Causal() & Documents([4, 5]), {}, True),
    (Full() & Documents([4, 5]), {}, False),
    (Full() & Documents([1] * S), {}, None),
    (Full(), {"seq_len": 1}, None),
    ([Causal(), Causal() & Documents([3, 8])], {}, True),
    ([Full(), Full() & Documents([3, 8])], {}, False),
    ([Full(), Causal()], {}, "neither"),
    (Full(), {"key_len": 5}, False),
    (Full(), {"key_len": 5, "query_start": 5}, False),
    (Causal(), {"key_len": 16, "query_start": 5}, "neither"),
    (Causal(), {"key_len": 20}, True),
]


@pytest.mark.parametrize(("mask", "sides", "value"), AGREES, ids=str)
def test_is_causal_must_say_what_the_mask_does(mask, sides, value):
    """Silence about a mask that is another than the model means. `None`: nothing was there to be hidden, both agree."""
    plan = a_plan(mask, **sides)
    batch = len(mask) if isinstance(mask, list) else B
    q = random(batch, H, plan.queries.seq_len, D)
    k = random(batch, H, plan.keys.seq_len, D)
    for said in (True, False):
        if value in (said, None):
            with plan.as_sdpa():
                found = F.scaled_dot_product_attention(q, k, k, is_causal=said)
            assert torch.equal(found, plan.attention(q, k, k))
        else:
            wrong = pytest.raises(UnsupportedByRing, match=f"is_causal must say what the plan's mask does; got {said} ")
            with wrong, plan.as_sdpa():
                F.scaled_dot_product_attention(q, k, k, is_causal=said)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"attn_mask": torch.ones(S, S, dtype=torch.bool)},
            r"attn_mask must be None .* got one of shape \(11, 11\). What",
        ),
        ({"dropout_p": 0.1}, "dropout_p must be 0 on a ring; got 0.1. Set the model's attention dropout to 0"),
    ],
)
def test_what_a_plan_does_not_do_is_refused(asked, words):
    q = random(B, H, S, D)
    with pytest.raises(UnsupportedByRing, match=words), a_plan().as_sdpa():
        F.scaled_dot_product_attention(q, q, q, **{"is_causal": True, **asked})


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_call_refused_on_one_rank_alone_raises_on_both(pools):
    first, second = pools(2).run(refused_on_one_rank)
    assert first[0] == "PeerError" and "dropout_p must be 0 on a ring; got 0.1" in first[1]
    assert second[0] == "UnsupportedByRing"
    pools(2).restart()


def test_the_innermost_plan_counts_and_nothing_is_left_behind():
    causal, near = a_plan(), a_plan(Window(2))
    q = random(B, H, S, D)
    before = F.scaled_dot_product_attention
    with causal.as_sdpa():
        outer = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        with near.as_sdpa():
            inner = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        again = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert F.scaled_dot_product_attention is before
    assert torch.equal(outer, causal.attention(q, q, q)) and torch.equal(outer, again)
    assert torch.equal(inner, near.attention(q, q, q)) and not torch.equal(inner, outer)
    with pytest.raises(ZeroDivisionError), causal.as_sdpa():
        raise ZeroDivisionError
    assert _get_current_function_mode_stack() == []
    right = F.scaled_dot_product_attention(q, q, q, is_causal=True)  # in one process again
    assert not torch.allclose(right, outer)


def test_a_block_without_attention_is_warned_of():
    """Attention that a model writes itself, and that no mode can see: local, and nothing else says so."""
    plan = a_plan()
    q = random(B, H, S, D)
    with pytest.warns(RingspunWarning, match="no attention was computed under plan.as_sdpa"), plan.as_sdpa():
        (q @ q.mT).softmax(-1) @ q
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with plan.as_sdpa():
            plan.attention(q, q, q)


def test_flex_attention_is_refused():
    q = random(1, 2, 16, 16, dtype=torch.float32)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"flex_attention must not be called under plan\.as_sdpa"), a_plan().as_sdpa():
        torch.compile(flex_attention, backend="aot_eager", fullgraph=True)(q, q, q)


# -- nn.MultiheadAttention ---------------------------------------------------------------------------------------------


def multi_head(**options) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(H * D, H, **options).double()


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 7}], ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
def test_multi_head_attention_is_that_of_one_process(options, batch_first):
    module, plan = multi_head(batch_first=batch_first, **options), a_plan()
    dim = 1 if batch_first else 0
    widths = H * D, options.get("kdim", H * D), options.get("vdim", H * D)
    q, k, v = (random(*((B, S) if batch_first else (S, B)), width, seed=width) for width in widths)
    mask = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    right, _ = module(q, k, v, attn_mask=mask, is_causal=True, need_weights=False)
    local = [plan.partition.shard(x, dim=dim) for x in (q, k, v)]
    for given in (mask, None):
        with plan.as_sdpa():
            found, weights = module(*local, attn_mask=given, is_causal=True, need_weights=False)
        assert weights is None
        torch.testing.assert_close(plan.partition.gather(found, dim=dim), right)


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_of_pytorch_is_that_of_one_process(training):
    """Its shortcut for inference, too, which calls no attention by name."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(H * D, H, 8, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().train(training)
    plan, x = a_plan(Full()), random(B, S, H * D)
    with torch.set_grad_enabled(training):
        right = model(x)
        with plan.as_sdpa():
            found = model(plan.partition.shard(x, dim=1))
    torch.testing.assert_close(plan.partition.gather(found, dim=1), right)


@pytest.mark.parametrize(
    ("options", "asked", "words"),
    [
        ({}, {"need_weights": True}, "need_weights must be False on a ring; got bool. Give need_weights=False"),
        ({"add_bias_kv": True}, {}, "bias_k must be None on a ring; got Parameter"),
        ({"add_zero_attn": True}, {}, "add_zero_attn must be False on a ring"),
        ({}, {"key_padding_mask": torch.zeros(B, S, dtype=torch.bool)}, "key_padding_mask must be None on a ring"),
        ({}, {"attn_mask": torch.zeros(S, S)}, "attn_mask must be None"),
        ({"dropout": 0.1}, {}, "dropout_p must be 0 on a ring; got 0.1"),
    ],
)
def test_what_multi_head_attention_would_ignore_is_refused(options, asked, words):
    module, x = multi_head(batch_first=True, **options), random(B, S, H * D)
    with pytest.raises(UnsupportedByRing, match=words), a_plan(Full()).as_sdpa():
        module(x, x, x, **{"need_weights": False, **asked})
    if "dropout" in options:
        with a_plan(Full()).as_sdpa():
            assert np.isfinite(module.eval()(x, x, x, need_weights=False)[0].detach().numpy()).all()
