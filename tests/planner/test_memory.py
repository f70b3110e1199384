"""Memory: the items that reports of running out of it are about, and laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, Documents, DocumentZigzag
from ringspun.core.accounting import wait
from ringspun.core.geometry import Geometry
from ringspun.core.route import Ring
from ringspun.errors import ConfigError
from ringspun.planner.flops import CHECKPOINTING
from ringspun.planner.hardware import GIB
from ringspun.planner.memory import METHODS, TORCH, TRUST, advice, kept_bytes, logit_bytes, longest, memory
from ringspun.planner.models import known_models, model
from ringspun.planner.split import Split

LLAMA = model("llama-3-8b")
H100 = 80 * GIB


def test_q1_kept_layer_inputs_are_counted():
    """pytorch#158657: layers x tokens x hidden x bytes."""
    for ring, gib in ((1, 122.07), (8, 15.26)):
        assert kept_bytes(LLAMA, 500_000 / ring, TORCH) / GIB == pytest.approx(gib, abs=0.005)
        assert memory(LLAMA, 500_000 / ring, Split(ring=ring), memory_bytes=H100).standing[
            "kept activations"
        ] == kept_bytes(LLAMA, 500_000 / ring, TORCH)


@pytest.mark.parametrize(
    ("tokens", "vocab", "gib"), [(20480, 131072, 10.0), (8192, 248320, 7.58), (131072, 128256, 62.6)]
)
def test_q3_the_loss_is_counted_and_warned_of(tokens, vocab, gib):
    """NeMo RL#4222: float32 logits, and as much for their gradient."""
    assert logit_bytes(tokens, vocab) / GIB == pytest.approx(gib, rel=1e-3)
    wide = LLAMA.model_copy(update={"vocab": vocab})
    found = memory(wide, tokens, Split(ring=8), memory_bytes=H100)
    assert found.phases["loss"]["logits and their gradient"] == 2 * logit_bytes(tokens, vocab)
    told = " ".join(advice(found, wide, tokens, TORCH))
    assert "the loss, not attention, takes most" in told and "in chunks that are computed again" in told


def test_q3_a_chunked_loss_is_not_warned_of():
    chunked = TORCH.model_copy(update={"logit_chunk": 1024})
    found = memory(LLAMA, 131_072, Split(ring=8), memory_bytes=H100, recipe=chunked)
    assert found.phases["loss"]["logits and their gradient"] == 2 * logit_bytes(1024, LLAMA.vocab)
    assert "loss" not in " ".join(advice(found, LLAMA, 131_072, chunked))


def test_q7_a_first_step_that_fits_proves_nothing():
    """axolotl#2412: the optimizer's state is made at the first step."""
    found = memory(LLAMA, 8192, Split(ring=8), memory_bytes=H100)
    assert found.total - found.first_step == pytest.approx(8 * LLAMA.parameters / 8)
    assert "is not representative" in " ".join(advice(found, LLAMA, 8192, TORCH))


def test_q8_documents_are_balanced_and_imbalance_is_told():
    """pytorch#189902: documents of 4 and 12 tokens on 2 ranks, 88 pairs in all."""
    documents = Documents([4, 12])
    mask = Causal() & documents

    def of(layout):
        ranks = Geometry(2, (0, 1), layout, Ring()).schedule(mask, 16, documents)
        return [int(s.forward.pairs.sum()) for s in ranks], wait([s.forward for s in ranks])

    assert of(DocumentZigzag())[0] == [44, 44]
    assert of(Contiguous())[0] == [20, 68]
    assert of(Contiguous())[1] > 1.3 > of(DocumentZigzag())[1]


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_q8_random_packs_are_within_a_tenth(ring):
    rng = np.random.default_rng(ring)
    for _ in range(5):
        lengths = rng.integers(40, 900, 12).tolist()
        documents = Documents(lengths)
        ranks = Geometry(ring, tuple(range(ring)), DocumentZigzag(), Ring()).schedule(
            Causal() & documents, sum(lengths), documents
        )
        pairs = [int(s.forward.pairs.sum()) for s in ranks]
        assert max(pairs) <= 1.1 * sum(pairs) / ring


@given(st.sampled_from(sorted(known_models())), st.sampled_from([1, 2, 8, 64]), st.sampled_from(METHODS))
def test_the_longest_length_fits_and_a_little_more_does_not(name, ring, method):
    one, split = model(name), Split(ring=ring)
    found = longest(one, split, memory_bytes=H100, method=method)
    if found.tokens == 0:
        assert found.limit == "parameters"
        return
    fits = [
        memory(one, found.tokens * f / ring, split, memory_bytes=H100, method=method).fits for f in (0.9999, 1.0001)
    ]
    assert fits == [True, False]
    assert (found.low, found.high) == (found.tokens / TRUST, found.tokens * TRUST)


@given(st.sampled_from([2, 4, 8, 16]), st.sampled_from([1, 2, 3]), st.sampled_from(CHECKPOINTING))
def test_more_devices_never_need_more_memory(ring, zero, checkpointing):
    def total(n):
        return memory(LLAMA, 65536 / n, Split(ring=n), memory_bytes=H100, zero=zero, checkpointing=checkpointing).total

    assert total(2 * ring) < total(ring)


def test_stronger_sharding_needs_less_and_keeping_more_needs_more():
    by_zero = [memory(LLAMA, 8192, Split(ring=8), memory_bytes=H100, zero=z).standing for z in (0, 1, 2, 3)]
    states = [s["parameters"] + s["gradients"] + s["optimizer"] for s in by_zero]
    assert states == sorted(states, reverse=True) and len(set(states)) == 4
    assert states[3] == pytest.approx(16 * LLAMA.parameters / 8)
    kept = [kept_bytes(LLAMA, 8192, TORCH, c) for c in ("layer", "attention", "none")]
    assert kept == sorted(kept) and len(set(kept)) == 3


def test_ring_blocks_do_not_grow_with_the_ring():
    """Q4: two blocks in flight, however many ranks."""

    def blocks(ring):
        found = memory(LLAMA, 4096, Split(ring=ring), memory_bytes=H100)
        return found.phases["attention"]["key/value blocks in flight"]

    assert blocks(1) == 0.0
    assert blocks(2) == blocks(64) == 2 * 2 * 4096 * LLAMA.kv_width * 2


def test_a_batch_shares_the_length():
    one, four = (longest(LLAMA, Split(ring=8), memory_bytes=H100, batch=b).tokens for b in (1, 4))
    assert one == pytest.approx(4 * four)
    with pytest.raises(ConfigError, match="batch must be at least 1"):
        longest(LLAMA, Split(), memory_bytes=H100, batch=0)


def test_splits_that_make_no_sense():
    with pytest.raises(ConfigError, match=r"ring must be a whole number of devices >= 1; got 0"):
        Split(ring=0)
    with pytest.raises(ConfigError, match=r"tp must divide heads; got 3 and llama-3-8b's 32 heads"):
        Split(tp=3).check(LLAMA)
    with pytest.raises(ConfigError, match=r"ulysses \* tp must divide heads; got 64"):
        Split(tp=8, ulysses=8).check(LLAMA)
    Split(ring=7, tp=8, ulysses=4).check(LLAMA)
