"""The numbers behind pictures: right values of the walk of R = 4, and laws for any mask, layout and route."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Balanced, Causal, Contiguous, Documents, DocumentZigzag, Striped, Window, Zigzag
from ringspun.core import accounting
from ringspun.core import regions as rg
from ringspun.core.route import AllGather, Bidirectional, Direct, DoubleRing, Ring
from ringspun.core.wire import Format
from ringspun.pictures import Scene
from ringspun.pictures.figures import OF_SCENE, Kind, balance, compare, layout, mask, memory, schedule, timeline
from ringspun.pictures.figures.schedule import outline
from ringspun.planner.hardware import cluster
from ringspun.planner.simulate import simulate
from tests.core.strategies import plans

WALK = Scene.of(16, 4)
ROUTES = (Ring(), Direct(), Bidirectional(), DoubleRing(2), AllGather(), Ring(3))


def on_h100(scene):
    return timeline.on(scene, cluster("H100", scene.ring_size))


def test_the_walk_of_four_ranks():
    """The page on the core has the same: whose block at which step, a triangle at home, half a square elsewhere."""
    found = schedule.of(WALK)
    assert found.forward.sources == ((0, 3, 2, 1), (1, 0, 3, 2), (2, 1, 0, 3), (3, 2, 1, 0))
    assert found.forward.pairs == ((10, 8, 8, 8),) * 4
    assert found.forward.kinds == ((Kind.CAUSAL, Kind.FULL, Kind.FULL, Kind.FULL),) * 4
    assert found.backward.kinds == ((Kind.IDLE, Kind.FULL, Kind.FULL, Kind.FULL, Kind.CAUSAL),) * 4
    assert (found.order, found.tokens, found.notes) == ("sequence", (4, 4, 4, 4), ())
    sent = [(step, a, b, owner, rows) for step, _, _, a, b, _, owner, rows, _ in found.forward.messages]
    assert sent[:4] == [(0, 0, 1, 0, 2), (0, 1, 2, 1, 4), (0, 2, 3, 2, 4), (0, 3, 0, 3, 4)]  # rank 0 keeps two rows
    assert [m[:3] for m in sent[4:8]] == [(1, 0, 1), (1, 1, 2), (1, 2, 3), (1, 3, 0)] and len(sent) == 12
    mine = [tile[3:7] for tile in found.forward.tiles if tile[:2] == (1, 1)]  # rank 1 with the block of rank 0
    assert sorted(mine) == [(2, 4, 0, 2), (12, 14, 0, 2)]


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("where", [Contiguous(), Zigzag(), Striped()], ids=str)
@pytest.mark.parametrize("backward", ["keys", "queries"])
def test_tiles_of_all_steps_are_the_mask(where, route, backward):
    """Of routes in strides once in each."""
    backward = "keys" if isinstance(route, AllGather) else backward
    for allowed in (Causal(), Window(5) & Documents([7, 2, 8])):
        scene = Scene.of(18, 4, allowed, where, route, backward=backward)
        found = schedule.of(scene)
        times = 4 if isinstance(route, AllGather) else 1
        for one in (found.forward, found.backward):
            seen = sum(rg.as_array(np.array([tile[3:]]), 18, 18).astype(int) for tile in one.tiles)
            np.testing.assert_array_equal(seen, times * allowed.as_array(18))
            assert sum(map(sum, one.pairs)) == times * allowed.as_array(18).sum()
        assert found.backward.travels == backward


@given(plans(40), st.integers(1, 40))
def test_masks_and_layouts_in_cells_of_any_size(plan, most):
    allowed, length, ring_size, where = plan
    scene = Scene.of(length, ring_size, allowed, where)
    found, held = mask.of(scene, most), layout.of(scene, most, most_ranks=3)
    dense = allowed.as_array(length).astype(int)
    for i, row in enumerate(found.allowed):
        for j, pairs in enumerate(row):
            cell = dense[found.queries[i] : found.queries[i + 1], found.keys[j] : found.keys[j + 1]]
            assert pairs == cell.sum()
    assert found.pairs == dense.sum() and len(found.allowed) <= most
    part = scene.sides.queries
    for i, row in enumerate(held.held):
        mine = np.concatenate([part.indices(r) for r in range(held.ranks[i], held.ranks[i + 1])])
        assert list(row) == np.histogram(mine, held.columns)[0].tolist() if length else row == ()
        assert held.tokens[i] == len(mine)


def test_every_message_of_64_ranks_is_told_and_of_more_ranks_how_many():
    found = schedule.of(Scene.of(256, 64))
    assert [one.sent for one in (found.forward, found.backward)] == [64 * 63, 2 * 64 * 63]
    assert all(len(one.messages) == one.sent for one in (found.forward, found.backward))
    assert "messages" not in " ".join(found.notes)
    some = schedule.of(Scene.of(4096, 1024))
    assert some.forward.messages == () and some.forward.sent == 16 * 1023
    assert "forward: 16,368 messages, which are not drawn" in some.notes


@given(plans(30))
def test_tiles_in_any_layout_have_the_schedules_pairs(plan):
    allowed, length, ring_size, where = plan
    found = schedule.of(Scene.of(length, ring_size, allowed, where))
    for one in (found.forward, found.backward):
        pairs = np.zeros((ring_size, len(one.steps) - 1), int)
        for rank, step, *_, q0, q1, k0, k1, lo, hi in one.tiles:
            pairs[rank, step] += rg.count(np.array([[q0, q1, k0, k1, lo, hi]]))[0]
        assert pairs.tolist() == [list(row) for row in one.pairs]


def test_strides_without_heads_compute_nothing():
    """By all_gather 2 KV heads come in 2 strides, however many the ring has."""
    scene = Scene.of(18, 4, route=AllGather(), wire=Format(1, 8, 2, 64, 64, "bfloat16", 2, 4))
    found, counted = schedule.of(scene), balance.of(scene)
    for one, balanced in ((found.forward, counted.forward), (found.backward, counted.backward)):
        assert one.pairs == balanced.pairs and sum(map(sum, one.pairs)) == 2 * (18 * 19 // 2)
        busy = {step for rank, step, *_ in one.tiles}
        assert len(busy) == 2 and all((row[s] == Kind.IDLE) == (s not in busy) for row in one.kinds for s in range(5))
    assert "heads in 2 strides" in " ".join(found.notes)


def test_balance_of_contiguous_and_zigzag():
    even, uneven = balance.of(WALK), balance.of(Scene.of(16, 4, layout=Contiguous()))
    assert even.forward.pairs == ((10, 8, 8, 8),) * 4 and even.forward.wait == 1
    assert uneven.forward.pairs == ((10, 0, 0, 0), (10, 16, 0, 0), (10, 16, 16, 0), (10, 16, 16, 16))
    assert uneven.forward.imbalance == pytest.approx((1, 4 / 3, 2, 4))
    assert uneven.forward.wait == pytest.approx((10 + 3 * 16) / 34)
    assert uneven.links[0][:2] == (2, 3) and not any(a == 3 and forward for a, _, forward, _ in uneven.links)


def test_bytes_of_links_are_those_of_the_account():
    """The core's page counts them: three messages of rank 1, (4 + 2 + 4) rows."""
    scene = Scene.of(16, 4, wire=Format(1, 8, 2, 64, 64, "bfloat16", 2, 4))
    found = balance.of(scene)
    assert {link[:2]: link[2] for link in found.links}[1, 2] == 5504 == found.forward.sent_bytes[1]
    assert sum(link[3] for link in found.links) == sum(found.backward.sent_bytes)
    assert sum(m[-1] for m in schedule.of(scene).backward.messages) == sum(found.backward.sent_bytes)


def test_memory_is_the_accounts():
    scene = Scene.of(64, 4)
    found = memory.of(scene)
    for row, one in zip(found.held, scene.schedules, strict=True):
        assert sum(row) == accounting.memory(one, scene.wire).total
    assert found.items[0] == "inputs" and found.whole[0] == 4 * found.held[0][0]


@pytest.mark.parametrize("where", [Contiguous(), Zigzag()], ids=str)
def test_a_predicted_run_is_the_simulations(where):
    scene = Scene.of(4096, 4, layout=where)
    work, place = on_h100(scene)
    (run,) = timeline.of(scene, work, place).runs
    both = [simulate(scene.schedules, work, place, backward=back) for back in (False, True)]
    assert run.seconds == tuple(one.total for one in both)
    for rank in range(4):
        assert run.spent_s(rank, "compute") == pytest.approx(sum(one.computed[rank] for one in both))
        assert run.spent_s(rank, "wait") == pytest.approx(sum(one.waited[rank] for one in both))
        mine = [s for s in run.spans if s.ring_rank == rank]
        assert all(a.end_s <= b.start_s + 1e-15 for a, b in pairwise(mine))
    sent = balance.of(scene)
    assert sum(t.n_bytes for t in run.transfers) == sum(sent.forward.sent_bytes) + sum(sent.backward.sent_bytes)
    for edge in {(t.sender, t.receiver) for t in run.transfers}:
        on_link = sorted((t.start_s, t.end_s) for t in run.transfers if (t.sender, t.receiver) == edge)
        assert all(end <= start + 1e-15 for (_, end), (start, _) in pairwise(on_link))


def test_some_ranks_of_unequal_speeds_compute_as_long_as_all_would(monkeypatch):
    scene = Scene.of(4096, 8, layout=Balanced(speeds=(1, 1, 2, 2, 1, 1, 4, 4)))
    work, place = on_h100(scene)
    (whole,) = timeline.of(scene, work, place).runs
    monkeypatch.setattr("ringspun.pictures.scene.MOST_RANKS", 3)
    some = Scene.of(4096, 8, layout=scene.sides.queries.layout)
    (run,) = timeline.of(some, work, place).runs
    assert some.ranks == (0, 3, 7)
    for rank in some.ranks:
        assert run.spent_s(rank, "compute") == pytest.approx(whole.spent_s(rank, "compute"))


def test_ways_are_compared_by_their_own_figures():
    scenes = [Scene.of(8192, 4, layout=where) for where in (Contiguous(), Zigzag())]
    found = compare.of(scenes, *on_h100(scenes[0]))
    assert found.quickest == 1 and [w.layout for w in found.ways] == ["contiguous", "zigzag"]
    for way, scene in zip(found.ways, scenes, strict=True):
        counted = balance.of(scene)
        assert way.imbalance == counted.forward.imbalance and way.wait[0] == counted.forward.wait
        assert way.sent_bytes == (max(counted.forward.sent_bytes), max(counted.backward.sent_bytes))
        assert way.memory_bytes == max(map(sum, memory.of(scene).held))


def test_ways_are_predicted_alike_where_one_is_counted_on_some_ranks(monkeypatch):
    """Else the clock that waits at every step would stand beside one that does not."""
    monkeypatch.setattr("ringspun.pictures.scene.MOST_PIECES", 200)
    documents = Documents([40] * 100)
    scenes = [Scene.of(4000, 8, layout=where, documents=documents) for where in (Contiguous(), DocumentZigzag())]
    assert [len(scene.ranks) for scene in scenes] == [8, 3]
    found = compare.of(scenes, *on_h100(scenes[0]))
    alone = timeline.predicted(scenes[0], *on_h100(scenes[0]), in_step=True)
    assert found.ways[0].seconds == alone.seconds
    assert found.notes == (
        "documentzigzag, ring: 3 of 8 ranks are counted and drawn, evenly spread", timeline.IN_STEP,
    )  # fmt: skip
    assert timeline.IN_STEP not in compare.of(scenes[:1], *on_h100(scenes[0])).notes


@given(st.integers(1, 12), st.integers(1, 12), st.integers(-12, 12), st.integers(-12, 12))
def test_an_outline_is_about_as_large_as_its_pairs(rows, columns, a, b):
    """Half a pair at each end of a diagonal, at most."""
    region = rg.tighten(np.array([[0, rows, 0, columns, min(a, b), max(a, b)]]))
    for tile in region:
        q, k = np.array(outline(tile.tolist())).T
        area = abs(q @ np.roll(k, 1) - k @ np.roll(q, 1)) / 2
        assert area == pytest.approx(rg.count(tile[None])[0], abs=0.5)


def test_large_inputs_are_summed_up_and_say_so():
    """1,024 ranks and 10,000 documents; the clock's bar is wide, for machines differ."""
    documents = Documents(np.random.default_rng(0).integers(100, 3000, 10_000))
    began = time.process_time()
    for scene in (Scene.of(1 << 24, 1024), Scene.of(documents.end, 64, documents=documents)):
        figures = {name: make(scene) for name, make in OF_SCENE.items()}
        cells = figures["schedule"].forward.kinds
        assert len(cells) <= 64 and len(cells[0]) <= 64 and len(figures["mask"].allowed) <= 64
        assert figures["layout"].notes and figures["mask"].pairs == sum(map(sum, figures["mask"].allowed))
        assert sum(figures["layout"].tokens) == scene.sides.queries.seq_len
        assert all(len(json.dumps(f.as_dict())) < 1 << 20 for f in figures.values())
    assert "16 of 1,024 ranks" in " ".join(schedule.of(Scene.of(1 << 20, 1024)).notes)
    assert time.process_time() - began < 20
