"""The oracle, checked by what is simpler still: loops for the forward pass, central differences for the gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ringspun import Documents
from ringspun.core.reference import Reference, attention, attention_with_gradients

B, H, K, TQ, TK, D, DV = 2, 6, 2, 5, 7, 3, 4
EMPTY_ROW = 2


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


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("scale", [None, 0.9])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_gradients_are_central_differences(inputs, which, scale, with_lse):
    q, k, v, allowed, dout, dlse = inputs
    tensors = {"q": q, "k": k, "v": v}

    def loss(**changed):
        x = tensors | changed
        out, lse, _ = attention(x["q"], x["k"], x["v"], allowed=allowed, scale=scale)
        seen = ~np.isneginf(lse)
        return (out * dout).sum() + ((lse[seen] * dlse[seen]).sum() if with_lse else 0)

    given = attention_with_gradients(q, k, v, dout, dlse if with_lse else None, allowed=allowed, scale=scale)
    gradient, step = getattr(given, "d" + which), 1e-5
    assert gradient.shape == tensors[which].shape
    for index in np.ndindex(gradient.shape):
        moved = [tensors[which].copy(), tensors[which].copy()]
        moved[0][index] += step
        moved[1][index] -= step
        slope = (loss(**{which: moved[0]}) - loss(**{which: moved[1]})) / (2 * step)
        assert abs(slope - gradient[index]) < 2e-9, index


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
        for name in Reference.__dataclass_fields__:
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
    assert {getattr(r, name).dtype for name in Reference.__dataclass_fields__} == {np.dtype(np.float64)}


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
