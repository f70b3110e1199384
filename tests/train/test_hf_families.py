"""Six families of Hugging Face models: on a ring they are what they are in one process, gradients included."""

from __future__ import annotations

from typing import Any

import hf_rings as hf
import pytest
import torch
from hf_rings import FAMILIES, SLIDING, S
from transformers import MistralForCausalLM

from ringspun import Causal, Contiguous, Documents, Full, Layout, Striped, Window, Zigzag
from ringspun.errors import UnsupportedByRing
from ringspun.integrations.transformers import plans, prepare

BOUND = 1e-13
"""Relative to the largest value of the logits, of the loss, or of the same gradient; float64."""
LENGTHS = [9, 1, 12, 7]
RINGS = [
    (2, Zigzag(), 5),
    (2, Contiguous(), 17),
    (3, Striped(), 5),
    (3, Zigzag(), 17),
]  # windows below and above a shard


def check(found: hf.Result, expected: hf.Result, real: torch.Tensor | None = None) -> None:
    assert all(x.abs().max() > 0 for x in expected.gradients.values())
    worst = found.worst(expected, real)
    assert max(worst.values()) < BOUND, max(worst.items(), key=lambda item: item[1])


@pytest.mark.parametrize(("size", "layout", "window"), RINGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_on_a_ring_is_the_family_in_one_process(family: str, size: int, layout: Layout, window: int) -> None:
    """One sequence. Zigzag and striped positions jump, and are taken for packed documents nowhere."""
    part = hf.loopback(size, layout).partition(S)
    check(hf.packed_on_ring(part, family, window), hf.alone(hf.build(family, window=window), hf.token_ids(), [S]))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_a_pack_are_what_they_are_alone(family: str, size: int) -> None:
    part = hf.loopback(size).partition(S, documents=Documents(LENGTHS))
    check(hf.packed_on_ring(part, family, 5), hf.alone(hf.build(family), hf.token_ids(), LENGTHS))


@pytest.mark.processes
@pytest.mark.parametrize("family", FAMILIES)
def test_on_processes(family: str, pools) -> None:
    expected = hf.alone(hf.build(family), hf.token_ids(), LENGTHS)
    for found in pools(2).run(hf.packed_on_processes, family, 5, Documents(LENGTHS)):
        check(found, expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_are_what_they_are_in_one_process(family: str, size: int) -> None:
    """Left, right and no padding in one batch; positions as the model makes them, 0, 1, 2, ... in every row."""
    ids, attention_mask = hf.token_ids(3), torch.ones(3, S, dtype=torch.long)
    attention_mask[0, :8], attention_mask[1, 20:] = 0, 0
    labels = ids.masked_fill(attention_mask == 0, hf.IGNORED)
    labels[0, 8] = hf.IGNORED  # else padding would have to predict it
    mask = [Causal() & Documents.from_attention_mask(row) for row in attention_mask]
    found = hf.on_ring(hf.loopback(size).partition(S), hf.build(family), ids, labels, mask)
    check(found, hf.padded(hf.build(family), ids, labels, attention_mask), attention_mask.bool())


@pytest.mark.parametrize("family", FAMILIES)
def test_H2_a_token_of_one_document_moves_no_other(family: str) -> None:
    """Two documents; a change of token 0 reaches every token of its document and none of the other."""
    documents, ids = Documents([14, 15]), hf.token_ids()
    part, model = hf.loopback(2).partition(S, documents=documents), prepare(hf.build(family))
    chosen = plans(model, part, Causal() & documents)
    changed = ids.clone()
    changed[0, 0] += 1
    before, after = (
        part.gather(model(input_ids=part.shard(x, dim=1), ringspun_plan=chosen).logits, dim=1)[0]
        for x in (ids, changed)
    )
    assert (before != after).any(dim=1).tolist() == [True] * 14 + [False] * 15


def test_plans_are_one_per_kind_of_layer() -> None:
    part, mask = hf.loopback(2).partition(S), Causal()
    made = {family: plans(hf.build(family), part, mask) for family in FAMILIES}
    kinds = {"llama": ["full_attention"], "mistral": ["sliding_attention"]}
    both = ["full_attention", "sliding_attention"]
    assert {family: list(chosen) for family, chosen in made.items()} == {f: kinds.get(f, both) for f in FAMILIES}
    assert made["gemma2"]["full_attention"].mask == mask
    assert made["gemma2"]["sliding_attention"].mask == mask & Window(5)
    rows = plans(hf.build("gpt_oss"), part, [Causal(), Causal() & Documents([20])])
    assert rows["sliding_attention"].mask == (Causal() & Window(5), Causal() & Documents([20]) & Window(5))


@pytest.mark.parametrize("family", SLIDING)
def test_a_window_is_never_lost(family: str) -> None:
    """One full plan for a model with sliding layers, another window, plans the wrong way round: by layer name, before
    anything is computed."""
    model, part = prepare(hf.build(family)), hf.loopback(2).partition(S)
    right = plans(model, part, Causal())
    full, near = part.plan(Causal()), right["sliding_attention"]
    wrong = [full, part.plan(Causal() & Window(6)), {"sliding_attention": full, "full_attention": full}]
    wrong += [{"sliding_attention": part.plan(Causal() & Window(4)), "full_attention": full}]
    if family != "mistral":
        wrong += [{"sliding_attention": full, "full_attention": near}, {"sliding_attention": near}]
        wrong += [{"sliding_attention": near, "full_attention": near}]
    computed = []
    model.get_input_embeddings().register_forward_hook(lambda *_: computed.append(1))
    for given in wrong:
        with pytest.raises(UnsupportedByRing, match=r"ringspun_plan must h.* model\.layers\.\d\.self_attn"):
            model(input_ids=part.shard(hf.token_ids(), dim=1), ringspun_plan=given)
    assert not computed


def test_one_windowed_plan_serves_a_model_whose_layers_all_have_it() -> None:
    model, part, ids = prepare(hf.build("mistral")), hf.loopback(2).partition(S), hf.token_ids()
    local = part.shard(ids, dim=1)
    expected = model(input_ids=local, ringspun_plan=plans(model, part, Causal())).logits
    assert torch.equal(model(input_ids=local, ringspun_plan=part.plan(Causal() & Window(5))).logits, expected)


def test_a_single_plan_may_show_less_to_layers_without_a_window() -> None:
    """The plan's mask is the mask: a window over a Llama is the caller's own wish."""
    model, part = prepare(hf.build("llama")), hf.loopback(2).partition(S)
    local = part.shard(hf.token_ids(), dim=1)
    near, far = (model(input_ids=local, ringspun_plan=part.plan(m)).logits for m in (Causal() & Window(3), Causal()))
    assert not torch.allclose(near, far)


def test_plans_of_two_partitions_are_refused() -> None:
    model, ring = prepare(hf.build("gemma2")), hf.loopback(2)
    one, two = (plans(model, ring.partition(n), Full()) for n in (S, S + 1))
    with pytest.raises(UnsupportedByRing, match="ringspun_plan must hold plans of one partition"):
        model(input_ids=hf.token_ids(), ringspun_plan=one | {"full_attention": two["full_attention"]})
    with pytest.raises(UnsupportedByRing, match="ringspun_plan must hold a plan; got none"):
        model(input_ids=hf.token_ids(), ringspun_plan={})


def test_calls_that_pass_a_part_of_the_model_by_are_checked_too() -> None:
    """A head may call what is in its base, without the base's hooks (OPT); training calls the base without the head."""

    class Bypass(MistralForCausalLM):
        def forward(self, **kwargs: Any) -> Any:
            return self.lm_head(self.model.forward(**kwargs).last_hidden_state)

    part = hf.loopback(2).partition(S)
    local, plan = part.shard(hf.token_ids(), dim=1), part.plan(Causal())
    model = hf.build("mistral")
    bypass = Bypass(model.config).double()
    bypass.load_state_dict(model.state_dict())
    expected = bypass(input_ids=hf.token_ids())
    found = part.gather(prepare(bypass)(input_ids=local, ringspun_plan=plans(model, part, Causal())), dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # softmax in float32
    with pytest.raises(UnsupportedByRing, match=r"must have window\(5\) for model\.layers\.0\.self_attn"):
        bypass(input_ids=local, ringspun_plan=plan)

    model = prepare(hf.build("mistral"))
    chosen = plans(model, part, Causal())
    hidden = model.model(input_ids=local, ringspun_plan=chosen).last_hidden_state
    assert torch.equal(model.lm_head(hidden), model(input_ids=local, ringspun_plan=chosen).logits)
    with pytest.raises(UnsupportedByRing, match=r"must have window\(5\) for model\.layers\.0\.self_attn"):
        model.model(input_ids=local, ringspun_plan=plan)
