"""Time of a step and the search: laws, one published figure, and when not to ring."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, DoubleRing, Full, Ring
from ringspun.errors import ConfigError
from ringspun.planner.flops import attention_factor, causal_pairs, linear_factor, model_flops
from ringspun.planner.hardware import cluster
from ringspun.planner.models import model
from ringspun.planner.overlap import NEVER, hop, least_slice
from ringspun.planner.rates import attention_rate, gather_seconds
from ringspun.planner.search import Question, memory_of, search, splits, ways
from ringspun.planner.split import Split
from ringspun.planner.time import Job, least_seconds, step
from ringspun.planner.traffic import layer_bytes

LLAMA = model("llama-3-8b")
H100 = cluster("H100", 8)
K = 1024


def test_recomputing_costs_what_it_costs():
    """One sixth of attention for scores, two sevenths for the whole layer, one third of linear layers."""
    assert attention_factor("none") / attention_factor("none", scores_kept=True) == pytest.approx(1 + 1 / 6)
    assert attention_factor("layer") / attention_factor("attention") == pytest.approx(1 + 2 / 7)
    assert linear_factor("layer") / linear_factor("none") == pytest.approx(1 + 1 / 3)


@settings(max_examples=30)
@given(st.integers(1, 300), st.none() | st.integers(1, 300))
def test_causal_pairs_are_the_masks(seq_len, window):
    assert causal_pairs(seq_len, window) == sum(min(q + 1, window or seq_len) for q in range(seq_len))


def test_model_flops_are_six_per_parameter_and_token_and_attention():
    matrices = LLAMA.parameters - LLAMA.vocab * LLAMA.hidden  # the embedding is looked up
    assert model_flops(LLAMA, 2, causal=False) / 2 == pytest.approx(6 * matrices, rel=1e-3)
    full, causal = (model_flops(LLAMA, 1 << 20, causal=c) for c in (False, True))
    assert full / causal == pytest.approx(2, rel=0.05)
    job = Job(LLAMA, H100, Split(ring=8), 128 * K)
    assert step(job).flops * 8 == pytest.approx(model_flops(LLAMA, 128 * K))
    assert step(job).dense_flops * 8 == pytest.approx(model_flops(LLAMA, 128 * K, causal=False))


def test_a_published_mfu():
    """USP, arXiv 2405.07719: 47 %, two nodes of 8 A800, Llama 3 8B, 208K tokens; masked pairs not counted."""
    job = Job(LLAMA, cluster("A800", 16), Split(ring=2, ulysses=8), 208 * K)
    assert step(job).mfu == pytest.approx(0.47, abs=0.05)


@settings(max_examples=30)
@given(
    st.sampled_from([Split(ring=8), Split(ring=4, ulysses=2), Split(ring=2, tp=4), Split(ulysses=8), Split(dp=8)]),
    st.sampled_from([8 * K, 128 * K, 1024 * K]),
    st.sampled_from(["none", "attention", "layer"]),
    st.sampled_from([1, 3]),
    st.sampled_from([8, 2]),
)
def test_no_layout_or_route_beats_the_bound(split, seq_len, checkpointing, zero, node):
    job = Job(LLAMA, cluster("H100", 8, node=node), split, seq_len, checkpointing=checkpointing, zero=zero)
    bound = least_seconds(job)
    for layout, route in ways(job):
        assert step(replace(job, layout=layout, route=route)).total >= bound * (1 - 1e-9)


def test_items_are_seconds_and_mfu_is_a_part():
    found = step(Job(LLAMA, H100, Split(ring=8), 64 * K))
    assert all(v >= 0 for v in found.items.values()) and found.total == sum(found.items.values())
    assert 0 < found.mfu < found.dense_mfu < 1
    assert found.tokens_per_s == pytest.approx(64 * K / found.total)


def test_short_slices_and_small_batches_are_slow():
    rates = [attention_rate(H100.device, 32, rows) for rows in (16, 128, 1024, 65536)]
    assert rates == sorted(rates) and rates[-1] > 0.95 * H100.device.attention > 10 * rates[0]
    assert attention_rate(H100.device, 1, 1024) < 0.1 * attention_rate(H100.device, 32, 1024) * 2


@given(st.sampled_from(["A100", "H100", "MI300X", "TPU-v5e"]), st.booleans(), st.booleans())
def test_from_the_least_slice_on_every_hop_hides(device, far, causal):
    found = cluster(device, 64)
    link = found.far if far else found.near
    least = least_slice(found.device, link, LLAMA, causal=causal)
    assert 128 <= least < NEVER
    for factor, hides in ((1.01, True), (2, True), (10, True), (0.95, least <= 128)):
        tokens = math.ceil(least * factor)
        told = all(hop(found.device, link, LLAMA, tokens, causal=causal, backward=b).hides for b in (False, True))
        assert told or not hides
        if factor < 1 and least > 256:
            assert not told


def test_grouped_heads_and_full_masks_hide_sooner():
    far = cluster("H100", 64).far
    many = LLAMA.model_copy(update={"kv_heads": 32})
    assert least_slice(H100.device, far, LLAMA) < least_slice(H100.device, far, many) / 2
    assert least_slice(H100.device, far, LLAMA, causal=False) < least_slice(H100.device, far, LLAMA)


@given(st.integers(1, 64), st.integers(1, 1 << 30))
def test_gathering_more_takes_longer(devices, n_bytes):
    found = cluster("H100", 64)
    assert gather_seconds(found, devices, n_bytes) <= gather_seconds(found, devices, 2 * n_bytes)
    assert gather_seconds(found, 1, n_bytes) == 0.0


def test_every_split_uses_every_device_and_fits_the_heads():
    question = Question(LLAMA, cluster("H100", 24, node=8))
    found = list(splits(question, batch=6))
    assert len(found) == len(set(found)) > 10
    for split in found:
        split.check(LLAMA)
        assert split.devices == 24 and split.tp <= 8 and 6 % split.dp == 0
    assert Split(ring=3, tp=8) in found


@pytest.mark.parametrize(("where", "seq_len"), [(H100, 64 * K), (cluster("H100", 8, node=2, far="tcp-100"), 16 * K)])
def test_the_search_is_exhaustive(where, seq_len):
    """Best first, and nothing that it did not count exactly is better."""
    question = Question(LLAMA, where, seq_len, batch=2)
    plans = search(question, keep=3)
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
    assert len({p.job.split for p in plans}) == 3
    best: dict[Split, float] = {}
    for split in splits(question, 2):
        for checkpointing in ("none", "attention", "layer"):
            for zero in (1, 2, 3):
                job = Job(LLAMA, where, split, seq_len, checkpointing=checkpointing, zero=zero)
                if not memory_of(question, job).fits:
                    continue
                for layout, route in ways(job):
                    found = step(replace(job, layout=layout, route=route))
                    passes = 2 // split.dp
                    seconds = passes * (found.total - found.items["optimizer"]) + found.items["optimizer"]
                    best[split] = min(best.get(split, math.inf), seconds)
    assert [p.seconds for p in plans] == pytest.approx(sorted(best.values())[:3], rel=0.005)


def test_a_thousand_devices_are_searched_in_seconds():
    for seq_len, batch in ((1 << 20, None), (1 << 22, 1), (None, None)):
        start = time.process_time()
        plans = search(Question(model("llama-3-70b"), cluster("H100", 1024), seq_len, batch))
        assert time.process_time() - start < 5
        assert plans and all(p.job.split.devices == 1024 and p.memory.fits for p in plans)


def test_a_hundred_thousand_devices_are_more_than_one_ring():
    """Rings end at 16,384 ranks; a prime number of devices goes into nothing."""
    start = time.process_time()
    plans = search(Question(LLAMA, cluster("H100", 65_536), 1 << 24, batch=16), keep=1)
    assert plans[0].job.split.ring <= 16_384 and time.process_time() - start < 5
    with pytest.raises(
        ConfigError, match=r"devices must go into heads, a batch and a ring of at most 16,384; got 65,537"
    ):
        search(Question(LLAMA, cluster("H100", 65_537), 1 << 24, batch=16))


def test_the_longest_is_the_longest():
    plans = search(Question(LLAMA, cluster("H100", 8)))
    assert [p.longest.tokens for p in plans] == sorted((p.longest.tokens for p in plans), reverse=True)
    for plan in plans:
        assert plan.job.seq_len <= plan.longest.tokens < plan.job.seq_len + 1


def test_a_step_of_the_longest_has_a_sequence_for_every_replica():
    plans = search(Question(LLAMA, cluster("H100", 64)), keep=100)
    assert max(p.job.split.dp for p in plans) >= 8
    assert all(p.passes >= 1 and p.tokens_per_s > 0 and p.mfu > 0 for p in plans)


def test_a_slow_link_between_nodes_wants_the_double_ring():
    """Slices that hide inside a node and not between."""
    slow = cluster("A100", 32, node=4, far="tcp-100")
    job = Job(model("llama-7b"), slow, Split(ring=32), 256 * K)
    single, double = (step(replace(job, route=route)) for route in (Ring(), DoubleRing(4)))
    assert double.items["ring, not hidden"] < 0.5 * single.items["ring, not hidden"]
    assert (DoubleRing(4) in [route for _, route in ways(job)]) and DoubleRing(4) not in [
        r for _, r in ways(replace(job, cluster=H100))
    ]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (lambda: Question(LLAMA, H100, 0), "seq_len must be at least 1; got 0"),
        (lambda: Question(LLAMA, H100, 8192, batch=-1), "batch must be at least 1; got -1"),
        (lambda: Question(LLAMA, H100, price=-1.0), "price must be a number >= 0"),
        (lambda: search(Question(LLAMA, H100, 10**9, batch=1)), "seq_len must fit 8 x H100; got 1,000,000,000 tokens"),
        (
            lambda: search(Question(LLAMA, H100, 370_000, batch=1), only=lambda s: s.ring == 8),
            "At most about 359,",  # what a ring holds, not what splitting heads does
        ),
        (
            lambda: search(Question(LLAMA, H100, 4, batch=1)),
            "seq_len must give each device a token; got 4 tokens for 8",
        ),
        (lambda: search(Question(model("llama-3-405b"), H100, 8192)), "model must fit 8 x H100; got llama-3-405b"),
    ],
)
def test_what_cannot_be_is_told(question, words):
    with pytest.raises(ConfigError) as told:
        question()
    assert words in str(told.value)


def test_masks_are_what_is_counted():
    causal, full = (step(Job(LLAMA, H100, Split(ring=8), 128 * K, mask=mask)) for mask in (Causal(), Full()))
    assert full.items["attention"] == pytest.approx(2 * causal.items["attention"], rel=0.05)
    slid = step(Job(model("mistral-7b"), H100, Split(ring=8), 128 * K, route=Ring()))
    assert slid.items["attention"] < 0.2 * causal.items["attention"]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_bytes_of_a_layer_are_those_of_the_literature(size):
    """arXiv 2405.07719 table 2, in elements of tokens x width: Ulysses 8 / N, tensor parallel with sequence parallel
    10, a ring 4 of keys and values, here 2 of them in float32, and none on its last hop."""
    llama, seq_len = model("llama-7b"), 64 * K
    element, whole = 2, 64 * K * 4096
    others = (size - 1) / size
    job = Job(llama, H100, Split(), seq_len, mask=Full(), checkpointing="none")
    of = {name: replace(job, split=Split(**{name: size})) for name in ("ring", "ulysses", "tp")}
    found = {name: layer_bytes(replace(job, layout=Contiguous()))[name] for name, job in of.items()}
    assert found["ulysses"] == pytest.approx(8 / size * whole * element * others)
    assert found["tp"] == pytest.approx(10 * whole * element * others)
    assert found["ring"] == pytest.approx((2 + 2 + 2 * 2) * whole * element * others, rel=1e-3)
    assert layer_bytes(of["ring"])["tp"] == layer_bytes(of["tp"])["ring"] == 0
    again = layer_bytes(replace(of["ring"], layout=Contiguous(), checkpointing="layer"))["ring"]
    assert again == pytest.approx(found["ring"] * 10 / 8, rel=1e-3)  # keys and values go round once more


def test_gathering_parameters_hides_behind_long_slices_alone():
    """A layer's gather and reduction, each less a layer's compute: nothing on long slices, nearly all on short ones."""
    slow = cluster("H100", 8, node=1)
    long, short = (Job(LLAMA, slow, Split(ring=8), n) for n in (512 * K, 1 * K))
    assert step(long).items["sharding, not hidden"] == 0
    for zero, gathers, reduces, behind in ((3, 2, 1, 1.0), (1, 0, 2, 3.5 / 4.5)):
        found = step(replace(short, zero=zero))
        messages = (gather_seconds(slow, 8, LLAMA.layer_parameters * n) for n in (2, 4))
        alone = LLAMA.layers * sum(n * seconds for n, seconds in zip((gathers, reduces), messages, strict=True))
        compute = sum(found.items[name] for name in ("linear layers", "norms and sums", "attention"))
        assert alone - found.items["sharding, not hidden"] == pytest.approx(behind * compute)


def test_every_device_of_a_node_brings_in_its_part():
    """Eight ports to a node, each an eighth of what one would carry."""
    many, one = (gather_seconds(cluster("H100", 64, node=node), 64, 1 << 34) for node in (8, 1))
    assert many == pytest.approx(one / 8, rel=0.15)
    stride = gather_seconds(cluster("H100", 64), 8, 1 << 34, stride=8)
    assert stride > 6 * many  # one of a node


def test_heads_that_outnumber_key_heads_hold_them_twice():
    assert [Split(ulysses=u).kv_copies(LLAMA) for u in (4, 8, 16, 32)] == [1, 1, 2, 4]
    eight, sixteen = (
        layer_bytes(Job(LLAMA, cluster("H100", 16), Split(ulysses=u, ring=16 // u), 64 * K)) for u in (8, 16)
    )
    assert sixteen["ulysses"] > eight["ulysses"]
