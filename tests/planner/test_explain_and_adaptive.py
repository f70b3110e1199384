"""Verdicts, inference away from the literature's rows, and unequal ranks."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, DoubleRing, Full, Ring, Window
from ringspun.core.links import Link
from ringspun.core.wire import Format
from ringspun.errors import ConfigError
from ringspun.planner.adaptive import quickest
from ringspun.planner.explain import slowest_hop, verdict
from ringspun.planner.export import inference_data, train_config
from ringspun.planner.hardware import cluster
from ringspun.planner.inference import cache_bytes, decode, disaggregate, first_token_seconds, prefill_flops, travels
from ringspun.planner.models import model
from ringspun.planner.ring import Place, Work
from ringspun.planner.search import Question, search
from ringspun.planner.split import Split

LLAMA = model("llama-3-8b")
H100 = cluster("H100", 8)
WORK = Work(Format(1, 8, 8, 64, 64, "bfloat16", 2, 4), 1e12)
K = 1024


def flat(seconds):
    return Link((1, 1 << 40), (seconds, seconds), (seconds, seconds))


def test_long_sequences_are_ringed_and_short_ones_are_not():
    for seq_len, ring in ((8 * K, False), (128 * K, True)):
        question = Question(LLAMA, H100, seq_len)
        told = verdict(question, search(question))
        assert told.ring == ring and bool(told.instead) != ring
        assert told.reasons and told.changes


def test_what_fits_no_other_way_is_ringed_whatever_it_costs():
    question = Question(LLAMA, cluster("H100", 64, far="tcp-10"), 2 << 20, batch=1, max_tp=1)
    only = search(question, only=lambda split: split.ulysses == split.tp == 1)
    assert only[0].job.split == Split(ring=64)
    told = verdict(replace(question, model=LLAMA.model_copy(update={"heads": 8, "head_size": 512})), only)
    assert told.ring and any("do not fit" in reason for reason in told.reasons)


def test_the_slices_told_of_are_where_hops_begin_to_hide():
    for seq_len, hides in ((64 * 8 * K, False), (64 * 16 * K, True)):
        question = Question(LLAMA, cluster("H100", 64), seq_len, batch=1)
        (plan,) = search(question, keep=1, only=lambda split: split.ring == 64)
        assert all(slowest_hop(plan, backward=b).hides for b in (False, True)) == hides
        told = next(line for line in verdict(question, [plan]).changes if "hide from slices of" in line)
        assert (int(re.search(r"slices of ([\d,]+)", told)[1].replace(",", "")) <= seq_len / 64) == hides


def test_a_hop_hides_behind_what_its_mask_leaves_to_compute():
    """A step's pairs at the rate of its slice: a window of 100 leaves 100 a row, and a corner of the next slice."""
    window = Causal() & Window(100)

    def compute(mask, of=LLAMA):
        (plan,) = search(Question(of, H100, 128 * K, batch=1, mask=mask), keep=1, only=lambda s: s.ring == 8)
        return slowest_hop(plan).compute

    assert compute(Full()) == pytest.approx(2 * compute(Causal()), rel=0.05)
    assert compute(window) < 0.02 * compute(Causal())
    slid = LLAMA.model_copy(update={"window": 100})  # all of its layers slide
    assert compute(Causal(), slid) < 0.02 * compute(Causal())


def test_what_train_has_not_is_not_exported():
    (plan,) = search(Question(LLAMA, H100, 128 * K), keep=1, only=lambda split: split.tp == 2)
    with pytest.raises(ConfigError, match="split must be without tp"):
        train_config(plan)
    (plan,) = search(Question(LLAMA, H100, 128 * K, mask=Full()), keep=1, only=lambda split: split.tp == 1)
    with pytest.raises(ConfigError, match="mask must be causal"):
        train_config(plan)
    (plan,) = search(Question(model("qwen3-8b"), H100, 8 * K), keep=1, only=lambda split: split.tp == 1)
    with pytest.raises(ConfigError, match="model must be a Llama"):
        train_config(plan)
    (plan,) = search(Question(model("gpt2"), H100, 8 * K), keep=1, only=lambda split: split.ring == 8)
    with pytest.raises(ConfigError, match="model must be a Llama"):
        train_config(plan)


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20), st.integers(1, 1 << 20))
def test_prefill_in_two_parts_costs_as_much_as_in_one(first, cached, then):
    """Attention to what came before is counted once."""
    whole = prefill_flops(LLAMA, first + then, cached)
    assert prefill_flops(LLAMA, first, cached) + prefill_flops(LLAMA, then, cached + first) == pytest.approx(whole)


def test_few_new_tokens_make_queries_travel():
    of = {"ranks": 4, "flops": 540e12, "bytes_per_s": 26e9}
    assert [travels(LLAMA, new, 128 * K - new, **of) for new in (16, 128 * K)] == ["q", "kv"]
    for new, cached in ((0, 5), (5, -1)):
        with pytest.raises(ConfigError, match="new must be more than 0"):
            travels(LLAMA, new, cached, **of)


def test_decode_is_never_quickest_on_a_ring():
    for far in (False, True):
        link = cluster("H100", 64).far if far else H100.near
        for ranks in (2, 8, 64):
            for cached in (8 * K, 1 << 20, 1 << 24):
                told = decode(H100.device, link, LLAMA, cached, ranks)
                assert told.best != "a ring" and told.ring > told.merge
    merges = [decode(H100.device, H100.near, LLAMA, 1 << 20, n) for n in (4, 8, 16)]
    (first, then) = (b.merge - b.local - a.merge + a.local for a, b in itertools.pairwise(merges))
    assert first == pytest.approx(then) and first > H100.near.latency_s  # one turn more for twice the ranks
    long = decode(H100.device, H100.near, LLAMA, 1 << 22, 8)
    assert long.best == "one merge" and long.whole > long.merge
    assert decode(H100.device, H100.near, LLAMA, 1 << 22, 1).best == "one rank"


@pytest.mark.parametrize(("cached", "best"), [(128 * K, "one rank"), (600 * K, "one merge")])
def test_a_cache_that_does_not_fit_one_rank_is_not_put_there(cached, best):
    """Over TCP one rank alone is quickest, but 600K tokens take 75 GiB, and weights 15."""
    tcp = cluster("H100", 8, far="tcp-10", node=1).far
    told = decode(H100.device, tcp, LLAMA, cached, 8)
    assert told.whole < told.merge and told.best == best


def test_prompts_and_answers_get_devices_in_proportion():
    long, chatty = (disaggregate(LLAMA, H100.device, 16, prompt=p, answer=a) for p, a in ((1 << 17, 100), (1000, 4000)))
    assert long.prefill > chatty.prefill and long.prefill + long.decode == 16
    assert "device-seconds of prefill" in long.why
    with pytest.raises(ConfigError, match="devices must be at least 2"):
        disaggregate(LLAMA, H100.device, 1, prompt=1, answer=1)


def test_the_cache_of_sliding_layers_stops_growing():
    gemma = model("gemma-2-9b")
    short, long = (cache_bytes(gemma, n) for n in (4096, 8192))
    assert long == pytest.approx(1.5 * short)
    assert cache_bytes(LLAMA, 1 << 20) == 2 * 32 * (1 << 20) * 1024 * 2


def test_inference_is_told():
    data = inference_data(LLAMA, cluster("H100", 8, node=1), 8, new=8 * K)
    assert data["first_token_s"] == first_token_seconds(LLAMA, 8 * K, 8, H100.device.attention)
    assert any("decode: do not ring" in line for line in data["told"])
    alone = inference_data(LLAMA, H100, 1, new=8 * K)
    assert not any("decode" in line for line in alone["told"])
    assert alone["travels"] is None and alone["told"][0] == "prefill: on one rank nothing travels"


def test_shares_follow_speeds():
    """Half as fast, half the tokens, under a mask that sees all; and nobody waits."""
    ways = quickest(Full(), 3000, [1.0, 1.0, 0.5, 0.5], WORK, Place(flat(1e-9), flat(1e-9), 4))
    assert ways[0].tokens == pytest.approx((1000, 1000, 500, 500), abs=2)
    assert [w.seconds for w in ways] == sorted(w.seconds for w in ways)
    equal = next(w for w in ways if w.layout == Contiguous() and w.route == Ring())
    assert ways[0].seconds < 0.75 * equal.seconds


def test_equal_ranks_want_an_even_layout_and_slow_links_another_route():
    ways = quickest(Causal(), 4096, [1.0] * 4, WORK, Place(flat(1e-9), flat(1e-9), 4))
    assert str(ways[0].layout) in ("zigzag", "striped") and ways[0].layout != Contiguous()
    step = ways[0].seconds / 14
    between = quickest(Full(), 4096, [1.0] * 4, WORK, Place(flat(1e-9), flat(4 * step), 2))
    assert between[0].route == DoubleRing(2)


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 0.0], [1.0, float("nan")]])
def test_speeds_that_make_no_sense(speeds):
    with pytest.raises(ConfigError, match="speeds must be"):
        quickest(Full(), 64, speeds, WORK, Place(flat(1.0), flat(1.0), 2))
