"""What users of `ringspun.jax` call: inside their own shard_map, on global arrays, under jit, vmap and checkpoint."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import ringspun.jax
from ringspun import Causal, Contiguous, Documents, DocumentZigzag, Full, Striped, Window, Zigzag
from ringspun.core.reference import attention, attention_with_gradients
from ringspun.errors import DtypeError, KernelRefused, LayoutError, PlanError, ShapeError
from ringspun.jax import Alibi, Kernel, Xla, positions, ring_attention, shard, sharded_attention, unshard
from ringspun.testing.jax import ring_mesh

TOKENS = PartitionSpec(None, "ring")
SHAPES = {"q": (2, 24, 4, 8), "k": (2, 24, 2, 8), "v": (2, 24, 2, 6)}


def arrays(seed=0, **shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape)) for shape in {**SHAPES, **shapes}.values()]


def dense(q, k, v, allowed, **terms):
    return np.swapaxes(attention(*(np.swapaxes(x, 1, 2) for x in (q, k, v)), allowed=allowed, **terms)[0], 1, 2)


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-12)


def test_public_names_are_pinned():
    names = ["Alibi", "Kernel", "Xla", "positions", "ring_attention", "shard", "sharded_attention", "unshard"]
    assert list(ringspun.jax.__all__) == names


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mesh_of_batch_and_ring_with_its_gradients(kind):
    """One jitted step over data x ring, from global arrays in the sequence's order and back, sums of squares as a loss;
    gradients of what is the same everywhere are the whole ones."""
    mesh = jax.make_mesh((2, 3), ("data", "ring"), axis_types=(kind, kind), devices=jax.devices()[:6])
    spec, layout = PartitionSpec("data", "ring"), Zigzag()
    q, k, v = arrays()
    sinks, allowed = jnp.arange(4.0), Causal().as_array(22)
    q, k, v = q[:, :22], k[:, :22], v[:, :22]
    place = partial(shard, mesh=mesh, spec=spec, layout=layout)
    held = [place(np.asarray(x)) for x in (q, k, v)]
    assert held[0].shape == (2, 24, 4, 8)

    @jax.jit
    def step(q, k, v, sinks):
        def loss(q, k, v, sinks):
            out = sharded_attention(
                q, k, v, mesh=mesh, spec=spec, layout=layout, seq_len=22, sinks=sinks, kernel=Xla(4)
            )
            return 0.5 * (out**2).sum(), out

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, sinks)

    (_, out), grads = step(*held, sinks)
    heads = [np.swapaxes(x, 1, 2) for x in (q, k, v)]
    plain = attention(*heads, allowed=allowed, sinks=sinks)[0]
    ref = attention_with_gradients(*heads, plain, allowed=allowed, sinks=sinks)
    back = partial(unshard, mesh=mesh, spec=spec, layout=layout, seq_len=22)
    for found, expected in zip((out, *grads[:3]), (ref.out, ref.dq, ref.dk, ref.dv), strict=True):
        close(np.swapaxes(back(found), 1, 2), expected)
    close(grads[3], ref.dsinks)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT, AUTO), (AUTO, AUTO, EXPLICIT)], ids=str)
def test_exactly_S_rows_come_back(kinds):
    """23 tokens on 4 devices, filled up inside; a ring along two axes, heads cut along a third. Axes of all kinds."""
    q, k, v = (x[:, :23] for x in arrays())
    mesh = jax.make_mesh((2, 2, 2), ("far", "near", "model"), axis_types=kinds)
    spec = PartitionSpec(None, ("far", "near"), "model")
    out, lse = jax.jit(partial(sharded_attention, mesh=mesh, spec=spec, return_lse=True))(q, k, v)
    assert out.shape == (2, 23, 4, 6) and lse.shape == (2, 23, 4) and lse.dtype == jnp.float64
    close(out, dense(q, k, v, Causal().as_array(23)))


def test_segment_ids_travel_with_the_block():
    """Documents per batch row, known on devices only; padding holds NaN. With their gradients."""
    ids = jnp.asarray([[0] * 9 + [3] * 2 + [1] * 13, [5] * 20 + [-1] * 4])
    q, k, v = (jnp.where((ids >= 0)[..., None, None], x, jnp.nan) for x in arrays())
    (dout,) = (jnp.where((ids >= 0)[..., None, None], x, jnp.nan) for x in arrays(1, q=(2, 24, 4, 6))[:1])

    def on_ranks(q, k, v, ids, dout):
        out, pull = jax.vjp(lambda *x: ring_attention(*x, axis_name="ring", segment_ids=ids, kernel=Xla(4)), q, k, v)
        return out, *pull(dout)

    found = jax.jit(jax.shard_map(on_ranks, mesh=ring_mesh(4), in_specs=TOKENS, out_specs=TOKENS))(q, k, v, ids, dout)
    allowed = np.asarray((ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, None]) & Causal().as_array(24)
    zeros = [np.swapaxes(np.nan_to_num(x), 1, 2) for x in (q, k, v, dout)]
    ref = attention_with_gradients(*zeros, allowed=allowed[:, None])
    for x, expected in zip(found, (ref.out, ref.dq, ref.dk, ref.dv), strict=True):
        close(np.swapaxes(x, 1, 2), expected)


@pytest.mark.parametrize(("dtype", "ids"), [("int64", (2**32, 0)), ("uint32", (2**31 + 5, 5))])
def test_segment_ids_are_told_apart_in_their_own_dtype(dtype, ids):
    """Whole hashes may be ids; no cast makes two of them one, or negative. 23 tokens are filled up."""
    q, k, v = (x[:, :23] for x in arrays())
    found = jnp.asarray([[ids[0]] * 11 + [ids[1]] * 12] * 2, dtype)
    out = sharded_attention(q, k, v, mesh=ring_mesh(2), spec=TOKENS, segment_ids=found)
    close(out, dense(q, k, v, (Causal() & Documents([11, 12])).as_array(23)))


def test_G13_a_gradient_inside_of_shard_map():
    """A weight that every rank has, a loss summed over ranks: each rank gets the whole gradient, once."""
    mesh, (q, k, v) = ring_mesh(2), arrays()

    def plain(w, d):
        return jax.grad(lambda w: lax.psum((w**2 + 1) * d[0], "ring"))(w)[None]

    spec = PartitionSpec("ring")
    both = jax.shard_map(plain, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec)(
        1.0, jnp.asarray([0.0, 1.0])
    )
    assert both.tolist() == [2.0, 2.0]

    def of_ring(w, q, k, v):
        def loss(w):
            sinks = w * jnp.arange(4.0)  # the same on every rank, all the way into the ring
            return lax.psum((ring_attention(w * q, k, v, axis_name="ring", sinks=sinks) ** 2).sum(), "ring")

        return jax.grad(loss)(w)[None]

    specs = (PartitionSpec(), TOKENS, TOKENS, TOKENS)
    found = jax.jit(jax.shard_map(of_ring, mesh=mesh, in_specs=specs, out_specs=spec))(jnp.float64(0.5), q, k, v)
    half = 1e-5
    ends = [
        (dense(w * q, k, v, Causal().as_array(24), sinks=w * np.arange(4.0)) ** 2).sum()
        for w in (0.5 + half, 0.5 - half)
    ]
    assert found.tolist() == pytest.approx([(ends[0] - ends[1]) / (2 * half)] * 2, rel=1e-8)


def test_vmap_checkpoint_and_no_check_of_what_varies():
    mesh, (q, k, v) = ring_mesh(4), arrays()

    def loss(q, k, v):
        one = jax.checkpoint(lambda *x: ring_attention(*(y[None] for y in x), axis_name="ring", mask=Window(5))[0])
        out = jax.vmap(one)(q, k, v)
        return out, jax.grad(lambda q: (jax.vmap(one)(q, k, v) ** 2).sum() / 2)(q)

    specs = {"in_specs": TOKENS, "out_specs": TOKENS, "check_vma": False}
    out, dq = jax.jit(jax.shard_map(loss, mesh=mesh, **specs))(q, k, v)
    heads = [np.swapaxes(x, 1, 2) for x in (q, k, v)]
    allowed = Window(5).as_array(24)
    ref = attention_with_gradients(*heads, attention(*heads, allowed=allowed)[0], allowed=allowed)
    close(np.swapaxes(out, 1, 2), ref.out)
    close(np.swapaxes(dq, 1, 2), ref.dq)


def test_one_device_needs_no_mesh_and_pmap_is_a_ring_too():
    q, k, v = arrays()
    expected = dense(q, k, v, Full().as_array(24))
    close(ring_attention(q, k, v, axis_name=None, mask=Full()), expected)
    cut = [jnp.stack(jnp.split(x, 2, axis=1)) for x in (q, k, v)]
    out = jax.pmap(partial(ring_attention, axis_name="ring", mask=Full()), axis_name="ring", devices=jax.devices()[:2])(
        *cut
    )
    close(jnp.concatenate(list(out), axis=1), expected)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
def test_shard_and_unshard_are_inverse(layout):
    """Of host arrays and device arrays, along any dim, with their positions."""
    mesh, x = ring_mesh(4), np.arange(13 * 3).reshape(13, 3)
    spec = PartitionSpec("ring")
    for whole in (x, jnp.asarray(x)):
        held = shard(whole, mesh=mesh, spec=spec, layout=layout, dim=0, fill=-7)
        place = positions(ring_size=4, seq_len=13, layout=layout)
        assert held.shape == (16, 3) and held.sharding.spec == spec
        np.testing.assert_array_equal(held, np.where(place[:, None] < 0, -7, x[place]))
        np.testing.assert_array_equal(unshard(held, mesh=mesh, spec=spec, layout=layout, seq_len=13, dim=0), x)
    assert positions(ring_size=2, seq_len=8, layout=Zigzag()).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    restarted = positions(ring_size=2, seq_len=6, documents=Documents([2, 3]), restart=True)
    assert restarted.tolist() == [0, 1, 0, 1, 2, 0]


def test_rows_of_explicitly_cut_arrays_change_places():
    """jax takes no rows of an array that its type says is cut along them."""
    mesh, x = ring_mesh(4, EXPLICIT), jnp.arange(26.0).reshape(1, 26)[:, :24]
    held = {"mesh": mesh, "spec": TOKENS, "layout": Zigzag()}
    with jax.set_mesh(mesh):
        cut = jax.device_put(x, jax.sharding.NamedSharding(mesh, TOKENS))
        for back in (unshard(shard(cut, **held), seq_len=24, **held), jax.jit(lambda x: shard(x, **held))(cut)):
            assert sorted(np.asarray(back)[0].tolist()) == list(range(24))


def test_a_second_call_without_jit_compiles_nothing(caplog):
    q, k, v = arrays(q=(1, 4, 1, 2), k=(1, 4, 1, 2), v=(1, 4, 1, 2))
    calls = (
        lambda: sharded_attention(q, k, v, mesh=ring_mesh(2), spec=TOKENS),
        lambda: ring_attention(q, k, v, axis_name=None),
    )
    for call in calls:
        compiled = []
        with jax.log_compiles(), caplog.at_level("WARNING"):
            for _ in range(2):
                caplog.clear()
                call()
                compiled.append(caplog.text.count("Finished XLA compilation"))
        assert compiled[0] > 0 and compiled[1] == 0


def test_nothing_to_attend():
    """No tokens, no batch rows, no keys."""
    q, k, v = arrays()
    assert ring_attention(q[:, :0], k[:, :0], v[:, :0], axis_name=None).shape == (2, 0, 4, 6)
    assert ring_attention(q[:0], k[:0], v[:0], axis_name=None).shape == (0, 24, 4, 6)
    assert not ring_attention(q, k[:, :0], v[:, :0], axis_name=None, key_len=0).any()


def test_an_axis_of_vmap_is_a_ring_too():
    """Ranks side by side on one device; what they share gets the sum of their gradients."""
    q, k, v = arrays()
    sinks, allowed = jnp.arange(4.0), Causal().as_array(24)

    def loss(sinks):
        cut = [jnp.stack(jnp.split(x, 3, axis=1)) for x in (q, k, v)]
        out = jax.vmap(partial(ring_attention, axis_name="ring", sinks=sinks), axis_name="ring")(*cut)
        return (out**2).sum() / 2, jnp.concatenate(list(out), axis=1)

    (_, out), dsinks = jax.jit(jax.value_and_grad(loss, has_aux=True))(sinks)
    heads = [np.swapaxes(x, 1, 2) for x in (q, k, v)]
    plain = attention(*heads, allowed=allowed, sinks=sinks)[0]
    close(np.swapaxes(out, 1, 2), plain)
    close(dsinks, attention_with_gradients(*heads, plain, allowed=allowed, sinks=sinks).dsinks)


@pytest.mark.usefixtures("compiled_in_haste")
def test_second_derivatives():
    """Forward over reverse is exact; reverse over reverse jax refuses."""
    q, k, v, along = (x[:1, :5, :2] for x in (*arrays(), arrays(1)[0]))

    def plain(q):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
        weights = jax.nn.softmax(jnp.where(Causal().as_array(5), scores, -jnp.inf))
        return (jnp.einsum("bhqk,bkhd->bqhd", weights, v) ** 2).sum()

    def loss(q):
        return (ring_attention(q, k, v, axis_name=None, kernel=Xla(2)) ** 2).sum()

    found, expected = (jax.jit(lambda q, t, f=f: jax.jvp(jax.grad(f), (q,), (t,))[1])(q, along) for f in (loss, plain))
    close(found, expected)
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(q)


class Proud(Kernel):
    name = "proud"

    def refuses(self, call):
        return f"head_size must be 128; got {call.head_size}"

    forward = backward = None


@pytest.mark.parametrize(
    ("error", "words", "changed"),
    [
        (PlanError, "axis_name must be an axis of the jax.shard_map around", {"axis_name": "ring"}),
        (PlanError, "axis_name must be the name", {"axis_name": 3}),
        (PlanError, "mask must be a Mask", {"mask": jnp.ones((24, 24), bool)}),
        (PlanError, "segment_ids=", {"mask": [Causal(), Full()]}),
        (ShapeError, r"q must be \[B, T, H, D\]", {"q": jnp.ones((24, 4, 8))}),
        (ShapeError, "multiple of key heads", {"q": jnp.ones((2, 24, 3, 8))}),
        (ShapeError, "q must hold 20 rows on each of 1 ranks", {"seq_len": 20}),
        (ShapeError, "k and v must hold 24 rows", {"k": jnp.ones((2, 9, 2, 8)), "v": jnp.ones((2, 9, 2, 6))}),
        (DtypeError, "q must be a jax array", {"q": np.ones((2, 24, 4, 8))}),
        (DtypeError, "one dtype", {"q": jnp.ones((2, 24, 4, 8), jnp.float32)}),
        (DtypeError, "q must be float64", {"q": jnp.ones((2, 24, 4, 8), jnp.int32)}),
        (DtypeError, "bias must be Alibi", {"bias": jnp.ones((4, 24, 24))}),
        (ShapeError, "slopes must be", {"bias": Alibi(jnp.ones(3))}),
        (ShapeError, "sinks must be", {"sinks": jnp.ones((1, 4))}),
        (ShapeError, "segment_ids must be", {"segment_ids": jnp.ones((2, 23), int)}),
        (DtypeError, "segment_ids must be", {"segment_ids": jnp.ones((2, 24))}),
        (
            DtypeError,
            "key_segment_ids must be int64",
            {"segment_ids": jnp.ones((2, 24), int), "key_segment_ids": jnp.ones((2, 24), jnp.int32)},
        ),
        (PlanError, "key_segment_ids must come with", {"key_segment_ids": jnp.ones((2, 24), int)}),
        (PlanError, "softcap must be", {"softcap": 0}),
        (PlanError, "scale must be", {"scale": float("nan")}),
        (KernelRefused, "proud: head_size must be 128; got 8", {"kernel": Proud()}),
        (KernelRefused, "kernel must be a Kernel.*got 'xla'", {"kernel": "xla"}),
        (KernelRefused, "kernel must be a Kernel", {"kernel": Xla}),
        (TypeError, "is_causal must not be given.*mask=Causal", {"is_causal": True}),
        (TypeError, "did you mean softcap", {"soft_cap": 1.0}),
    ],
    ids=lambda x: str(x)[:24] if isinstance(x, str) else "",
)
def test_what_it_cannot_it_refuses(error, words, changed):
    q, k, v = arrays()
    given = {"q": q, "k": k, "v": v, "axis_name": None, **changed}
    with pytest.raises(error, match=words):
        ring_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_refusals_of_shards():
    q, k, v = arrays()
    mesh = ring_mesh(4)
    with pytest.raises(PlanError, match="spec must name the ring's axis"):
        sharded_attention(q, k, v, mesh=mesh, spec=PartitionSpec(None, None))
    with pytest.raises(PlanError, match="spec must leave the size of heads whole"):
        sharded_attention(q, k, v, mesh=mesh, spec=PartitionSpec(None, "ring", None, "ring"))
    with pytest.raises(PlanError, match="mesh must be a jax"):
        sharded_attention(q, k, v, mesh=None, spec=TOKENS)
    with pytest.raises(ShapeError, match=r"k must have heads that the 4 devices of 'ring' divide.*repeat"):
        sharded_attention(q, k, v, mesh=jax.make_mesh((1, 4), ("one", "ring")), spec=PartitionSpec(None, "one", "ring"))
    with pytest.raises(ShapeError, match="q must have a batch that the 4 devices of 'ring' divide"):
        sharded_attention(q, k, v, mesh=jax.make_mesh((1, 4), ("one", "ring")), spec=PartitionSpec("ring", "one"))
    ids = np.zeros((2, 24), int)
    with pytest.raises(DtypeError, match="segment_ids must be a jax array of integers"):
        sharded_attention(q, k, v, mesh=mesh, spec=TOKENS, segment_ids=ids)
    with pytest.raises(ShapeError, match=r"segment_ids must be \[B, T\], one per token; got \(24,\)"):
        sharded_attention(q, k, v, mesh=mesh, spec=TOKENS, segment_ids=jnp.asarray(ids[0]))
    with pytest.raises(PlanError, match="key_segment_ids must be left out"):
        sharded_attention(
            q, k, v, mesh=mesh, spec=TOKENS, segment_ids=jnp.asarray(ids), key_segment_ids=jnp.asarray(ids)
        )
    with pytest.raises(PlanError, match="axis_name must be left out of sharded_attention"):
        sharded_attention(q, k, v, mesh=mesh, spec=TOKENS, axis_name="model")
    with pytest.raises(DtypeError, match="x must be a jax array, as shard makes it"):
        unshard(np.zeros((2, 24)), mesh=mesh, spec=TOKENS, seq_len=24)
    for make in (partial(shard, q, mesh=mesh, spec=TOKENS), partial(positions, ring_size=4, seq_len=24)):
        with pytest.raises(LayoutError, match=r"documents must be given to documentzigzag.*or Documents\(\[24\]\)"):
            make(layout=DocumentZigzag())
    with pytest.raises(ShapeError, match="dim must be one of x's"):
        shard(q, mesh=mesh, spec=TOKENS, dim=-3)
    with pytest.raises(ShapeError, match="q must have 28 rows, or 25 in the order of ranks"):
        sharded_attention(q, k, v, mesh=mesh, spec=TOKENS, seq_len=25)
    with pytest.raises(ShapeError, match="x must have 28 rows"):
        unshard(q, mesh=mesh, spec=TOKENS, seq_len=25)
    with pytest.raises(PlanError, match="restart must come with documents"):
        positions(ring_size=2, seq_len=4, restart=True)
    with pytest.raises(ShapeError, match="block_size must be"):
        Xla(0)
