"""Hugging Face models on a ring: equal to one process, and loud about whatever the ring cannot honour."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ringspun import Causal, Contiguous, Documents, Striped, Zigzag
from ringspun.errors import UnsupportedByRing
from ringspun.integrations.transformers import attention, prepare
from ringspun.train.losses.loss import token_loss

S, VOCAB = 29, 61
LENGTHS = [9, 1, 12, 4]  # and 3 tokens of padding
RINGS = [
    (1, Zigzag()),
    (2, Zigzag()),
    (2, Contiguous()),
    (3, Striped()),
    (4, Zigzag()),
    (4, Striped()),
    (5, Contiguous()),
]


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**(sizes | heads | changes), attn_implementation="sdpa"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # scores far from uniform, so that a wrong mask or position shows
    return model


def ring_of(size: int, layout: Any = None, *, documents: Documents | None = None, seq_len: int = S):
    from ringspun.torch import ContextParallel, Loopback

    context = ContextParallel(Loopback(size, seed=0), layout=layout or Zigzag())
    return context.partition(seq_len=seq_len, documents=documents)


def explicit_mask(documents: Documents, dtype: torch.dtype) -> torch.Tensor:
    """Block-causal, additive ``[1, 1, S, S]``; padding sees itself, so that no row is empty.

    For PyTorch's attention: Transformers' own eager attention takes the softmax in float32 whatever the dtype.
    """
    allowed = torch.from_numpy((Causal() & documents).as_array(S)) | torch.eye(S, dtype=torch.bool)
    return torch.zeros(S, S, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[None, None]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("size", "layout"), RINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_llama_on_a_ring_is_llama_in_one_process(size: int, layout: Any, dtype: torch.dtype) -> None:
    documents, ids = Documents(LENGTHS), torch.randint(0, VOCAB, (1, S), generator=torch.manual_seed(0))
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    for end in [*torch.tensor(LENGTHS).cumsum(0) - 1]:
        targets[0, end] = -100
    targets[0, sum(LENGTHS) :] = -100
    count = int((targets != -100).sum())

    dense = tiny_llama().to(dtype)
    positions = torch.from_numpy(documents.positions(S))[None]
    logits = dense(ids, attention_mask=explicit_mask(documents, dtype), position_ids=positions, use_cache=False).logits
    loss = token_loss(logits, targets, total_targets=count)
    loss.backward()

    ring = prepare(tiny_llama()).to(dtype)
    part = ring_of(size, layout, documents=documents)
    local = part.shard_batch({"input_ids": ids, "labels": ids})
    assert local["num_items_in_batch"] == count
    plan = part.plan(Causal() & documents)
    ring_logits = ring(input_ids=local["input_ids"], position_ids=local["position_ids"], ringspun_plan=plan).logits
    ring_loss = token_loss(ring_logits, local["shift_labels"], total_targets=count)
    ring_loss.backward()

    bound = 1e-12 if dtype == torch.float64 else 2e-5
    real = sum(LENGTHS)
    torch.testing.assert_close(ring_loss, loss, rtol=bound, atol=bound)
    torch.testing.assert_close(part.gather(ring_logits, dim=1)[:, :real], logits[:, :real], rtol=bound, atol=bound)
    expected, found = gradients(dense), gradients(ring)
    assert expected.keys() == found.keys()
    for name, reference in expected.items():
        assert float((found[name] - reference).abs().max() / reference.abs().max()) < bound, name


def test_transformers_own_loss_takes_the_shard() -> None:
    """`shift_labels` and `num_items_in_batch` through the model's own loss give the same share."""
    documents, ids = Documents([S]), torch.randint(0, VOCAB, (1, S), generator=torch.manual_seed(0))
    model = prepare(tiny_llama())
    part = ring_of(3, documents=documents)
    local = part.shard_batch({"input_ids": ids, "labels": ids})
    output = model(**local, ringspun_plan=part.plan(Causal() & documents))
    own = token_loss(output.logits, local["shift_labels"], total_targets=local["num_items_in_batch"])
    torch.testing.assert_close(output.loss, own)


def test_P1_positions_omitted_are_filled_in() -> None:
    """Every shard gets its global positions; logits equal one process."""
    part = ring_of(3, seq_len=12)
    assert [part.positions()[s].tolist() for s in part.slices] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    ids = torch.arange(12)[None]
    dense, ring = tiny_llama(), prepare(tiny_llama())
    expected = dense(ids, use_cache=False).logits
    for size, layout in RINGS:
        part = ring_of(size, layout, seq_len=12)
        logits = ring(input_ids=part.shard(ids, dim=1), ringspun_plan=part.plan(Causal())).logits
        torch.testing.assert_close(part.gather(logits, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_P1_positions_omitted_without_prepare_are_refused() -> None:
    from ringspun.integrations.transformers import register

    register()
    model = tiny_llama()
    model.set_attn_implementation("ringspun")
    part = ring_of(2)
    with pytest.raises(UnsupportedByRing, match=r"position_ids must be this shard's global positions; got 0, 1, 2"):
        model(
            input_ids=part.shard(torch.zeros(1, S, dtype=torch.long), dim=1),
            ringspun_plan=part.plan(Causal()),
            use_cache=False,
        )


def test_a_token_of_one_document_moves_no_other() -> None:
    """Two documents; a change in the first may change its own logits and nothing else."""
    documents, ids = Documents([14, 15]), torch.arange(S)[None]
    model, part = prepare(tiny_llama()), ring_of(2, documents=documents)
    plan = part.plan(Causal() & documents)
    changed = ids.clone()
    changed[0, 0] = 60
    before, after = (
        part.gather(model(input_ids=part.shard(x, dim=1), ringspun_plan=plan).logits, dim=1)[0] for x in (ids, changed)
    )
    rows = (before != after).any(dim=1)
    assert rows[:14].any() and not rows[14:].any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"ringspun_plan": None}, "ringspun_plan must be given"),
        ({"attention_mask": torch.ones(1, S)}, "attention_mask must be None on a ring; got a Tensor of shape"),
        ({"use_cache": True}, "use_cache must be None on a ring; got True"),
        ({"past_key_values": object()}, r"must be None on a ring; got <object"),
        ({"output_attentions": True}, "output_attentions must be False"),
        ({"cu_seq_lens_q": torch.tensor([0, S])}, "cu_seq_lens_q must be None on a ring; got a Tensor"),
        ({"made_up_option": 3}, "made_up_option must be None on a ring; got 3"),
        (
            {"input_ids": torch.zeros(1, S - 1, dtype=torch.long), "position_ids": None},
            "rank's shard of 29 tokens",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_calls_that_are_refused(call: dict[str, Any], words: str) -> None:
    model, part = prepare(tiny_llama()), ring_of(2)
    good = {"input_ids": torch.zeros(1, S, dtype=torch.long), "ringspun_plan": part.plan(Causal())}
    if call.get("input_ids") is not None:
        call = call | {"position_ids": part.positions()[None, :-1]}
    with pytest.raises(UnsupportedByRing, match=words):
        model(**(good | call))


def test_a_plan_that_leaves_a_rank_without_tokens_is_refused() -> None:
    """By every rank alike, those with tokens too; Transformers would crash on the empty one."""
    model, part = prepare(tiny_llama()), ring_of(7, seq_len=3)
    ids, plan = torch.zeros(1, 3, dtype=torch.long), part.plan(Causal())
    words = r"plan must give every rank a token; it gives none to ring rank 3 of 3 tokens"
    with pytest.raises(UnsupportedByRing, match=words):
        model(input_ids=ids, ringspun_plan=plan)
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(UnsupportedByRing, match=words):
        attention(torch.nn.Identity(), q, q, q, None, position_ids=part.positions(), ringspun_plan=plan)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"sliding_window": 16}, r"must have window\(16\) for Identity; got a plan with no window"),
        ({"dropout": 0.1}, "dropout must be 0 in training; got 0.1"),
        ({"attention_mask": torch.ones(1, 1, S, S)}, "attention_mask must be None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_attention_refuses_what_it_would_ignore(option: dict[str, Any], words: str) -> None:
    part = ring_of(2)
    q, kv = torch.randn(1, 4, S, 8), torch.randn(1, 2, S, 8)
    arguments = {
        "attention_mask": None,
        "position_ids": part.positions()[None],
        "ringspun_plan": part.plan(Causal()),
    }
    module = torch.nn.Identity()
    attention(module, q, kv, kv, **arguments)
    with pytest.raises(UnsupportedByRing, match=words):
        attention(module, q, kv, kv, **(arguments | option))


def test_labels_that_the_model_would_shift_inside_the_shard_are_refused() -> None:
    documents = Documents(LENGTHS)
    model, part = prepare(tiny_llama()), ring_of(2, documents=documents)
    plan = part.plan(Causal() & documents)
    ids = torch.randint(0, VOCAB, (1, S))
    batch = part.shard_batch({"input_ids": ids, "labels": ids})
    alone = prepare(tiny_llama())
    whole = ring_of(1, documents=documents)
    one = alone(**whole.shard_batch({"input_ids": ids, "labels": ids}), ringspun_plan=whole.plan(Causal() & documents))
    torch.testing.assert_close(model(**batch, ringspun_plan=plan).loss, one.loss)
    for name in ("shift_labels", "num_items_in_batch"):
        less = {key: value for key, value in batch.items() if key != name}
        with pytest.raises(UnsupportedByRing, match=f"labels must come with {name} on a ring"):
            model(**less, ringspun_plan=plan)


def test_G14_dropout_is_ignored_in_evaluation() -> None:
    part = ring_of(2)
    q, module = torch.randn(1, 2, S, 8), torch.nn.Identity().eval()
    arguments = {"position_ids": part.positions()[None], "ringspun_plan": part.plan(Causal())}
    out, _ = attention(module, q, q, q, None, dropout=0.5, **arguments)
    assert out.shape == (1, S, 2, 8) and out.is_contiguous()


def test_cache_and_cross_attention_are_refused() -> None:
    part = ring_of(2)
    q, longer = torch.randn(1, 2, S, 8), torch.randn(1, 2, S + 3, 8)
    with pytest.raises(UnsupportedByRing, match=r"keys must be those of the same 29 tokens as the queries; got 32"):
        attention(
            torch.nn.Identity(),
            q,
            longer,
            longer,
            None,
            position_ids=part.positions(),
            ringspun_plan=part.plan(Causal()),
        )


def test_importing_registers_nothing() -> None:
    code = (
        "import ringspun.integrations.transformers as hf, sys\n"
        "assert 'transformers' not in sys.modules\n"
        "from transformers import AttentionInterface\n"
        "assert hf.NAME not in AttentionInterface()\n"
        "hf.register()\n"
        "assert hf.NAME in AttentionInterface()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
