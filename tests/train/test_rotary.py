"""Rotations of tensors: angles right far out, positions whole, ranks agreed. Cases P2, P4, P6 and P8 by id."""

from __future__ import annotations

from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ringspun import Causal, Contiguous, Documents, DocumentZigzag, Layout, Striped, Zigzag
from ringspun.errors import DtypeError, ShapeError
from ringspun.torch import ContextParallel, Loopback, Partition
from ringspun.train.rope import Default, Dynamic, LongRope, Rope
from ringspun.train.rope.rotary import cos_sin, rotate

LAYOUTS = [Contiguous(), Zigzag(), Striped()]
DYNAMIC = Dynamic(factor=4.0, original_max_position_embeddings=4096)
LONGROPE = LongRope(short_factor=(1.0,) * 8, long_factor=(4.0,) * 8, factor=4.0, original_max_position_embeddings=4096)


def ring(seq_len: int, size: int, layout: Layout | None = None, documents: Documents | None = None) -> Partition:
    return ContextParallel(Loopback(size, seed=0), layout=layout or Zigzag()).partition(seq_len, documents=documents)


def of_ranks(part: Partition, x: Tensor) -> list[list[int]]:
    return [x[..., rows].flatten().tolist() for rows in part.slices]


def phase_error(cos: Tensor, sin: Tensor, position: int, theta: float, dims: int) -> float:
    """Largest distance of an angle from the true one (50 digits), radians; cos and sin ``[dims / 2]``."""
    worst = 0.0
    with mpmath.workdps(50):
        for i, (c, s) in enumerate(zip(cos.double().tolist(), sin.double().tolist(), strict=True)):
            angle = position * mpmath.mpf(theta) ** (mpmath.mpf(-2 * i) / dims)
            off = mpmath.atan2(s, c) - angle
            worst = max(worst, float(abs(off - 2 * mpmath.pi * mpmath.nint(off / (2 * mpmath.pi)))))
    return worst


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6, 5e7])
@pytest.mark.parametrize("position", [131_071, 1_048_575, 2**31 - 1])
def test_P8_angles_far_out(position: int, theta: float) -> None:
    """The case asks for 0.01 rad at 131,071 and 0.07 at 1,048,575."""
    both = cos_sin(torch.tensor([position]), Default(theta=theta), head_size=128)
    assert phase_error(*(x[0] for x in both), position, theta, 128) < 1e-6
    exact = cos_sin(torch.tensor([position]), Default(theta=theta), head_size=128, dtype=torch.float64)
    assert phase_error(*(x[0] for x in exact), position, theta, 128) < 1e-6 * max(position, 1 << 20) / 2**31


def test_P8_neighbours_do_not_collide_in_bfloat16() -> None:
    """Positions 255..260 each turn by one radian more; only the result is rounded."""
    positions = torch.arange(255, 261)
    cos, sin = cos_sin(positions, Default(), head_size=64, dtype=torch.bfloat16)
    right = positions.double()
    assert cos.dtype == sin.dtype == torch.bfloat16
    torch.testing.assert_close(cos[:, 0].double(), right.cos(), rtol=0, atol=2**-9)
    torch.testing.assert_close(sin[:, 0].double(), right.sin(), rtol=0, atol=2**-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool])
def test_P8_positions_are_whole_numbers(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=r"positions must be integers; got torch\."):
        cos_sin(torch.arange(4).to(dtype), Default(), head_size=8)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_P8_positions_stay_whole_through_sharding(kind: torch.dtype) -> None:
    part = ring(2**20 + 3, 3)
    assert part.positions().dtype == torch.int64
    batch = {"input_ids": torch.zeros(1, part.seq_len, dtype=kind), "position_ids": torch.arange(part.seq_len)[None]}
    local = part.shard_batch(batch | {"position_ids": batch["position_ids"].to(kind)})
    assert local["position_ids"].dtype == kind and local["position_ids"][0].tolist() == part.positions().tolist()


DOCUMENTS = Documents.from_cu_seqlens([0, 4, 8])


def test_P2_later_documents_have_positions_of_their_own() -> None:
    """Restarting, or running through the pack; both from rows 0, 3, 4, 7 of rank 0."""
    part = ring(8, 2, DocumentZigzag(), DOCUMENTS)
    assert of_ranks(part, part.shard(torch.arange(8), dim=0)) == [[0, 3, 4, 7], [1, 2, 5, 6]]
    assert of_ranks(part, part.positions(restart=True)) == [[0, 3, 0, 3], [1, 2, 1, 2]]
    assert of_ranks(part, part.positions()) == [[0, 3, 4, 7], [1, 2, 5, 6]]
    ids = torch.arange(8)[None]
    assert of_ranks(part, part.shard_batch({"input_ids": ids})["position_ids"]) == [[0, 3, 0, 3], [1, 2, 1, 2]]
    given = part.shard_batch({"input_ids": ids, "position_ids": ids})["position_ids"]  # running: bring your own
    assert of_ranks(part, given) == [[0, 3, 4, 7], [1, 2, 5, 6]]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("layout", [*LAYOUTS, DocumentZigzag()], ids=str)
def test_P2_a_packed_ring_attends_as_one_process(layout: Layout, restart: bool) -> None:
    """Rotated and attended over documents on 3 ranks and on one; both ways of counting give the same scores."""
    documents = Documents([5, 9, 7])
    x = torch.randn(3, 1, 2, 21, 16, generator=torch.manual_seed(0), dtype=torch.float64)

    def attended(part: Partition) -> Tensor:
        positions = part.positions(restart=restart)
        turns = cos_sin(positions, Default(), head_size=16, dtype=torch.float64)
        q, k, v = (part.shard(one, dim=2) for one in x)
        out = part.plan(Causal() & documents).attention(rotate(q, *turns), rotate(k, *turns), v)
        return part.gather(out, dim=2)

    one, many = attended(ring(21, 1, Contiguous(), documents)), attended(ring(21, 3, layout, documents))
    torch.testing.assert_close(many, one, rtol=1e-12, atol=1e-12)
    alone = ring(21, 1, Contiguous(), documents)
    torch.testing.assert_close(attended(alone)[:, :, :5], attended(ring(21, 2, layout, documents))[:, :, :5])


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
@pytest.mark.parametrize(
    ("layout", "own"), [(Contiguous(), [2048, 4096, 6144, 8192]), (Zigzag(), [8192, 7168, 6144, 5120])], ids=str
)
def test_P6_every_rank_uses_the_length_of_the_sequence(layout: Layout, own: list[int], rope: Rope) -> None:
    """Their own positions would tell them four lengths."""
    part, one = ring(8192, 4, layout), ring(8192, 1)
    positions = part.positions()
    assert [int(positions[rows].max()) + 1 for rows in part.slices] == own
    assert part.position_count() == one.position_count() == 8192
    found = [cos_sin(positions[rows], rope, head_size=16, seq_len=part.position_count())[0] for rows in part.slices]
    whole = cos_sin(one.positions(), rope, head_size=16, seq_len=one.position_count())[0]
    assert torch.equal(part.gather(torch.cat(found), dim=0), whole)
    assert not torch.equal(whole, cos_sin(one.positions(), rope, head_size=16, seq_len=4096)[0])


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=6), padding=st.integers(0, 3), size=st.integers(1, 5), which=st.data()
)
def test_P6_packed_documents_are_decided_by_the_longest(
    lengths: list[int], padding: int, size: int, which: Any
) -> None:
    """The largest position of the whole sequence plus one, restarting or running, whatever a rank holds."""
    seq_len, documents = max(1, sum(lengths) + padding), Documents(lengths)
    part = ring(seq_len, size, which.draw(st.sampled_from([*LAYOUTS, DocumentZigzag()])), documents)
    assert part.position_count(restart=False) == int(part.positions().max()) + 1 == seq_len
    assert part.position_count() == max(lengths, default=0)
    if any(lengths):
        assert part.position_count() == int(part.positions(restart=True).max()) + 1


def test_P6_batch_rows_with_documents_of_their_own_share_a_length() -> None:
    """As Transformers: one set of frequencies for a call. A row without documents is as long as the sequence."""
    context = ContextParallel(Loopback(2))
    rows = [Causal() & Documents([3, 7]), Causal() & Documents([6, 4])]
    assert context.plan(10, rows).partition.position_count() == 7
    assert context.plan(10, [rows[0], Causal()]).partition.position_count() == 10
    later = ContextParallel(Loopback(2)).plan(5, Causal(), key_len=12, query_start=7).partition
    assert later.position_count() == int(later.positions().max()) + 1 == 12


def test_P4_a_shard_without_position_0_is_no_new_document() -> None:
    """Positions 8..15 on rank 1, through the attention that Transformers calls; document starts are not looked for."""
    from ringspun.integrations.transformers import attention, register

    register()
    part, module = ring(16, 2, Contiguous()), torch.nn.Identity()
    assert of_ranks(part, part.positions())[1] == list(range(8, 16))
    q, k, v = torch.randn(3, 1, 2, 16, 8, generator=torch.manual_seed(0), dtype=torch.float64)
    out, _ = attention(module, q, k, v, None, position_ids=part.positions()[None], ringspun_plan=part.plan(Causal()))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-12, atol=1e-12)


def test_several_axes_are_sliced_alike() -> None:
    """Positions on three axes ``[3, B, S]``: by `shard` and by `shard_batch`; each frequency follows its axis."""
    part, axes = ring(13, 3), [0] * 2 + [1] * 3 + [2] * 3
    positions = torch.randint(0, 50, (3, 2, 13), generator=torch.manual_seed(0))
    local = part.shard_batch({"input_ids": torch.zeros(2, 13, dtype=torch.int64), "position_ids": positions})
    assert torch.equal(local["position_ids"], part.shard(positions, dim=2))
    whole = cos_sin(positions, Default(), head_size=16, axes=axes)
    found = cos_sin(local["position_ids"], Default(), head_size=16, axes=axes)
    for x, y in zip(found, whole, strict=True):
        assert torch.equal(part.gather(x, dim=1), y)
    for axis in range(3):
        mine = torch.tensor(axes) == axis
        alone = cos_sin(positions[axis], Default(), head_size=16)[0]
        assert torch.equal(whole[0][..., mine], alone[..., mine])


def test_several_axes_are_those_of_transformers() -> None:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

    sections = [2, 3, 3]
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    config = Qwen2_5_VLTextConfig(hidden_size=32, num_attention_heads=2, rope_parameters=parameters)
    positions = torch.randint(0, 50, (3, 2, 13), generator=torch.manual_seed(0))
    expected = Qwen2_5_VLRotaryEmbedding(config)(torch.zeros(1), positions)
    axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
    for x, y in zip(cos_sin(positions, Default(), head_size=16, axes=axes), expected, strict=True):
        torch.testing.assert_close(x, y[..., :8], rtol=0, atol=2e-5)


def test_rotations_are_those_of_transformers() -> None:
    q, k = torch.randn(2, 1, 3, 11, 16, generator=torch.manual_seed(0))
    cos, sin = cos_sin(torch.arange(11), Default(), head_size=16)
    doubled = [torch.cat([x, x], dim=-1)[None] for x in (cos, sin)]
    for mine, theirs in zip(
        (rotate(q, cos, sin), rotate(k, cos, sin)), apply_rotary_pos_emb(q, k, *doubled), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@settings(max_examples=30)
@given(shift=st.integers(0, 1 << 20), interleaved=st.booleans(), partial=st.sampled_from([0.25, 0.5, 1.0]))
def test_scores_depend_on_distances_alone(shift: int, interleaved: bool, partial: float) -> None:
    """And lengths do not change, and dims beyond the rotated ones are as they were."""
    q, k = torch.randn(2, 1, 1, 6, 16, generator=torch.manual_seed(0), dtype=torch.float64)
    rope = Default(partial_rotary_factor=partial)

    def scores(start: int) -> Tensor:
        turns = cos_sin(torch.arange(6) + start, rope, head_size=16, dtype=torch.float64)
        a, b = rotate(q, *turns, interleaved=interleaved), rotate(k, *turns, interleaved=interleaved)
        assert torch.equal(a[..., rope.rotated(16) :], q[..., rope.rotated(16) :])
        torch.testing.assert_close(a.norm(dim=-1), q.norm(dim=-1), rtol=1e-12, atol=1e-12)
        return a @ b.mT

    torch.testing.assert_close(scores(shift), scores(0), rtol=0, atol=1e-8)
    assert not torch.allclose(scores(0), q @ k.mT)


def test_interleaved_pairs_are_dims_side_by_side() -> None:
    x = torch.randn(2, 3, 5, 8, generator=torch.manual_seed(0), dtype=torch.float64)
    cos, sin = cos_sin(torch.arange(10).view(2, 5), Default(), head_size=8, dtype=torch.float64)
    found = rotate(x, cos, sin, interleaved=True)
    expected = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.complex(cos, sin)[:, None]
    torch.testing.assert_close(found, torch.view_as_real(expected).flatten(-2), rtol=1e-14, atol=1e-14)


def test_a_rotation_keeps_dtype_and_has_a_gradient() -> None:
    turns = cos_sin(torch.arange(5), Default(), head_size=8)
    assert rotate(torch.zeros(1, 1, 5, 8, dtype=torch.bfloat16), *turns).dtype == torch.bfloat16
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    exact = cos_sin(torch.arange(5), Default(partial_rotary_factor=0.5), head_size=8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda y: rotate(y, *exact), x)


def test_what_does_not_fit_is_refused() -> None:
    cos, sin = cos_sin(torch.arange(5), Default(), head_size=8)
    for x in (torch.zeros(1, 1, 6, 8), torch.zeros(1, 5, 8), torch.zeros(1, 1, 5, 6)):
        with pytest.raises(ShapeError, match=r"cos and sin must be \[T, F\] or \[B, T, F\] for x \[B, H, T, D\]"):
            rotate(x, cos, sin)
    with pytest.raises(ShapeError, match=r"axes must name one axis of positions for each of 4 frequencies; got 3"):
        cos_sin(torch.zeros(3, 1, 5, dtype=torch.int64), Default(), head_size=8, axes=[0, 1, 2])
    with pytest.raises(ShapeError, match="axes must name one axis"):
        cos_sin(torch.zeros(2, 5, dtype=torch.int64), Default(), head_size=8, axes=[0, 1, 2, 1])
