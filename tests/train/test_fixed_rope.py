"""Rotations of Hugging Face models, fixed for a length: cases P6 and P8 through whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_rings as hf
import pytest
import torch
import transformers
from hf_rings import S
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ringspun import Causal, Contiguous, Documents, Layout, Striped, Zigzag
from ringspun.errors import ConfigError, RingspunWarning, UnsupportedByRing
from ringspun.integrations.transformers import plans, prepare
from ringspun.train.rope import Default, Linear, LongRope, Rope, Yarn, from_config
from ringspun.train.rope.fixed_rope import FixedRope, fix_rope

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
    "factor": 4.0,
    "rope_theta": 1e4,
}
OF_LENGTH = {"dynamic": DYNAMIC, "longrope": LONGROPE}
LENGTHS = [9, 1, 12, 7]


def check(found: hf.Result, expected: hf.Result, bound: float) -> None:
    worst = found.worst(expected)
    assert max(worst.values()) < bound, max(worst.items(), key=lambda item: item[1])


def unfixed(rope_parameters: dict[str, Any]) -> Any:
    return hf.build("llama", rope_parameters=rope_parameters, max_position_embeddings=8)


@pytest.mark.processes
@pytest.mark.parametrize("kind", OF_LENGTH)
def test_P6_every_rank_rotates_as_one_process(kind: str, pools) -> None:
    """Transformers' own model in one process to its float32 angles; the fixed one to rounding in float64."""
    parameters = OF_LENGTH[kind]
    theirs = hf.alone(unfixed(parameters), hf.token_ids(), [S])
    mine = hf.alone(hf.rotated(parameters, S), hf.token_ids(), [S])
    shorter = hf.alone(hf.rotated(parameters, 15), hf.token_ids(), [S])
    assert max(shorter.worst(mine).values()) > 1e-2
    for found in pools(2).run(hf.rotated_on_processes, parameters, None):
        check(found, mine, 1e-13)
        check(found, theirs, 2e-5)


@pytest.mark.processes
def test_P6_documents_are_decided_by_the_longest(pools) -> None:
    """12 of 29 tokens: every document rotates by it, on every rank."""
    expected = hf.alone(hf.rotated(DYNAMIC, max(LENGTHS)), hf.token_ids(), LENGTHS)
    for found in pools(2).run(hf.rotated_on_processes, DYNAMIC, Documents(LENGTHS)):
        check(found, expected, 1e-13)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
@pytest.mark.parametrize("kind", OF_LENGTH)
def test_P6_frequencies_do_not_follow_a_shard(kind: str, layout: Layout) -> None:
    """Four ranks, each with its positions alone, after one another; Transformers' own module takes them for lengths."""
    part, x = hf.loopback(4, layout).partition(S), torch.zeros(1)
    positions = part.positions()[None]
    fixed, own = hf.rotated(OF_LENGTH[kind], S).model.rotary_emb, unfixed(OF_LENGTH[kind]).float().model.rotary_emb
    whole, theirs = fixed(x, positions)[0], own(x, positions)[0]
    torch.testing.assert_close(whole, theirs, rtol=0, atol=1e-5)
    for rows in part.slices:
        assert torch.equal(fixed(x, positions[:, rows])[0], whole[:, rows])
    if isinstance(layout, Contiguous):  # the first rank's positions end at 7
        fresh = unfixed(OF_LENGTH[kind]).float().model.rotary_emb
        assert not torch.allclose(fresh(x, positions[:, part.slices[0]])[0], theirs[:, part.slices[0]], atol=1e-3)


def test_P10_keys_rotated_for_another_length_cannot_be_cached() -> None:
    """There is no cache on a ring whose keys a longer sequence would need rotated anew: a call that asks for one is
    refused, and what a longer one gives is what it gives from scratch."""
    model, ring = prepare(hf.rotated(LONGROPE, S)), hf.loopback(2)
    part = ring.partition(12)
    call = {**part.shard_batch({"input_ids": hf.token_ids()[:, :12]}), "ringspun_plan": part.plan(Causal())}
    with pytest.raises(UnsupportedByRing, match="use_cache must be None on a ring"):
        model(**call, use_cache=True)
    short = part.gather(model(**call).logits, dim=1)
    longer = ring.partition(S)
    whole = model(**longer.shard_batch({"input_ids": hf.token_ids()}), ringspun_plan=longer.plan(Causal())).logits
    torch.testing.assert_close(longer.gather(whole, dim=1)[:, :12], short, rtol=1e-12, atol=1e-12)


def test_P6_without_a_length_the_line_to_write_is_said() -> None:
    with pytest.raises(
        UnsupportedByRing, match=r"Before prepare, .*: ringspun\.train\.rope\.fixed_rope\.fix_rope\(model, seq"
    ):
        prepare(unfixed(DYNAMIC))


def test_P6_positions_beyond_the_length_are_refused() -> None:
    """By what the plan says, so by all ranks alike; a shorter sequence is fine, and so are documents within."""
    model, ring = prepare(hf.rotated(DYNAMIC, 20)), hf.loopback(2)
    ids = hf.token_ids()

    def call(seq_len: int, documents: Documents | None = None) -> Any:
        part = ring.partition(seq_len, documents=documents)
        mask = Causal() if documents is None else Causal() & documents
        return model(**part.shard_batch({"input_ids": ids[:, :seq_len]}), ringspun_plan=part.plan(mask)).logits

    call(20), call(12), call(S, Documents([20, 9]))
    words = (
        r"positions must be below 20, .*; got a plan whose positions go up to 28\. .* fix_rope\(model, seq_len=29\)\."
    )
    with pytest.raises(UnsupportedByRing, match=words):
        call(S)
    with pytest.raises(UnsupportedByRing, match="must be below 20"):
        call(S, Documents([21, 8]))
    part = ring.partition(S, documents=Documents([20, 9]))
    running = part.shard_batch({"input_ids": ids, "position_ids": torch.arange(S)[None]})
    model(
        **running, ringspun_plan=part.plan(Causal() & Documents([20, 9]))
    )  # as the page says: a batch's own positions are not looked at
    assert part.position_count(restart=False) == S  # what to write for them
    fix_rope(model, seq_len=S)
    fresh = prepare(hf.rotated(DYNAMIC, S))
    part = ring.partition(S)
    assert torch.equal(call(S), fresh(input_ids=part.shard(ids, dim=1), ringspun_plan=part.plan(Causal())).logits)


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_a_fixed_model_is_the_model(family: str) -> None:
    """Transformers' angles are off by float32 rounding; no parameter or buffer is gained."""
    model, ids = hf.build(family), hf.token_ids()
    before, expected = set(model.state_dict()), model(ids, use_cache=False).logits.detach()
    found = fix_rope(model, seq_len=S)(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert isinstance(model.model.rotary_emb, FixedRope) and set(model.state_dict()) == before
    assert "inv_freq" not in dict(model.model.named_buffers())


@pytest.mark.parametrize("kind", ["dynamic", "one for each kind of layer"])
def test_a_fixed_model_is_one_graph(kind: str) -> None:
    torch._dynamo.reset()
    if kind == "dynamic":
        model = prepare(hf.rotated(DYNAMIC, S, num_hidden_layers=1))
    else:
        model = prepare(fix_rope(hf.build("gemma3", num_hidden_layers=2, layer_types=hf.ALTERNATE[:2]), seq_len=S))
    part = hf.loopback(2).partition(S)
    given = part.shard_batch({"input_ids": hf.token_ids()}) | {"ringspun_plan": plans(model, part, Causal())}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**given).logits, model(**given).logits)


def angle_error(module: nn.Module, position: int, theta: float) -> float:
    cos, sin = (x[0, 0, :4].double() for x in module(torch.zeros(1), torch.tensor([[position]])))
    right = position * Default(theta=theta).inv_freq(8)
    off = torch.atan2(sin, cos) - torch.from_numpy(right)
    return float(torch.remainder(off + torch.pi, 2 * torch.pi).sub(torch.pi).abs().max())


def test_P8_a_cast_does_not_reach_the_frequencies() -> None:
    """Cast before or after; Transformers' own are off by radians then, which `prepare` says."""
    model = hf.build("llama").to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    assert angle_error(model.model.rotary_emb, 131_071, 1e4) > 1
    with pytest.warns(RingspunWarning, match=r"rotary_emb\.inv_freq should be float32; got torch\.bfloat16"):
        prepare(model)
    model = hf.build("llama").to(torch.bfloat16)
    prepare(fix_rope(model, seq_len=S))
    for one in (model, model.to(torch.float16), model.to(torch.bfloat16)):
        assert angle_error(one.model.rotary_emb, 131_071, 1e4) < 1e-6
        assert angle_error(one.model.rotary_emb, 1_048_575, 1e4) < 1e-6


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6, 5e7])
def test_P8_the_float32_angles_of_transformers_meet_the_bar(theta: float) -> None:
    """0.01 rad at 131,071 and 0.07 at 1,048,575: models are not wrong without `fix_rope`, only less exact."""
    module = LlamaRotaryEmbedding(
        transformers.LlamaConfig(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": theta})
    )
    assert angle_error(module, 131_071, theta) < 0.01
    assert 1e-6 < angle_error(module, 1_048_575, theta) < 0.07


STAGES: list[Rope] = [
    Default(theta=5e7),
    Linear(factor=4.0),
    Yarn(factor=4.0, original_max_position_embeddings=16),
    LongRope(short_factor=(1.0,) * 4, long_factor=(2.0,) * 4, factor=2.0, original_max_position_embeddings=16),
]


@pytest.mark.parametrize("rope", STAGES, ids=lambda rope: rope.rope_type)
def test_another_scaling_goes_into_the_config_and_back(rope: Rope, tmp_path: Path) -> None:
    """The next stage of a schedule: the model rotates by it at once, and so does what is loaded after."""
    model, ids = fix_rope(hf.build("llama"), seq_len=16), hf.token_ids()
    before = model(ids, use_cache=False).logits
    rotary = model.model.rotary_emb
    after = fix_rope(model, seq_len=S, rope=rope)(ids, use_cache=False).logits
    assert model.model.rotary_emb is rotary and rotary.seq_len == S
    assert not torch.allclose(before, after, atol=1e-3)
    assert from_config(model.config) == rope and model.config.max_position_embeddings == S
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    torch.testing.assert_close(
        loaded(ids, use_cache=False).logits, after, rtol=0, atol=1e-5 * float(after.detach().abs().max())
    )


class Doubling(LlamaRotaryEmbedding):
    """Angles of its own."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x, 2 * position_ids)


def test_what_cannot_be_fixed_is_refused_and_left_alone() -> None:
    model = hf.build("llama")
    model.model.rotary_emb = own = Doubling(model.config)
    with pytest.raises(
        UnsupportedByRing, match=r"rotary embedding must give .*; Doubling at model\.rotary_emb does not"
    ):
        fix_rope(model, seq_len=S, rope=Linear(factor=2.0))
    with pytest.raises(UnsupportedByRing, match=r"rotate as many dims as the model does, 8 of 8 at .*; got 4\."):
        fix_rope(model, seq_len=S, rope=Default(partial_rotary_factor=0.5))
    assert model.model.rotary_emb is own and from_config(model.config) == Default()
    with pytest.raises(UnsupportedByRing, match="model must have rotary embeddings with a rope_type; Linear has none"):
        fix_rope(nn.Linear(2, 2), seq_len=S)
    with pytest.raises(ConfigError, match=r"seq_len must be a whole number, at least 1; got 0\."):
        fix_rope(model, seq_len=0)
    gemma = hf.build("gemma3")
    for _ in range(2):
        with pytest.raises(
            UnsupportedByRing, match=r"rope must be None .* which has one for full_attention, sliding_att"
        ):
            fix_rope(gemma, seq_len=S, rope=Default())
        fix_rope(gemma, seq_len=S)
