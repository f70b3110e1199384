"""Known hard cases of head counts, strides, axes and padding that have a meaning in jax, by id; and of errors by ring
size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ringspun import Causal, Contiguous, Documents, Full, Zigzag
from ringspun.core.reference import attention, attention_with_gradients
from ringspun.errors import DtypeError, PlanError, ShapeError
from ringspun.jax import Xla, ring_attention
from ringspun.testing.cases import Case, Shape, inputs, reference
from ringspun.testing.comparison import errors, judge, rms
from ringspun.testing.jax import ring_mesh, run_ring
from ringspun.testing.problem import oracle, problem_of

TOKENS = PartitionSpec(None, "ring")


def judged(case):
    error = errors(run_ring(case, inputs(case)), reference(case, inputs(case)))
    assert judge("float64", [error], [])[0], error.worst


def on_ranks(function, *arrays, ranks=2):
    """`function` of shards, over a ring that it finds as "ring"."""
    return jax.jit(jax.shard_map(function, mesh=ring_mesh(ranks), in_specs=TOKENS, out_specs=TOKENS))(*arrays)


ring = partial(ring_attention, axis_name="ring", kernel=Xla(8))


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def test_N5_errors_do_not_grow_with_the_ring():
    """bfloat16 on 2, 4 and 8 ranks: every tensor's error at most twice that of one."""

    def error(ranks):
        cases = [Case(ranks, 64, Causal(), Zigzag(), "bfloat16", Shape(1, 2, 1, 16, 16), seed) for seed in range(2)]
        return rms([errors(run_ring(case, problem_of(case).given), oracle(case)) for case in cases])

    alone = error(1)
    for ranks in (2, 4, 8):
        assert all(value <= 2 * alone[name] for name, value in error(ranks).items()), ranks


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=str)
def test_N13_what_padding_holds_reaches_no_gradient(layout):
    """Documents of 5 and 3 in room for 8 and 4, whatever stands in the rest."""
    case = Case(2, 12, Causal() & Documents([5, 3], [0, 8]), layout, shape=Shape(1, 1, 1, 8, 8))
    given, blind = inputs(case), np.isin(np.arange(12), (5, 6, 7, 11))
    found = []
    for filler in (0.0, np.nan, 1e30):
        bad = {n: np.where(blind[:, None], filler, getattr(given, n)) for n in ("q", "k", "v", "dout")}
        found.append(run_ring(case, replace(given, **bad, dlse=np.where(blind, filler, given.dlse))))
    for name, first in found[0].items():
        assert all(np.array_equal(first, other[name]) for other in found[1:])
        assert name == "lse" or np.isfinite(first).all()


def test_M13_negative_ids_are_padding_and_a_mask_of_bools_is_refused():
    """Six tokens and two of padding by every entry: a mask, ids; what could be read either way is no argument."""
    q, k, v = (random(1, 8, 1, 8, seed=n) for n in range(3))
    ids = jnp.asarray([[0] * 6 + [-1] * 2])
    by_ids = on_ranks(lambda q, k, v, ids: ring(q, k, v, mask=Full(), segment_ids=ids), q, k, v, ids)
    by_mask = on_ranks(partial(ring, mask=Documents([6])), q, k, v)
    heads = [np.swapaxes(x, 1, 2)[:, :, :6] for x in (q, k, v)]
    for found in (by_ids, by_mask):
        np.testing.assert_allclose(
            np.swapaxes(found, 1, 2)[:, :, :6], attention(*heads, allowed=np.ones((6, 6), bool))[0], atol=1e-12
        )
        assert not found[:, 6:].any()
    with pytest.raises(
        DtypeError, match=r"segment_ids must be a jax array of integers.*negative for padding; got bool"
    ):
        ring_attention(q, k, v, axis_name=None, segment_ids=ids >= 0)
    with pytest.raises(PlanError, match="mask must be a Mask"):
        ring_attention(q, k, v, axis_name=None, mask=ids >= 0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 7), (8, 1), (4, 2)])
def test_S5_grouped_heads_keep_their_own_counts(heads, kv_heads):
    judged(Case(2, 8, Causal(), Zigzag(), shape=Shape(1, heads, kv_heads, 4, 4)))


def test_S10_gradients_that_are_no_plain_arrays():
    """A broadcast gradient, a transposed one, one of every second row; q, k, v as views of one projection."""
    qkv, w = random(1, 8, 3, 2, 4), random(1, 8, 2, 4, seed=1)
    losses = {
        "sum": lambda out, w: out.sum(),
        "transposed": lambda out, w: (out.transpose(0, 2, 1, 3) * w.transpose(0, 2, 1, 3)).sum(),
        "every second": lambda out, w: (out[:, ::2] * w[:, ::2]).sum(),
    }
    even = np.arange(8)[:, None, None] % 2 == 0
    upstream = {"sum": np.ones(w.shape), "transposed": np.asarray(w), "every second": np.where(even, w, 0)}

    def all_of_them(qkv, w):
        def loss(qkv, of):
            return of(ring(*(qkv[:, :, n] for n in range(3))), w)

        return {name: jax.grad(loss)(qkv, of) for name, of in losses.items()}

    found = on_ranks(all_of_them, qkv, w)
    heads, allowed = [np.swapaxes(qkv[:, :, n], 1, 2) for n in range(3)], Causal().as_array(8)
    for name, dout in upstream.items():
        ref = attention_with_gradients(*heads, np.swapaxes(dout, 1, 2), allowed=allowed)
        expected = np.stack([np.swapaxes(x, 1, 2) for x in (ref.dq, ref.dk, ref.dv)], axis=2)
        np.testing.assert_allclose(found[name], expected, atol=1e-12, err_msg=name)


def test_S12_tokens_are_not_heads():
    """As many tokens as heads, where a wrong axis has a legal shape; elsewhere heads before tokens are refused."""
    judged(Case(2, 16, Causal(), Zigzag(), shape=Shape(1, 16, 16, 4, 4)))
    judged(Case(2, 14, Causal(), Zigzag(), shape=Shape(3, 10, 5, 4, 6)))
    q, kv = random(3, 10, 14, 4), random(3, 5, 14, 4)  # [B, H, T, D]
    with pytest.raises((ShapeError, PlanError), match="must"):
        ring_attention(q, kv, kv, axis_name=None, seq_len=14)


def test_S13_short_rows_of_a_batch_leave_others_alone():
    """Real lengths 16, 9 and 1; each row as it is by itself."""
    q, k, v, dout = (random(3, 16, 2, 4, seed=n) for n in range(4))
    ids = jnp.where(jnp.arange(16) < jnp.asarray([16, 9, 1])[:, None], 0, -1)

    def both(q, k, v, dout, ids):
        out, pull = jax.vjp(lambda *x: ring(*x, segment_ids=ids), q, k, v)
        return out, *pull(dout)

    found = on_ranks(both, q, k, v, dout, ids)
    for row, length in enumerate((16, 9, 1)):
        heads = [np.swapaxes(x[row : row + 1, :length], 1, 2) for x in (q, k, v, dout)]
        ref = attention_with_gradients(*heads, allowed=Causal().as_array(length))
        for x, expected in zip(found, (ref.out, ref.dq, ref.dk, ref.dv), strict=True):
            np.testing.assert_allclose(np.swapaxes(x[row : row + 1, :length], 1, 2), expected, atol=1e-12)
            assert not x[row, length:].any()
