"""Schedules: plain data that compares by its bytes, travels between processes and cannot be changed."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Band, Causal, Contiguous, Documents, Full, Mask, Striped, Window, Zigzag
from ringspun.core import regions as rg
from ringspun.core import tiles as tl
from ringspun.core.geometry import Geometry
from ringspun.core.partition import Partition, Sides
from ringspun.core.route import Ring, Route
from ringspun.core.route.base import BoundRoute, Legs, MessageColumn, Moment
from ringspun.core.schedule import _regions, compile_schedules, input_digest
from ringspun.errors import MaskError, PlanError
from tests.core import strategies

MASK, LENGTH = Causal() & Documents([13, 9, 20]), 44


def geometry(size=4, layout=None):
    return Geometry(size, tuple(range(size)), layout or Zigzag(), Ring())


def make(mask=MASK, length=LENGTH, size=4, layout=None):
    return geometry(size, layout).schedule(mask, length)


def arrays(schedule):
    one = (schedule.forward, schedule.backward)
    return [
        schedule.tokens,
        schedule.key_tokens,
        schedule.travelling,
        *(a for p in one for a in (p.steps, p.messages, p.tiles, p.tile_offsets)),
    ]


def test_equal_inputs_make_equal_schedules():
    for a, b in zip(make(), make(), strict=True):
        assert a == b and hash(a) == hash(b) and a.digest == b.digest and len(a.digest) == 32
    assert len({s.digest for s in make()}) == 4, "each rank has its own"
    assert make()[0] != "schedule" and make()[0] != make()[1]


@pytest.mark.parametrize(
    "other",
    [
        make(mask=Causal()),
        make(length=LENGTH + 1),
        make(size=5),
        make(layout=Contiguous()),
    ],
    ids=["mask", "length", "size", "layout"],
)
def test_other_inputs_make_other_schedules(other):
    assert make()[1] != other[1]


def test_all_ranks_share_the_digest_of_the_inputs():
    assert len({s.inputs for s in make()}) == 1
    assert len(make()[0].inputs) == 32


def test_what_a_schedule_says_of_its_rank():
    for rank, s in enumerate(make(length=11, mask=Full(), size=3)):
        assert (s.ring_rank, s.ring_size, s.mask) == (rank, 3, Full())
        assert s.tokens.tolist() == [3, 4, 4] and s.local_tokens == s.tokens[rank]


def test_a_schedule_prints_what_it_is_not_what_it_holds():
    (schedule,) = Geometry(3, (1,), Zigzag(), Ring()).schedule(Causal(), 11)
    assert repr(schedule) == "Schedule(ring_rank=1 of 3, mask=causal, forward: 3 steps, 3 tiles, 4 messages)"
    (many,) = Geometry(1, (0,), Zigzag(), Ring()).schedule(Documents([1] * 500), 500)
    assert len(repr(many)) < 200


def test_some_ranks_only():
    some = Geometry(4, (2, 0), Zigzag(), Ring()).schedule(MASK, LENGTH)
    assert list(some) == [make()[2], make()[0]]


def test_regions_that_schedules_share_are_read_only():
    sides = geometry().sides(LENGTH)
    assert _regions(MASK, sides) is _regions(MASK, sides)
    assert not _regions(MASK, sides).flags.writeable


def test_arrays_are_read_only():
    for s in make():
        for array in arrays(s):
            assert array.dtype == np.int64 and not array.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


@pytest.mark.parametrize("digest_first", [False, True])
def test_a_pickled_schedule_is_the_same_and_still_read_only(digest_first):
    for s in make():
        if digest_first:
            assert s.digest
        copy = pickle.loads(pickle.dumps(s))
        assert copy == s and hash(copy) == hash(s)
        for one in (copy.forward, copy.backward):
            assert not any(a.flags.writeable for a in (one.steps, one.messages, one.tiles, one.tile_offsets))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["steps", "messages", "tiles", "tile_offsets"])
def test_editing_one_number_changes_the_digest(direction, name):
    s = make()[1]
    assert s.digest
    one = getattr(s, direction)
    array = getattr(one, name).copy()
    array.flat[-1] += 1
    edited = replace(s, **{direction: replace(one, **{name: array})})
    assert edited != s and edited.digest != s.digest
    same = replace(s, **{direction: replace(one, **{name: getattr(one, name).copy()})})
    assert same == s


def test_editing_place_or_tokens_changes_the_digest():
    s = make()[1]
    for change in ({"ring_rank": 2}, {"ring_size": 5}, {"inputs": b"0" * 32}, {"tokens": s.tokens[::-1].copy() + 1}):
        assert replace(s, **change) != s


def test_where_one_array_ends_is_part_of_the_digest():
    """The same bytes cut elsewhere are another schedule."""
    s = make()[1]
    flat = replace(s.forward, steps=s.forward.steps.reshape(-1, 1))
    assert replace(s, forward=flat) != s


@given(strategies.masks(20), strategies.layouts(), st.integers(1, 5))
def test_geometry_works_in_another_process(mask, layout, size):
    """Picklable, and the copy makes equal schedules: the host work can be done in a loader's worker."""
    one = geometry(size, layout)
    copy, its_mask = pickle.loads(pickle.dumps((one, mask)))
    assert copy == one and hash(copy) == hash(one)
    schedules = copy.schedule(its_mask, 20)
    assert pickle.loads(pickle.dumps(schedules)) == one.schedule(mask, 20)


def test_documents_of_a_partition_are_an_input():
    docs = Documents([20, 24])
    with_documents = geometry().schedule(MASK, LENGTH, docs)
    assert with_documents[0] != make()[0]
    assert geometry().partition(LENGTH, docs) == Partition(LENGTH, 4, Zigzag(), docs)
    with pytest.raises(MaskError, match="documents must fit the sequence"):
        geometry().schedule(MASK, 30, docs)


@dataclass(frozen=True)
class OtherRing(Ring):
    """The same messages under another name, with an option."""

    inner: int = 2


def test_input_digest_differs_for_every_input():
    docs = Documents([3, 4])
    inputs = [
        (Partition(8, 2, Zigzag()), Causal(), Ring()),
        (Partition(9, 2, Zigzag()), Causal(), Ring()),
        (Partition(8, 3, Zigzag()), Causal(), Ring()),
        (Partition(8, 2, Contiguous()), Causal(), Ring()),
        (Partition(8, 2, Striped()), Causal(), Ring()),
        (Partition(8, 2, Striped(128)), Causal(), Ring()),
        (Partition(8, 2, Striped(129)), Causal(), Ring()),
        (Partition(8, 2, Zigzag(), docs), Causal(), Ring()),
        (Partition(8, 2, Zigzag(), Documents([3, 5])), Causal(), Ring()),
        (Partition(8, 2, Zigzag(), Documents([3, 4], starts=[0, 4])), Causal(), Ring()),
        (Partition(8, 2, Zigzag()), Causal() & docs, Ring()),
        (Partition(8, 2, Zigzag()), Causal() | docs, Ring()),
        (Partition(8, 2, Zigzag()), docs, Ring()),
        (Partition(8, 2, Zigzag()), Window(3), Ring()),
        (Partition(8, 2, Zigzag()), Window(None), Ring()),
        (Partition(8, 2, Zigzag()), Band(2, 0), Ring()),
        (Partition(8, 2, Zigzag()), Causal(), OtherRing()),
        (Partition(8, 2, Zigzag()), Causal(), OtherRing(4)),
        (Partition(82, 1, Zigzag()), Causal(), Ring()),
    ]
    digests = [input_digest(Sides(one[0]), *one[1:]) for one in inputs]
    assert len(set(digests)) == len(inputs)
    assert all(len(d) == 32 for d in digests)
    assert digests == [input_digest(Sides(one[0]), *one[1:]) for one in inputs]


def test_passes_by_step_and_moment():
    s = make(mask=Full(), length=16, size=4)[2]
    for one in (s.forward, s.backward):
        parts = [one.messages_of(t, m) for t in range(len(one)) for m in Moment]
        np.testing.assert_array_equal(np.concatenate(parts), one.messages)
        np.testing.assert_array_equal(np.concatenate([one.tiles_of(t) for t in range(len(one))]), one.tiles)
        assert len(one.tile_offsets) == len(one) + 1
        for t, m in np.ndindex(len(one), len(Moment)):
            assert (one.messages_of(t, m)[:, [MessageColumn.STEP, MessageColumn.MOMENT]] == (t, m)).all()


def test_every_batch_row_has_the_tiles_of_its_own_mask():
    """Rows that share a mask without lying together, too; pairs are those of all rows together."""
    a, b = Causal(), Causal() & Documents([3, 5])
    masks = [a, a, b, a, b]
    for s, alone_a, alone_b in zip(make(masks, 8, 2), make(a, 8, 2), make(b, 8, 2), strict=True):
        tiles = s.forward.tiles
        for row, mask in enumerate(masks):
            mine = tiles[(tiles[:, tl.B0] <= row) & (row < tiles[:, tl.B1])]
            its_own = (alone_a if mask == a else alone_b).forward.pairs
            assert tl.count_pairs(mine).sum() == its_own.sum()
        assert s.forward.pairs.sum() == 3 * alone_a.forward.pairs.sum() + 2 * alone_b.forward.pairs.sum()


NO_MASKS = {
    "words": ("causal", r"got 'causal'\. Write parse_mask\(text\)\."),
    "nothing": (None, r"got None\. Combine Causal\(\), Window"),
    "a switch": (True, r"got True\. Combine Causal\(\), Window"),
    "an array": (np.ones((4, 4), bool), r"got ndarray of shape \(4, 4\)\. Combine"),
    "a class": (Causal, r"Write Causal\(\.\.\.\), a value\."),
    "no rows": ([], r"got \[\]\. An empty list has no row\."),
}


@pytest.mark.parametrize("what", NO_MASKS)
def test_what_is_no_mask_is_refused(what):
    mask, words = NO_MASKS[what]
    with pytest.raises(PlanError, match="mask must be a ringspun mask; .*" + words):
        geometry().schedule(mask, 8)


def test_masks_whose_documents_do_not_fit_are_refused():
    with pytest.raises(MaskError, match=r"got documents that end at 42 in 40 tokens\."):
        geometry().schedule(MASK, 40)


@dataclass(frozen=True)
class Lazy(Route):
    """Brings nothing: every rank sees its own block alone."""

    def bind(self, needs):
        class Bound(BoundRoute):
            def forward(self, ring_rank):
                return Legs(np.array([[ring_rank, -1, -1, 0, -1, -1, ring_rank, 0, 1]]), np.zeros((0, 12), np.int64))

            backward = forward

        return Bound()


def test_a_route_that_forgets_a_block_is_found():
    assert compile_schedules(Sides(Partition(8, 2, Contiguous())), Documents([4, 4]), Lazy(), (0, 1))
    with pytest.raises(PlanError, match=r"route must bring every needed block; got none from ring rank 0\."):
        compile_schedules(Sides(Partition(8, 2, Contiguous())), Causal(), Lazy(), (0, 1))


@dataclass(frozen=True)
class EveryOther(Mask):
    """A mask that the package has never seen: the query itself and the key just before an even query."""

    def allowed(self, q, k):
        return (q == k) | ((q % 2 == 0) & (k == q - 1))

    def regions(self, q_len, k_len, q_start=0):
        rows = [(q, q + 1, max(q - 1 + q % 2, 0), min(q + 1, k_len), 0, 1) for q in range(q_start, q_start + q_len)]
        return rg.tighten(np.array(rows, np.int64).reshape(-1, 6))


def test_masks_of_others_combine_and_compile():
    mask = EveryOther() | Documents([5])
    assert str(mask) == "everyother | documents([5])"
    np.testing.assert_array_equal(rg.as_array(mask.regions(9, 9), 9, 9), mask.as_array(9))
    schedules = make(mask=mask, length=9, size=2, layout=Contiguous())
    assert sum(int(s.forward.pairs.sum()) for s in schedules) == mask.as_array(9).sum()


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=str)
def test_16_million_tokens_on_1024_ranks_in_10_000_documents(layout):
    """No loop over tokens, ranks or documents: one rank's schedule, exact to the last pair."""
    length, size = 1 << 24, 1024
    lengths = np.diff(np.append(0, np.sort(np.random.default_rng(7).integers(1, length, 9_999))), append=length)
    docs = Documents(lengths)
    (schedule,) = Geometry(size, (511,), layout, Ring()).schedule(Causal() & docs, length)
    positions = Partition(length, size, layout).positions(511)
    keys_seen = positions - docs.table()[docs.index(positions), 0] + 1
    assert schedule.forward.pairs.sum() == keys_seen.sum()
    assert len(schedule.forward.tiles) < 200
