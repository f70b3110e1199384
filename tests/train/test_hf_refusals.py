"""What a ring cannot honour of a Hugging Face model is an error by name before the first step; nothing is ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hf_rings as hf
import pytest
import torch
import transformers
from hf_rings import VOCAB, S
from torch import Tensor, nn

from ringspun import Causal, Chunks, Contiguous, Documents, Window
from ringspun.errors import DtypeError, UnsupportedByRing
from ringspun.integrations.transformers import NAME, attention, plans, prepare, register
from ringspun.integrations.transformers.probe import look
from ringspun.torch import ContextParallel, Loopback

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}
HALF_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {  # by the layer that mixes: found by its own ways, not by its name
    "model.layers.0.mamba": (
        "Jamba",
        {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    ),
    "model.layers.0.linear_attn": (
        "Qwen3Next",
        {**HALF_LINEAR, **EXPERTS, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
        | {f"linear_num_{x}_heads": 2 for x in ("key", "value")}
        | {f"linear_{x}_head_dim": 8 for x in ("key", "value")},
    ),
    "model.layers.0.conv": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "model.layers.0.temporal_block": ("RecurrentGemma", {"lru_width": 32, "attention_window_size": 8}),
    "model.layers.0.self_attn": ("MiniMax", {**HALF_LINEAR, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
OTHERS: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 4},
    "FalconH1": {**MAMBA2, "mamba_d_ssm": 64, "mamba_n_groups": 1, "head_dim": 8},
    "Bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "Rwkv": {},
    "Bloom": {},
}


def made(name: str, **own: Any) -> Any:
    config = getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM")(config(**(SIZES | own)))


@pytest.mark.parametrize("name", [name for name, _ in HYBRIDS.values()] + list(OTHERS))
def test_H8_hybrids_are_refused(name: str) -> None:
    """State-space layers, convolutions, linear attention, recurrences: their state would begin anew at every shard."""
    model = made(name, **(dict(HYBRIDS.values()) | OTHERS)[name])
    before = model.config._attn_implementation, model.config.use_cache
    with pytest.raises(UnsupportedByRing, match=r"layer_types must be .* for layer \d|through AttentionInterface"):
        prepare(model)
    assert (model.config._attn_implementation, model.config.use_cache) == before


@pytest.mark.parametrize("path", HYBRIDS)
def test_H8_hybrids_are_found_by_what_they_do(path: str) -> None:
    """Without a look at the config: as a model of next month would be."""
    register()
    name, own = HYBRIDS[path]
    model = made(name, **own)
    model.set_attn_implementation(NAME)
    model.config.use_cache = False
    with pytest.raises(UnsupportedByRing, match=rf"by attention alone; {name}ForCausalLM mixes them in {path}, whose"):
        look(model)


class Mixer(nn.Module):
    """Another feed-forward layer: what it does goes along the tokens."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


CONV = nn.Conv1d(32, 32, 3, padding=1)
MIXERS: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": lambda x: CONV(x.mT.float()).mT.to(x.dtype),
    "running sum": lambda x: x.cumsum(1),
    "shift to the right": lambda x: x.roll(1, 1),
    "shift to the left": lambda x: x.roll(-1, 1),
    "reversed": lambda x: x.flip(1) + x,
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "experts that choose tokens": lambda x: x * x.softmax(1),
    "tokens shuffled and put back by a gate": lambda x: x.gather(1, x.argsort(1)),
}


@pytest.mark.parametrize("name", MIXERS)
def test_whatever_mixes_tokens_is_found(name: str) -> None:
    model = hf.build("llama")
    model.model.layers[1].mlp = Mixer(MIXERS[name])
    with pytest.raises(UnsupportedByRing, match=r"LlamaForCausalLM mixes them in model\.layers\.1\.mlp, whose"):
        prepare(model)
    model(input_ids=hf.token_ids())  # it is as it was
    assert model.config._attn_implementation == "eager" and model.config.use_cache


def test_what_is_per_token_is_none_of_it() -> None:
    """A convolution of width 1, and experts."""
    model, narrow = hf.build("llama"), nn.Conv1d(32, 32, 1).double()
    model.model.layers[1].mlp = Mixer(lambda x: narrow(x.mT).mT)
    prepare(model)
    prepare(made("Mixtral", num_local_experts=3))


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_H6_looking_at_a_model_leaves_nothing_behind(family: str) -> None:
    """Tensors, modes, hooks, its loss, the random state; a layer in evaluation stays there."""
    register()
    model = hf.build(family)
    model.set_attn_implementation(NAME)
    model.config.use_cache = False
    model.train()
    model.model.layers[1].eval()
    state = torch.get_rng_state()
    with hf.unchanged(model):
        seen = look(model)
    assert [x.layer for x in seen.layers] == [f"model.layers.{i}.self_attn" for i in range(hf.LAYERS)]
    assert torch.equal(torch.get_rng_state(), state)


def test_what_depends_on_how_many_tokens_a_rank_holds_is_refused() -> None:
    """Dynamic rotations, also of one kind of layer alone; positions counted inside a layer; means over a batch."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedByRing, match=r"rope_type must not depend on .*; got 'dynamic' at model\.rotary_emb"):
        prepare(hf.build("llama", rope_parameters=dynamic))
    per_kind = {"full_attention": dynamic, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(UnsupportedByRing, match=r"rope_type must not depend on .*; got 'dynamic' at model\.rotary_emb"):
        prepare(hf.build("gemma3", rope_parameters=per_kind))
    llama4 = transformers.Llama4TextConfig(**SIZES, head_dim=8, num_local_experts=2, intermediate_size_mlp=32)
    with pytest.raises(UnsupportedByRing, match="attn_temperature_tuning must be off"):
        prepare(transformers.Llama4ForCausalLM(llama4))
    roberta = made("Roberta", is_decoder=True, max_position_embeddings=40, pad_token_id=1)
    with pytest.raises(
        UnsupportedByRing, match=r"model must count positions 0, 1, 2, \.\.\.; RobertaForCausalLM counts"
    ):
        prepare(roberta)
    model = hf.build("llama")
    model.model.layers[0].mlp.norm = nn.BatchNorm1d(32)
    with pytest.raises(UnsupportedByRing, match=r"has a BatchNorm1d at model\.layers\.0\.mlp\.norm"):
        prepare(model)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_attention_to_both_sides_is_refused(family: str) -> None:
    model = hf.build(family)
    model.config.use_bidirectional_attention = True
    with pytest.raises(UnsupportedByRing, match="use_bidirectional_attention must be off on a ring; got True"):
        prepare(model)
    model = hf.build(family)
    model.model.layers[2].self_attn.is_causal = False
    with pytest.raises(UnsupportedByRing, match=r"one to both sides in model\.layers\.2\.self_attn"):
        prepare(model)


def test_a_head_that_picks_one_token_is_refused() -> None:
    config = transformers.LlamaConfig(**SIZES)
    with pytest.raises(UnsupportedByRing, match=r"a row of logits for every token; LlamaForSequence\w+ gives shape"):
        prepare(transformers.LlamaForSequenceClassification(config))


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = made("Llama")
    with pytest.raises(UnsupportedByRing, match="model must have its weights; LlamaForCausalLM has some on meta"):
        prepare(model)


def test_a_keyword_that_the_ring_would_ignore_is_refused_by_layer() -> None:
    model = hf.build("llama")
    model.model.layers[2].register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"made_up": 3}), with_kwargs=True
    )
    with pytest.raises(UnsupportedByRing, match=r"made_up must be None on a ring; got 3 in layer 2 \(LlamaAttention\)"):
        prepare(model)


def test_the_balance_loss_of_a_shard_is_refused() -> None:
    with pytest.raises(UnsupportedByRing, match="output_router_logits must be False on a ring; got True"):
        prepare(hf.build("gpt_oss", output_router_logits=True))
    model, part = prepare(hf.build("gpt_oss")), hf.loopback(2).partition(S)
    local, chosen = part.shard(hf.token_ids(), dim=1), plans(model, part, Causal())
    with pytest.raises(UnsupportedByRing, match="output_router_logits must be False on a ring; got True"):
        model(input_ids=local, ringspun_plan=chosen, output_router_logits=True)


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_H1_the_loss_follows_shift_labels(family: str) -> None:
    """Given targets that are not the next tokens, the model's own loss is that of the targets."""
    model, part, ids = prepare(hf.build(family)).float(), hf.loopback(2).partition(S), hf.token_ids()
    targets = (ids + 7) % VOCAB
    shards = {name: part.shard(x, dim=1) for name, x in {"input_ids": ids, "shift_labels": targets}.items()}
    found = model(
        **shards, labels=shards["input_ids"], num_items_in_batch=S, ringspun_plan=plans(model, part, Causal())
    )
    own = hf.token_loss(found.logits, shards["shift_labels"], total_targets=S)
    torch.testing.assert_close(found.loss, own)


def test_H1_a_class_that_shifts_labels_itself_gets_none() -> None:
    class Deaf(transformers.LlamaForCausalLM):
        def forward(self, labels: Any = None, shift_labels: Any = None, **kwargs: Any) -> Any:
            return super().forward(labels=labels, **kwargs)

    model, part = prepare(Deaf(transformers.LlamaConfig(**SIZES))), hf.loopback(2).partition(S)
    batch = part.shard_batch({"input_ids": hf.token_ids(), "labels": hf.token_ids()})
    with pytest.raises(UnsupportedByRing, match="labels must be None on a ring; Deaf shifts them itself"):
        model(**batch, ringspun_plan=part.plan(Causal()))


def test_M13_ones_are_kept() -> None:
    """1 = keep, as everywhere in Transformers; zeros and ones as floats are no mask; the model itself takes none."""
    row = torch.tensor([1] * 6 + [0] * 2)
    mask = Causal() & Documents.from_attention_mask(row)
    assert mask.as_array(8).any(axis=1).tolist() == [True] * 6 + [False] * 2
    with pytest.raises(DtypeError, match="1 = keep and 0 = padding; got float32"):
        Documents.from_attention_mask(row.float())
    model, part = prepare(hf.build("llama")), hf.loopback(2).partition(8)
    ids = torch.zeros(1, 8, dtype=torch.long)
    for given in (row[None], row[None].float(), {"full_attention": None}):
        with pytest.raises(UnsupportedByRing, match=r"\[Causal\(\) & Documents\.from_attention_mask\(row\) for row in"):
            model(input_ids=ids, attention_mask=given, ringspun_plan=part.plan(Causal()))


def test_chunks_that_documents_would_shift_are_refused() -> None:
    """One process counts chunks from the beginning of a document."""
    model, part = hf.build("llama"), hf.loopback(2).partition(S)
    model.config.layer_types, model.config.attention_chunk_size = ["chunked_attention", "full_attention"] * 2, 8
    made = plans(model, part, Causal())
    assert made["chunked_attention"].mask == Causal() & Chunks(8)
    prepare(model)(input_ids=part.shard(hf.token_ids(), dim=1), ringspun_plan=made)
    assert list(plans(model, part, Causal() & Documents([16, 10]))) == ["chunked_attention", "full_attention"]
    with pytest.raises(UnsupportedByRing, match="multiples of attention_chunk_size 8; got one that starts at 9"):
        plans(model, part, Causal() & Documents([9, 10]))


def test_layers_check_their_plan_without_prepare_too() -> None:
    """`register` alone, or a config that changed: each layer compares its window with its plan's."""
    register()
    model, part, ids = hf.build("mistral"), hf.loopback(2).partition(S), hf.token_ids()
    model.set_attn_implementation(NAME)
    call = {"input_ids": part.shard(ids, dim=1), "position_ids": part.positions()[None], "use_cache": False}
    with pytest.raises(
        UnsupportedByRing, match=r"must have window\(5\) for layer 0 \(MistralAttention\); got .* no win"
    ):
        model(**call, ringspun_plan=part.plan(Causal()))
    model(**call, ringspun_plan=plans(model, part, Causal()))
    q, kv = torch.randn(1, 4, S, 8), torch.randn(1, 2, S, 8)
    near, module = part.plan(Causal() & Window(4)), torch.nn.Identity()
    given = {"position_ids": part.positions()[None], "ringspun_plan": near}
    attention(module, q, kv, kv, None, sliding_window=4, **given)
    with pytest.raises(UnsupportedByRing, match=r"must have window\(5\) for Identity; got a plan with window\(4\)"):
        attention(module, q, kv, kv, None, sliding_window=5, **given)


@pytest.mark.parametrize("sides", [{"key_len": S, "query_start": 5}, {"key_len": S + 1}], ids=str)
def test_a_plan_of_cross_attention_is_refused(sides):
    """It has as many rows as the shard, and was computed as if it were the model's own: logits off by 0.15."""
    model = prepare(made("Llama"))
    plan = ContextParallel(Loopback(2)).plan(S, Causal(), **sides)
    ids = torch.zeros(1, S, dtype=torch.int64)
    with pytest.raises(
        UnsupportedByRing, match="plan must be one of self-attention; got one whose keys are other tokens"
    ):
        model(input_ids=ids, ringspun_plan=plan)


def test_keys_dealt_otherwise_are_refused():
    model = prepare(made("Llama"))
    plan = ContextParallel(Loopback(3)).plan(S, Causal(), key_len=S, key_layout=Contiguous())
    with pytest.raises(UnsupportedByRing, match="or dealt otherwise"):
        model(input_ids=torch.zeros(1, S, dtype=torch.int64), ringspun_plan=plan)


def test_a_softcap_of_zero_is_none():
    """Configurations write 0 for none."""
    part = ContextParallel(Loopback(2)).partition(S)
    q = torch.randn(1, 2, S, 4, generator=torch.Generator().manual_seed(0))
    call = {"position_ids": part.positions()[None], "ringspun_plan": part.plan(Causal())}
    module = torch.nn.Identity()
    found, right = (attention(module, q, q, q, None, softcap=cap, **call)[0] for cap in (0.0, None))
    assert torch.equal(found, right)
