"""Blocks of tokens: the same numbers and gradients as without, and nothing of all tokens alive on the way."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringspun import Causal, Zigzag
from ringspun.errors import NotDifferentiable, ShapeError, UnsupportedByRing
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.memory import peak_memory
from ringspun.train.memory.blockwise import blockwise
from ringspun.train.memory.blockwise_layer import BlockwiseTransformerLayer
from ringspun.train.rope import Default
from ringspun.train.rope.rotary import cos_sin

D = torch.float64


def feed_forward(width: int = 3, inner: int = 7, dropout: float = 0.0, dtype: torch.dtype = D) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, width), nn.LayerNorm(width)
    ).to(dtype)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D).to(dtype)


def results(run: Any, leaves: list[Tensor], *, seed: int = 5) -> list[Tensor]:
    """Results, and gradients for random upstream ones."""
    outs = run()
    outs = [outs] if isinstance(outs, Tensor) else list(outs)
    ends = [out for out in outs if out.requires_grad]
    upstream = [random(*out.shape, seed=seed + i, dtype=out.dtype) for i, out in enumerate(ends)]
    found = torch.autograd.grad(ends, leaves, upstream, allow_unused=True, retain_graph=True)
    return [*outs, *(torch.zeros(()) if g is None else g for g in found)]


def same(found: list[Tensor], expected: list[Tensor], bound: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 11),
    block_size=st.integers(1, 13),
    rows=st.integers(1, 2),
    dim=st.sampled_from([0, 1, -2]),
    needs=st.booleans(),
)
def test_blocks_change_nothing(tokens: int, block_size: int, rows: int, dim: int, needs: bool) -> None:
    """Two inputs, three results of which one has no gradient, a closure over parameters and over a computed tensor."""
    module, leaf = feed_forward(), random(3, seed=3).requires_grad_()
    computed = leaf * leaf
    shape = (tokens, rows, 3) if dim == 0 else (rows, tokens, 3)
    x, y = random(*shape, seed=1).requires_grad_(needs), random(*shape, seed=2)

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a + module(a) * computed + b, (a * leaf).sum(-1), b.argmax(-1)

    leaves = [*module.parameters(), leaf, *([x] if needs else [])]
    found = results(lambda: blockwise(fn, (x, y), block_size, dim=dim), leaves)
    same(found, results(lambda: fn(x, y), leaves))
    assert [out.requires_grad for out in blockwise(fn, (x, y), block_size, dim=dim)] == [True, True, False]


@pytest.mark.parametrize("blocks", [(3, 2), (7, 7), (3, 2, 5)])
def test_calls_inside_of_calls_change_nothing(blocks: tuple[int, ...]) -> None:
    """What the inner function takes from outside of both, and from the outer one, has its gradient."""
    module, leaf, x = feed_forward(), random(3, seed=3).requires_grad_(), random(2, 7, 3, seed=1).requires_grad_()
    computed = leaf * leaf

    def nested(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        scale = computed + (leaf if len(sizes) % 2 else 1)
        if not sizes:
            return module(x) * computed
        return blockwise(lambda y: nested(y, sizes[1:]) * scale + y, x, sizes[0])

    def plain(x: Tensor, depth: int) -> Tensor:
        scale = computed + (leaf if depth % 2 else 1)
        return plain(x, depth - 1) * scale + x if depth else module(x) * computed

    leaves = [*module.parameters(), leaf, x]
    same(results(lambda: nested(x, blocks), leaves), results(lambda: plain(x, len(blocks)), leaves))


def test_gradients_are_those_of_finite_differences() -> None:
    module = feed_forward()
    assert torch.autograd.gradcheck(lambda x: blockwise(module, x, 2), (random(2, 5, 3).requires_grad_(),))


def test_an_expert_that_the_first_block_does_not_use_has_its_gradient() -> None:
    experts = nn.ModuleList(feed_forward(inner=n) for n in (5, 7))
    x = random(1, 8, 3)
    x[..., 0] = torch.tensor([1.0] * 6 + [-1.0] * 2)

    def route(a: Tensor) -> Tensor:
        out = torch.zeros_like(a)
        for chosen, expert in zip((a[..., 0] > 0, a[..., 0] <= 0), experts, strict=True):
            if chosen.any():
                out = out.masked_scatter(chosen[..., None], expert(a[chosen]))
        return out

    leaves = [x.requires_grad_(), *experts.parameters()]
    same(results(lambda: blockwise(route, x, 3), leaves), results(lambda: route(x), leaves))


def test_without_gradients_nothing_is_kept_and_a_frozen_function_passes_them_on() -> None:
    module, x = feed_forward().requires_grad_(False), random(1, 9, 3)
    assert not blockwise(module, x, 4).requires_grad
    with torch.no_grad():
        torch.testing.assert_close(blockwise(feed_forward(), x, 4), module(x))
    x.requires_grad_()
    same(results(lambda: blockwise(module, x, 4), [x]), results(lambda: module(x), [x]))


def test_dropout_draws_the_same_numbers_again_and_leaves_the_generator_as_forward_did() -> None:
    module, x = feed_forward(dropout=0.5), random(1, 10, 3).requires_grad_()
    outs = {}
    for seed in (1, 2):
        torch.manual_seed(seed)
        out = blockwise(module, x, 4)
        before = torch.get_rng_state()
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(seed)
        expected = torch.cat([module(piece) for piece in x.split(4, dim=1)], dim=1)
        same([out, grad], [expected, *torch.autograd.grad(expected.sum(), x)])
        outs[seed] = out
    assert not torch.equal(outs[1], outs[2])


@pytest.mark.parametrize("cached", [False, True])
def test_autocast_is_that_of_forward_also_where_a_weight_was_cast_before(cached: bool) -> None:
    module, x = feed_forward(dtype=torch.float32), random(2, 9, 3, dtype=torch.float32).requires_grad_()
    leaves = [x, *module.parameters()]

    def run(blocks: int) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            before = module(x).sum() if cached else 0.0
            out = (blockwise(module, x, blocks) if blocks else module(x)) + before
        return [out.detach(), *torch.autograd.grad(out, leaves, random(*out.shape, dtype=out.dtype))]

    for a, b in zip(run(4), run(0), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


def test_gradients_of_bfloat16_weights_are_summed_in_float32() -> None:
    """64 blocks: no farther from float64 than twice what one block is."""
    module, x = nn.Linear(8, 8, bias=False).bfloat16(), random(1, 1024, 8, dtype=torch.bfloat16)
    upstream = random(1, 1024, 8, seed=4, dtype=torch.bfloat16)
    exact = upstream[0].double().T @ x[0].double()
    worst = {}
    for size in (16, 1024):
        module.zero_grad()
        blockwise(module, x, size).backward(upstream)
        worst[size] = float((module.weight.grad.double() - exact).abs().max() / exact.abs().max())
    assert worst[16] <= 2 * worst[1024], worst


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    module, x = feed_forward(dropout=0.3), random(1, 9, 3).requires_grad_()
    leaves = [x, *module.parameters()]

    def run(outer: bool) -> list[Tensor]:
        torch.manual_seed(0)
        inner = lambda a: blockwise(module, a * 2, 4) * 3  # noqa: E731
        out = checkpoint(inner, x, use_reentrant=reentrant) if outer else inner(x)
        module.zero_grad()
        x.grad = None
        out.backward(random(1, 9, 3, seed=2))
        return [out, *(leaf.grad.clone() for leaf in leaves)]

    same(run(True), run(False))


def test_two_backwards_of_a_kept_graph_are_alike_and_second_derivatives_are_refused() -> None:
    x = random(1, 9, 3).requires_grad_()
    out = blockwise(feed_forward(), x, 4).square().sum()
    one, two = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, two)
    with pytest.raises(NotDifferentiable, match="second derivatives of blockwise"):
        torch.autograd.grad(out, x, create_graph=True)


def test_compiled_models_have_a_break_and_are_right() -> None:
    module, x = feed_forward(), random(1, 9, 3).requires_grad_()
    run = torch.compile(lambda a: blockwise(module, a * 2, 4) + 1, backend="aot_eager")
    leaves = [x, *module.parameters()]
    same(results(lambda: run(x), leaves), results(lambda: module(x * 2) + 1, leaves))


@pytest.mark.parametrize("fn", [lambda a: a[:, :1], lambda a: a.sum(), lambda a: None])
def test_functions_that_give_other_rows_are_refused(fn: Any) -> None:
    with pytest.raises((ShapeError, TypeError), match=r"fn must give 2 rows along dim 1|NoneType"):
        blockwise(fn, random(1, 4, 3), 2)


@pytest.mark.parametrize("grad", [False, True])
def test_a_function_that_changes_its_input_in_place_is_refused(grad: bool) -> None:
    """Backward would compute it again from the changed input: weights' gradients of another x, without an error."""
    module = feed_forward()
    with torch.set_grad_enabled(grad), pytest.raises(UnsupportedByRing, match="fn must leave its inputs as they are"):
        blockwise(lambda x: module(x.mul_(2)), random(1, 6, 3), 4)
    with torch.inference_mode():
        assert blockwise(module, random(1, 6, 3), 4).shape == (1, 6, 3)


def test_blocks_and_inputs_that_do_not_fit_are_refused() -> None:
    for size in (0, -1, True, 2.0):
        with pytest.raises(ShapeError, match="block_size must be a number of tokens"):
            blockwise(feed_forward(), random(1, 4, 3), size)
    with pytest.raises(ShapeError, match="the same number of tokens"):
        blockwise(torch.add, (random(1, 4, 3), random(1, 5, 3)), 2)
    with pytest.raises(ShapeError, match="must have a dimension 3"):
        blockwise(feed_forward(), random(1, 4, 3), 2, dim=3)


def step_bytes(tokens: int, block_size: int) -> int:
    """Peak of forward and backward of a feed-forward layer 8 times as wide as its input, above the input's own size."""
    module = feed_forward(16, 128, dtype=torch.float32)
    x = random(1, tokens, 16, dtype=torch.float32).requires_grad_()
    with peak_memory() as peak:
        out = blockwise(module, x, block_size) if block_size else module(x)
        out.backward(torch.ones_like(out))
    return peak.bytes


def test_memory_of_the_inner_width_is_flat_in_tokens() -> None:
    """Result, upstream and input gradient are 3 T x C; of T x F nothing is left."""
    short, long = step_bytes(512, 64), step_bytes(4096, 64)
    assert long - short <= 1.05 * 3 * 3584 * 16 * 4
    assert step_bytes(4096, 0) > 4 * long


def test_graphs_of_blocks_are_gone_after_forward() -> None:
    module, x = feed_forward(dtype=torch.float32), random(1, 64, 3, dtype=torch.float32).requires_grad_()
    gc.collect()
    gc.disable()
    try:
        with peak_memory() as peak:
            outs = [blockwise(lambda a: module(a).exp().softmax(-1), x, 8) for _ in range(20)]
        held = 20 * (outs[0].nbytes + torch.get_rng_state().nbytes)
    finally:
        gc.enable()
    assert peak.bytes < held + 16 * 64 * 7 * 4


class PlainLayer(nn.Module):
    """The same layer without blocks, with PyTorch's attention; written by itself."""

    def __init__(self, layer: BlockwiseTransformerLayer) -> None:
        super().__init__()
        self.of = layer

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        o, pre = self.of, self.of.pre_norm
        y = o.attention_norm(x) if pre else x
        q, k, v = (p(y).unflatten(-1, (-1, o.head_size)).transpose(1, 2) for p in (o.q, o.k, o.v))
        cos, sin = (torch.cat([c, c], dim=-1) for c in rotation)
        q, k = (z * cos + torch.cat([-z.chunk(2, -1)[1], z.chunk(2, -1)[0]], -1) * sin for z in (q, k))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + o.o(a.transpose(1, 2).flatten(-2))
        if pre:
            return x + o.feed_forward(o.feed_forward_norm(x))
        x = o.attention_norm(x)
        return o.feed_forward_norm(x + o.feed_forward(x))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_layer_is_the_plain_layer_alone_and_on_a_ring(norm: Any, size: int) -> None:
    torch.manual_seed(0)
    layer = BlockwiseTransformerLayer(16, 4, kv_heads=2, norm=norm, block_size=3).to(D)
    x = random(2, 14, 16).requires_grad_()
    rope, positions = Default(theta=100.0), torch.arange(14)
    leaves = [x, *layer.parameters()]
    rotation = cos_sin(positions, rope, head_size=4, dtype=D)
    expected = results(lambda: PlainLayer(layer)(x, rotation), leaves)
    if size == 0:
        same(results(lambda: layer(x, rotation=rotation), leaves), expected, 1e-10)
        return
    part = ContextParallel(Loopback(size), layout=Zigzag()).partition(14)
    plan = part.plan(Causal())
    turned = cos_sin(part.positions(), rope, head_size=4, dtype=D)

    def on_ring() -> Tensor:
        return part.gather(layer(part.shard(x, dim=1), attention=plan.attention, rotation=turned), dim=1)

    same(results(on_ring, leaves), expected, 1e-10)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ShapeError, match="heads must be a multiple of kv_heads"):
        BlockwiseTransformerLayer(16, 4, kv_heads=3)
    with pytest.raises(ShapeError, match="norm must be"):
        BlockwiseTransformerLayer(16, 4, norm="none")  # type: ignore[arg-type]
