"""Documents as batches and as the chunks of a ring: no token lost, none invented, no target across documents."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tiny_tokenizers import CHATML, byte_tokenizer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from ringspun import Balanced, Causal, Contiguous, Documents, DocumentZigzag, Layout, Striped, Window, Zigzag
from ringspun.core import reference
from ringspun.errors import DataError, PlanError
from ringspun.integrations.transformers import prepare
from ringspun.torch import ContextParallel, Loopback
from ringspun.train.data.collate import Collator, chunks, documents_of, to_ring
from ringspun.train.data.packing import Counts
from ringspun.train.data.samples import Encoder
from ringspun.train.losses.loss import IGNORED, token_loss

LAYOUTS: list[Layout] = [
    Contiguous(), Zigzag(), Striped(), Striped(128), DocumentZigzag(), Balanced(), Zigzag(speeds=(1, 2, 3) * 3)
]  # fmt: skip


def numbered(*lengths: int) -> list[list[int]]:
    """Documents whose tokens tell their document and place: 10,000 x (1 + document) + place."""
    return [[10_000 * (i + 1) + j for j in range(n)] for i, n in enumerate(lengths)]


def pairs(parts: list[dict[str, Any]]) -> Counter[tuple[int, int]]:
    """Every (input, target) of all ranks together, with how often it is there."""
    found: Counter[tuple[int, int]] = Counter()
    for part in parts:
        ids, targets = part["input_ids"].flatten(), part["shift_labels"].flatten()
        real = targets != IGNORED
        found.update(zip(ids[real].tolist(), targets[real].tolist(), strict=True))
    return found


def inside(documents: list[list[int]], seq_len: int, overflow: str) -> list[tuple[int, int]]:
    """The pairs that one process learns from, found in the documents themselves."""
    found = []
    for tokens in documents:
        if overflow == "truncate":
            tokens = tokens[:seq_len]
        if overflow == "drop" and len(tokens) > seq_len:
            continue
        found += [(a, b) for i, (a, b) in enumerate(pairwise(tokens), 1) if i % seq_len]
    return found


def row_of(batch: dict[str, Any], row: int) -> dict[str, Any]:
    return {name: x[row : row + 1] for name, x in batch.items() if name != "counts"}


def ring_chunks(batch: dict[str, Any], ring_size: int, layout: Layout) -> list[dict[str, Any]]:
    """Layouts that deal by documents deal one row at a time."""
    rows = [row_of(batch, i) for i in range(len(batch["input_ids"]))] if layout.reads_documents else [batch]
    return [part for row in rows for part in chunks(row, ring_size=ring_size, layout=layout)]


def test_T3_no_target_across_documents():
    """Two documents; one of a single token; and prompts without targets."""
    batch = Collator(8, overflow="error")([[10, 11, 12], [20, 21, 22], [30]])
    assert batch["labels"].tolist() == [[10, 11, 12, 20, 21, 22, 30, IGNORED]]
    (part,) = chunks(batch, ring_size=1, layout=Contiguous())
    assert part["shift_labels"].tolist() == [[11, 12, IGNORED, 21, 22, IGNORED, IGNORED, IGNORED]]
    prompt = {"input_ids": [10, 11, 12], "labels": [IGNORED, IGNORED, 12]}
    (part,) = chunks(Collator(6, overflow="error")([prompt, [20, 21]]), ring_size=1, layout=Contiguous())
    assert part["shift_labels"].tolist() == [[IGNORED, 12, IGNORED, 21, IGNORED, IGNORED]]
    assert part["num_items_in_batch"] == 2


@pytest.mark.parametrize("layout", LAYOUTS[:6], ids=str)
@pytest.mark.parametrize("lengths", [(24,), (3, 5)], ids=str)
@pytest.mark.parametrize("ring_size", [2, 8])
def test_T5_nothing_is_padded_for_a_ring(layout, lengths, ring_size):
    """24 tokens on 8 ranks, documents of 3 and 5 on 2: they run as they are, equal to dense."""
    check_equals_dense(lengths, sum(lengths), ring_size, layout)


@pytest.mark.parametrize("layout", LAYOUTS[:6], ids=str)
def test_T10_odd_documents_keep_their_own_boundaries(layout):
    """Documents of 3, 5, 1 and 7 on 2 ranks: one set of boundaries, 0 3 8 9 16, for layout, mask and loss."""
    batch = Collator(16, overflow="error")(numbered(3, 5, 1, 7))
    assert np.cumsum([0, *batch["document_lengths"][0]]).tolist() == [0, 3, 8, 9, 16]
    check_equals_dense((3, 5, 1, 7), 16, 2, layout)


def check_equals_dense(lengths: tuple[int, ...], seq_len: int, ring_size: int, layout: Layout) -> None:
    documents = numbered(*lengths)
    cp = ContextParallel(Loopback(ring_size, seed=1), layout=layout)
    batch = Collator(seq_len, overflow="error", geometry=cp.geometry)(documents)
    assert batch["input_ids"].shape == (1, seq_len) and batch["document_lengths"] == [list(lengths)]
    assert pairs(chunks(batch, ring_size=ring_size, layout=layout)) == Counter(inside(documents, seq_len, "error"))
    local, plan = to_ring(batch, cp)
    q, k, v = torch.randn(3, 1, 2, seq_len, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shards = [plan.partition.shard(x, dim=2) for x in (q, k, v)]
    out = plan.partition.gather(plan.attention(*shards), dim=2)
    dense = reference.attention(q, k, v, allowed=(Causal() & Documents(lengths)).as_array(seq_len))[0]
    np.testing.assert_allclose(out.numpy(), dense, rtol=1e-12, atol=1e-12)
    assert torch.equal(plan.partition.gather(local["input_ids"], dim=1), batch["input_ids"])


def test_T7_spans_of_responses_move_with_their_samples():
    """3 samples of 5, 4 and 6 tokens, responses at [2:5], [1:4], [3:6]: in the pack at [2:5], [6:9], [12:15]."""
    rows = []
    for tokens, (start, stop) in zip(numbered(5, 4, 6), [(2, 5), (1, 4), (3, 6)], strict=True):
        rows.append(
            {"input_ids": tokens, "labels": [t if start <= j < stop else IGNORED for j, t in enumerate(tokens)]}
        )
    batch = Collator(16, overflow="error")(rows)
    learnt = torch.nonzero(batch["labels"][0] != IGNORED).flatten().tolist()
    assert learnt == [2, 3, 4, 6, 7, 8, 12, 13, 14]
    assert torch.equal(batch["labels"][0, learnt], batch["input_ids"][0, learnt])


@pytest.mark.parametrize("seq_len", [32, 4010])
def test_T9_padding_costs_nothing(seq_len):
    """10 tokens and 22 (or 4,000) of padding on 2 ranks: one document, one tile a rank and step."""
    geometry = ContextParallel(Loopback(2), layout=Contiguous()).geometry
    batch = Collator(seq_len, overflow="error", geometry=geometry)(numbered(10))
    assert batch["document_lengths"] == [[10]] and documents_of(batch) == [Documents([10])]
    assert batch["position_ids"][0].tolist() == [*range(10), *[0] * (seq_len - 10)]
    assert (batch["labels"][0, 10:] == IGNORED).all() and batch["counts"]["padding"] == seq_len - 10
    assert sum(len(s.forward.tiles) for s in batch["schedules"]) == 1
    assert sum(s.forward.pairs.sum() for s in batch["schedules"]) == 55


@pytest.mark.parametrize(("positions", "expected"), [("restart", [0, 3, 0, 3]), ("running", [0, 3, 4, 7])])
def test_P2_positions_restart_or_run(positions, expected):
    """Two documents of 4, dealt by document over 2 ranks: rank 0 holds rows 0, 3, 4 and 7."""
    batch = Collator(8, overflow="error", positions=positions)(numbered(4, 4))
    first, _ = chunks(batch, ring_size=2, layout=DocumentZigzag())
    assert first["input_ids"].tolist() == [[10000, 10003, 20000, 20003]]
    assert first["position_ids"].tolist() == [expected]


def test_L1_no_chunk_loses_its_last_target():
    batch = Collator(8, overflow="error")([list(range(1, 9))])
    for ring_size in (2, 8):
        parts = chunks(batch, ring_size=ring_size, layout=Contiguous())
        assert torch.cat([p["shift_labels"][0] for p in parts]).tolist() == [2, 3, 4, 5, 6, 7, 8, IGNORED]
        assert {p["num_items_in_batch"] for p in parts} == {7}


def test_L3_the_pairs_inside_documents_each_once():
    documents = numbered(5, 6, 5)
    parts = chunks(Collator(16, overflow="error")(documents), ring_size=2, layout=Zigzag())
    assert pairs(parts) == Counter(inside(documents, 16, "error")) and sum(pairs(parts).values()) == 13


def test_200_random_batches_have_every_pair_once_on_every_ring():
    """Documents of 1 to 5,000 tokens, 1 to 8 ranks, every layout, every policy."""
    random = np.random.default_rng(0)
    for number in range(200):
        lengths = [int(np.exp(random.uniform(0, np.log(5000)))) for _ in range(random.integers(1, 7))]
        overflow = ("split", "truncate", "drop")[number % 3]
        ring_size, seq_len = int(random.integers(1, 9)), int(random.integers(300, 4001))
        layout = LAYOUTS[number % len(LAYOUTS)]
        if isinstance(layout, Zigzag) and layout.speeds:
            layout = Zigzag(speeds=layout.speeds[:ring_size])
        documents, what = numbered(*lengths), (number, lengths, overflow, ring_size, seq_len, layout)
        expected = inside(documents, seq_len, overflow)
        if overflow == "drop" and min(lengths) > seq_len:
            with pytest.raises(DataError, match="at least one token"):
                Collator(seq_len, overflow=overflow)(documents)
            continue
        batch = Collator(seq_len, overflow=overflow, pad_id=7)(documents)
        parts = ring_chunks(batch, ring_size, layout)
        assert pairs(parts) == Counter(expected), what
        held = torch.cat([p["input_ids"].flatten() for p in parts])
        counts = batch["counts"]
        assert len(held) == counts["sequences"] * seq_len and int((held == 7).sum()) == counts["padding"], what
        assert counts["tokens"] == sum(lengths) == counts["tokens_packed"] + counts["tokens_dropped"], what
        kept = [t for tokens in documents for t in tokens if overflow != "drop" or len(tokens) <= seq_len]
        kept = [t for t in kept if overflow != "truncate" or t % 10_000 < seq_len]
        assert sorted(held[held != 7].tolist()) == kept, what


def test_every_field_is_joined_padded_and_dealt_alike():
    encoder = Encoder(fields={"kinds": 9})
    rows = [
        {"input_ids": [1, 2, 3], "kinds": [0, 1, 0], "loss_weights": [0.5, 2, 3]},
        {"input_ids": [4, 5], "kinds": [1, 1]},
    ]
    batch = Collator(7, overflow="error", encoder=encoder, pad_id=8)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 8, 8]]
    assert batch["kinds"].tolist() == [[0, 1, 0, 1, 1, 9, 9]] and batch["kinds"].dtype == torch.int64
    assert batch["loss_weights"].tolist() == [[0.5, 2, 3, 1, 1, 0, 0]] and batch["loss_weights"].dtype == torch.float32
    parts = chunks(batch, ring_size=3, layout=Zigzag())
    assert sorted(torch.cat([p["kinds"] for p in parts], 1).flatten().tolist()) == [0, 0, 1, 1, 1, 9, 9]
    by_token = {
        int(t): float(w) for p in parts for t, w in zip(p["input_ids"][0], p["shift_loss_weights"][0], strict=True)
    }
    assert {t: w for t, w in by_token.items() if t != 8} == {1: 2, 2: 3, 3: 0, 4: 1, 5: 0}
    assert {p["total_loss_weight"] for p in parts} == {6.0} and {p["num_items_in_batch"] for p in parts} == {3}


def test_declared_weights_are_there_in_every_batch():
    encoder = Encoder(fields={"loss_weights": 0})
    for row in ([1, 2], {"input_ids": [1, 2]}, {"input_ids": [1, 2], "loss_weights": None}):
        batch = Collator(3, overflow="error", encoder=encoder)([row])
        assert batch["loss_weights"].tolist() == [[1, 1, 0]] and batch["loss_weights"].dtype == torch.float32
    assert "loss_weights" not in Collator(3, overflow="error")([[1, 2]])


def test_sequences_chosen_by_somebody_else_are_checked():
    encoder = Encoder(fields={"kinds": 0})
    samples = [encoder({"input_ids": [1, 2, 3], "kinds": [0, 0, 1]}), Encoder()([4, 5])]
    collate = Collator(5, overflow="error", encoder=encoder)
    with pytest.raises(DataError, match="every document must have the declared field 'kinds'"):
        collate.batch([samples], Counts())
    with pytest.raises(DataError, match="documents of a sequence must have at most 4 tokens; got 5"):
        Collator(4, overflow="error").batch([samples], Counts())
    padding = collate.batch([samples[:1], []], Counts())
    assert padding["document_lengths"] == [[3], []] and padding["kinds"].tolist() == [[0, 0, 1, 0, 0], [0] * 5]


def test_a_conversation_is_cut_only_by_its_own_policy():
    encoder = Encoder(byte_tokenizer(CHATML))
    talk = {"messages": [{"role": "user", "content": "x" * 50}, {"role": "assistant", "content": "y"}]}
    with pytest.raises(DataError, match=r"\(of a conversation: overflow_conversations\)"):
        Collator(40, overflow="split", encoder=encoder)(["a", talk])
    counts = Collator(40, overflow="split", overflow_conversations="drop", encoder=encoder)(["a", talk])["counts"]
    assert (counts["documents_dropped"], counts["documents_cut"], counts["tokens_packed"]) == (1, 0, 2)
    counts = Collator(40, overflow="drop", overflow_conversations="split", encoder=encoder)(["a" * 40, talk])["counts"]
    assert (counts["documents_dropped"], counts["documents_cut"], counts["tokens_dropped"]) == (1, 1, 41)


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_schedules_are_made_in_the_loaders_worker():
    """The plans are those that the main process would make; several masks by name; rows of different documents."""
    cp = ContextParallel(Loopback(3))
    masks = {"near": Window(4), "far": lambda documents: Causal() & documents}
    collate = Collator(16, overflow="split", geometry=cp.geometry, mask={"near": masks["near"], "far": Causal()})
    for batch in DataLoader(numbered(5, 9, 13, 3, 2, 16), batch_size=3, collate_fn=collate, num_workers=1):
        bare = {name: x for name, x in batch.items() if name != "schedules"}
        local, plans = to_ring(batch, cp)
        again, others = to_ring(bare, cp, masks)
        assert isinstance(plans, dict) and isinstance(others, dict) and plans.keys() == others.keys() == masks.keys()
        assert all(plans[name].schedules == others[name].schedules for name in masks)
        assert local.keys() == again.keys() and all(
            torch.equal(x, again[name]) if isinstance(x, torch.Tensor) else x == again[name]
            for name, x in local.items()
        )
    assert len(batch["document_lengths"]) > 1  # the last batch has rows of different documents


def test_to_ring_wants_one_mask_from_one_place():
    cp = ContextParallel(Loopback(2))
    plain = Collator(4, overflow="error")([[1, 2]])
    made = Collator(4, overflow="error", geometry=cp.geometry)([[1, 2]])
    for batch, mask in ((plain, None), (made, Causal())):
        with pytest.raises(DataError, match="mask must be given where the collator knew no geometry"):
            to_ring(batch, cp, mask)
    other = ContextParallel(Loopback(2), layout=Contiguous())
    with pytest.raises(PlanError, match="schedule must be made from this partition's length, layout"):
        to_ring(made, other)


def test_rows_of_different_documents_need_a_layout_that_does_not_read_them():
    batch = Collator(6, overflow="split")(numbered(5, 6))
    with pytest.raises(DataError, match="rows must have the same documents under balanced"):
        chunks(batch, ring_size=2, layout=Balanced())
    assert len(chunks(batch, ring_size=2, layout=Zigzag())) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"overflow": "cut"}, "overflow must be one of 'truncate', 'split', 'drop', 'error'; got 'cut'"),
        ({"overflow": "split", "overflow_conversations": None}, "overflow_conversations must be one of"),
        ({"overflow": "split", "positions": "absolute"}, "positions must be 'restart' or 'running'"),
        ({"overflow": "split", "seq_len": 0}, "seq_len must be an integer >= 1; got 0"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_bad_settings_are_named(arguments, words):
    with pytest.raises(DataError, match=words):
        Collator(**{"seq_len": 8, **arguments})
    with pytest.raises(TypeError, match="overflow"):
        Collator(8)  # type: ignore[call-arg]
    with pytest.raises(DataError, match="at least one token; got none"):
        Collator(8, overflow="error")([[]])


def test_a_model_learns_from_each_document_as_if_it_were_alone():
    """A packed batch on a ring of 3 against a plain model that gets one document at a time: the loss and a gradient."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).double()
    model = prepare(copy.deepcopy(plain))
    documents = [[(7 * i + 3 * j) % 40 for j in range(n)] for i, n in enumerate((9, 1, 14, 5, 6, 2))]
    cp = ContextParallel(Loopback(3, seed=2))
    batch = Collator(20, overflow="error", geometry=cp.geometry)(documents)
    local, plan = to_ring(batch, cp)
    logits = model(local["input_ids"], position_ids=local["position_ids"], ringspun_plan=plan).logits
    loss = token_loss(logits, local["shift_labels"], total_targets=local["num_items_in_batch"])
    loss.backward()
    alone = [plain(torch.tensor([tokens])).logits[0, :-1] for tokens in documents]
    targets = torch.tensor([t for tokens in documents for t in tokens[1:]])
    expected = torch.nn.functional.cross_entropy(torch.cat(alone), targets)
    expected.backward()
    assert local["num_items_in_batch"] == len(targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12, msg=name)
