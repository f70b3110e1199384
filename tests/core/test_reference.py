"""The oracle, checked by what is simpler still: loops for the forward pass, central differences for the gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ringspun import Documents
from ringspun.core.reference import attention, attention_with_gradients

B, H, K, TQ, TK, D, DV = 2, 6, 2, 5, 7, 3, 4
EMPTY_ROW = 2
PLAIN = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture
def inputs():
    """Grouped heads, distinct sizes, a random mask with one row that sees nothing."""
    rng = np.random.default_rng(11)
    q, k, v = rng.normal(size=(B, H, TQ, D)), rng.normal(size=(B, K, TK, D)), rng.normal(size=(B, K, TK, DV))
    allowed = rng.random((TQ, TK)) < 0.6
    allowed[EMPTY_ROW], allowed[0, 0], allowed[:, 3] = False, True, False
    return q, k, v, allowed, rng.normal(size=(B, H, TQ, DV)), rng.normal(size=(B, H, TQ))


def by_loops(q, k, v, allowed, scale):
    out, lse = np.zeros((B, H, TQ, DV)), np.full((B, H, TQ), -np.inf)
    for b, h, i in np.ndindex(B, H, TQ):
        g = h // (H // K)
        seen = [j for j in range(TK) if allowed[i, j]]
        weights = [math.exp(scale * float(q[b, h, i] @ k[b, g, j])) for j in seen]
        if seen:
            lse[b, h, i] = math.log(sum(weights))
            out[b, h, i] = sum(w * v[b, g, j] for w, j in zip(weights, seen, strict=True)) / sum(weights)
    return out, lse


@pytest.mark.parametrize("scale", [None, 0.9])
def test_forward_is_the_definition(inputs, scale):
    q, k, v, allowed, *_ = inputs
    out, lse, p = attention(q, k, v, allowed=allowed, scale=scale)
    expected, expected_lse = by_loops(q, k, v, allowed, D**-0.5 if scale is None else scale)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-14)
    assert p.shape == (B, H, TQ, TK) and (p[..., ~allowed] == 0).all()
    np.testing.assert_allclose(p.sum(-1), np.broadcast_to(allowed.any(-1), (B, H, TQ)), atol=1e-15)


def test_softcap_bias_and_sinks_are_their_definitions(inputs):
    """The cap bends scores before the bias, the mask cuts last, a sink is one more key whose value is 0."""
    q, k, v, allowed, *_ = inputs
    rng = np.random.default_rng(5)
    bias, sinks = rng.normal(size=(H, TQ, TK)), rng.normal(size=H)
    out, lse, _ = attention(q, k, v, allowed=allowed, scale=0.9, softcap=0.7, bias=bias, sinks=sinks)
    for b, h, i in np.ndindex(B, H, TQ):
        g = h // (H // K)
        seen = [j for j in range(TK) if allowed[i, j]]
        scores = [0.7 * math.tanh(0.9 * float(q[b, h, i] @ k[b, g, j]) / 0.7) + bias[h, i, j] for j in seen]
        total = math.exp(sinks[h]) + sum(map(math.exp, scores))
        np.testing.assert_allclose(lse[b, h, i], math.log(total), atol=1e-14)
        mean = sum((math.exp(s) * v[b, g, j] for s, j in zip(scores, seen, strict=True)), np.zeros(DV)) / total
        np.testing.assert_allclose(out[b, h, i], mean, atol=1e-14)
    assert (lse[:, :, EMPTY_ROW] == sinks).all() and (out[:, :, EMPTY_ROW] == 0).all()


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(
    "plain",
    [
        {"scale": None},
        {"scale": 0.9},
        {"softcap": 0.8},
        {"sinks": 1},
        {"bias": 1},
        {"softcap": 2, "sinks": 1, "bias": 1},
    ],
    ids=str,
)
def test_gradients_are_central_differences(inputs, plain, with_lse):
    q, k, v, allowed, dout, dlse = inputs
    rng = np.random.default_rng(5)
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {"sinks": rng.normal(size=H)} if "sinks" in plain else {}
    tensors |= {"bias": rng.normal(size=(H, TQ, TK))} if "bias" in plain else {}
    numbers = {name: plain[name] for name in ("scale", "softcap") if name in plain}

    def loss(**changed):
        out, lse, _ = attention(**(tensors | changed), allowed=allowed, **numbers)
        seen = ~np.isneginf(lse)
        return (out * dout).sum() + ((lse[seen] * dlse[seen]).sum() if with_lse else 0)

    given = attention_with_gradients(dout=dout, dlse=dlse if with_lse else None, allowed=allowed, **tensors, **numbers)
    for which, x in tensors.items():
        gradient, step = getattr(given, "d" + which), 1e-5
        assert gradient.shape == x.shape
        for index in np.ndindex(gradient.shape):
            moved = [x.copy(), x.copy()]
            moved[0][index] += step
            moved[1][index] -= step
            slope = (loss(**{which: moved[0]}) - loss(**{which: moved[1]})) / (2 * step)
            assert abs(slope - gradient[index]) < 2e-9, (which, index)


def test_N7_a_row_without_keys_is_zero_and_minus_infinity(inputs):
    """Row with no allowed key: NaN, or the average of v."""
    q, k, v, allowed, dout, dlse = inputs
    r = attention_with_gradients(q, k, v, dout, dlse, allowed=allowed)
    assert (r.out[:, :, EMPTY_ROW] == 0).all() and np.isneginf(r.lse[:, :, EMPTY_ROW]).all()
    assert (r.dq[:, :, EMPTY_ROW] == 0).all()
    assert (r.dk[:, :, 3] == 0).all() and (r.dv[:, :, 3] == 0).all(), "key 3 is seen by nobody"
    for x in (r.out, r.dq, r.dk, r.dv):
        assert np.isfinite(x).all()


def test_masks_may_differ_by_batch_row_and_head(inputs):
    q, k, v, _, dout, dlse = inputs
    allowed = np.random.default_rng(3).random((B, H, TQ, TK)) < 0.5
    r = attention_with_gradients(q, k, v, dout, dlse, allowed=allowed)
    for b in range(B):
        one = attention_with_gradients(
            q[b : b + 1], k[b : b + 1], v[b : b + 1], dout[b : b + 1], dlse[b : b + 1], allowed=allowed[b : b + 1]
        )
        for name in PLAIN:
            np.testing.assert_array_equal(getattr(one, name)[0], getattr(r, name)[b])


def test_large_scores_do_not_overflow():
    q, k, v = np.full((1, 1, 2, 1), 100.0), np.array([[[[100.0], [-100.0]]]]), np.array([[[[1.0], [2.0]]]])
    with np.errstate(over="raise", invalid="raise"):
        out, lse, _ = attention(q, k, v, allowed=np.ones((2, 2), bool))
    np.testing.assert_array_equal(out, 1.0)
    np.testing.assert_array_equal(lse, 1e4)


def test_everything_is_float64(inputs):
    q, k, v, allowed, dout, dlse = inputs
    r = attention_with_gradients(*(x.astype(np.float32) for x in (q, k, v, dout, dlse)), allowed=allowed)
    assert {getattr(r, name).dtype for name in PLAIN} == {np.dtype(np.float64)}


def test_no_tokens_at_all():
    q, k = np.zeros((1, 2, 0, 3)), np.zeros((1, 1, 0, 3))
    r = attention_with_gradients(q, k, k, q, allowed=np.zeros((0, 0), bool))
    assert r.out.shape == (1, 2, 0, 3) and r.dk.shape == (1, 1, 0, 3)


def test_M6_a_padded_row_in_numbers():
    """7 real tokens + 1 pad: a real token dropped somewhere gives 1.9443 where dense gives 1.9269."""
    for padding in (100.0, 200.0):
        x = np.repeat(np.array([1, 1, 1, 1, 2, 2, 2, padding])[None, None, :, None], 8, axis=-1)
        out, lse, _ = attention(x, x, x, allowed=Documents([7]).as_array(8))
        values = [1.926949] * 4 + [1.995364] * 3 + [0]
        np.testing.assert_allclose(out[0, 0], np.repeat(np.array(values)[:, None], 8, axis=1), atol=5e-7)
        np.testing.assert_allclose(lse[0, 0, :7], [6.831323] * 4 + [12.416968] * 3, atol=5e-7)
