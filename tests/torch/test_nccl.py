"""The NCCL driver where there is no GPU: its orders by streams that stand in (`standing_streams`), its verdicts on a
loopback that defers them, its batches by the schedules of every route. What nccl itself does is not held here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_ranks_nccl import run_watched
from standing_streams import NobodyReads, StandingStreams, WatchedNccl
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringspun import Anchors, Causal, Contiguous, Full, Window, Zigzag
from ringspun.core.geometry import Geometry
from ringspun.core.route.base import Action, MessageColumn
from ringspun.core.text import parse_route
from ringspun.core.wire import Header, Payload
from ringspun.errors import DtypeError, PeerError, PlanError, TransferError, UnsupportedByRing
from ringspun.testing.cases import Case, inputs, reference
from ringspun.testing.comparison import errors
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch import groups as choosing
from ringspun.torch.buffers import BufferPool
from ringspun.torch.drivers import Gloo, Nccl, Transfer
from ringspun.torch.drivers.streams import CudaStreams
from ringspun.torch.messages import Marks, check, clear, seal

ROUTES = ("ring", "ring(2)", "direct", "bidirectional", "double_ring(2)", "all_gather")
WATCHED = [
    (Case(2, 17, Causal(), Zigzag()), {}),
    (Case(2, 16, Causal(), Contiguous()), {"route": "direct"}),
    (Case(2, 19, Full(), Zigzag()), {"block_size": 3, "backward": "queries"}),
    (Case(2, 12, Causal() & Window(5), Contiguous()), {"ulysses": 2}),
]


# -- orders ------------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_on_ranks_numbers_are_right_and_no_two_streams_touch_a_buffer_at_once(pools):
    """Nor does the host look at anything while a call goes on (`NobodyReads`): it would raise."""
    for found in pools(2).run(run_watched, WATCHED):
        for (case, _), (numbers, races, told) in zip(WATCHED, found, strict=True):
            worst = errors(numbers, reference(case, inputs(case))).worst
            assert max(worst.values()) < 1e-12, (case, worst)
            assert not races and told.count("own: messages") >= 2
    for deaf in ("own", "caller"):  # the same without half of the waits
        assert all(races for ((_, races, _),) in pools(2).run(run_watched, WATCHED[:1], deaf))


@pytest.fixture
def fake_group() -> Iterator[dist.ProcessGroup]:
    """Four ranks, of which there is one: every message is sent, and nothing comes."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


def transfers(n_bytes: int = 192) -> list[Transfer]:
    header = Header(7, 0, 0, Payload.KV, 0, 1, n_bytes)
    ends = ((Action.SEND, 2), (Action.RECEIVE, 0))
    return [Transfer(action, peer, torch.zeros(n_bytes, dtype=torch.uint8), "KV", header) for action, peer in ends]


def a_call(marks: Marks | None, hold=lambda: None):
    sent, comes = both = transfers()
    seal(sent.buffer, sent.header, sums=False)
    ticket = yield both
    hold()
    yield ticket
    if marks is not None:
        check(comes.buffer if marks.wrong else sent.buffer, comes.header, "the block", sums=False, marks=marks)
        yield marks
    return "done"


def marks(*, wrong: bool = False) -> Marks:
    made = Marks(False)
    made.wrong = wrong
    return made


def test_messages_begin_behind_the_caller_s_work_and_the_flag_is_read_last(fake_group):
    driver = WatchedNccl(fake_group)
    driver.streams.told.clear()
    assert driver.run([a_call(marks(), lambda: driver.streams.told.append("tiles are queued"))]) == ["done"]
    assert driver.streams.told == [
        "caller: record", "own: wait", "own: messages",  # behind what packed them
        "tiles are queued",
        "own: wait", "own: record", "caller: wait",  # nccl's end; then the caller goes on
        "caller: record", "own: wait", "own: record",  # what they said was looked at; the flag's copy is queued
    ]  # fmt: skip


def test_a_wrong_message_is_an_error_when_all_is_queued_and_breaks_the_ring(fake_group):
    driver, queued = WatchedNccl(fake_group), []
    with pytest.raises(TransferError, match="the block must carry its own header; got magic 0x0 instead of"):
        driver.run([a_call(marks(wrong=True), lambda: queued.append(1))])
    assert queued == [1] and "TransferError" in driver.state.broken


def test_a_device_that_does_not_come_to_the_flag_is_a_peer_that_is_late(fake_group):
    driver = WatchedNccl(fake_group, timeout_s=0.02)
    driver.streams.done = False
    with pytest.raises(PeerError, match=r"all messages of the call must finish within 0\.02 s; got nothing"):
        driver.run([a_call(marks())])


def test_what_cannot_be_is_refused(fake_group):
    driver = WatchedNccl(fake_group)
    driver.streams.graph = True
    with pytest.raises(UnsupportedByRing, match="must not be captured in a CUDA graph"):
        driver.run([a_call(None)])
    driver.streams.graph = False
    driver.streams.device = torch.device("cpu:1")
    with pytest.raises(DtypeError, match=r"tensors must be on cpu:1.*got cpu\. Call torch.cuda.set_device"):
        driver.run([a_call(None)])


def test_a_backend_that_starts_messages_one_by_one_is_refused(fake_group):
    """As torch's wrapper for TORCH_DISTRIBUTED_DEBUG=DETAIL: each send would wait for a receive that comes behind."""
    one_by_one = SimpleNamespace(supports_coalescing=False)
    with (
        mock.patch.object(dist.distributed_c10d, "get_backend_config", lambda _: "cuda:nccl"),
        mock.patch.object(dist.ProcessGroup, "_get_backend", lambda *_: one_by_one),
        pytest.raises(UnsupportedByRing, match="Leave TORCH_DISTRIBUTED_DEBUG=DETAIL unset"),
    ):
        WatchedNccl(fake_group)


def test_memory_of_the_host_is_of_the_host_whatever_the_default_device():
    """Torch pins no memory of another device: it would raise."""
    streams = CudaStreams.__new__(CudaStreams)
    with mock.patch.object(torch, "empty") as empty:
        streams.host((), torch.bool)
    assert empty.call_args.kwargs == {"dtype": torch.bool, "device": "cpu", "pin_memory": True}


def test_a_communicator_is_opened_once_for_a_group_and_by_no_message(fake_group):
    first = WatchedNccl(fake_group)
    assert first.streams.told == ["caller: record"] and first.state.opened  # an all-reduce, waited for
    assert WatchedNccl(fake_group).streams.told == []
    assert first.clock(1) is None and first.meeting == first.streams.device


def test_torch_s_watchdog_is_not_waited_for(fake_group):
    of_group = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=100)))
    with mock.patch.object(dist.ProcessGroup, "_get_backend", lambda *_: of_group):
        assert [WatchedNccl(fake_group, timeout_s=s)._timeout.total_seconds() for s in (600.0, 20.0)] == [90, 20]


@pytest.mark.parametrize(
    ("backends", "driver"),
    [
        ("cuda:nccl", Nccl), ("cpu:gloo,cuda:nccl", Nccl), ("cpu:gloo,cuda:gloo,mps:gloo", Gloo), ("cpu:gloo", Gloo),
        ("cpu:fake,cuda:fake", None), ("cpu:mpi,cuda:mpi", None),
    ],
)  # fmt: skip
def test_a_group_s_backend_chooses_the_driver(fake_group, backends, driver):
    known = mock.patch.object(dist.distributed_c10d, "get_backend_config", lambda _: backends)
    made = {
        cls: mock.patch.object(choosing, cls.__name__, lambda group, timeout_s, cls=cls: cls) for cls in (Nccl, Gloo)
    }
    with known, made[Nccl], made[Gloo]:
        if driver is not None:
            assert choosing.over_group(fake_group, 1.0) is driver
            return
        with pytest.raises(PlanError, match=r"group must use gloo for CPUs or nccl for CUDA; got \{"):
            ContextParallel(fake_group)


# -- buffers -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=30))
def test_what_one_stream_gave_back_no_other_gets(actions):
    stream, out, owner = [0], [], {}
    pool = BufferPool(stream_of=lambda _: stream[0])
    for on, takes in actions:
        stream[0] = on
        if takes or not out:
            out.append(pool.lease(256, torch.device("cpu")))
            assert owner.setdefault(out[-1].data_ptr(), (on, out[-1].untyped_storage()))[0] == on
        else:
            pool.give_back(out.pop(0))  # wherever that is


# -- verdicts ----------------------------------------------------------------------------------------------------------


class Spoils(Loopback):
    """Damages the `at`-th message that arrives; verdicts are passed on arrival, or at the end as on a device."""

    def __init__(self, size: int, damage, at: int, *, deferred: bool) -> None:
        super().__init__(size)
        self.damage, self.at, self.deferred = damage, at, deferred

    def defers(self, device: torch.device) -> bool:
        return self.deferred

    def deliver(self, sender, receiver, sent, wanted):
        super().deliver(sender, receiver, sent, wanted)
        self.at -= 1
        if self.at == -1:
            self.damage(wanted.buffer)


def flip(place: int):
    def damage(buffer: torch.Tensor) -> None:
        buffer[place] ^= 1

    return damage


DAMAGES = {"none": lambda _: None, "header": flip(8), "end": flip(-40), "no end": clear, "bytes": flip(70)}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("ulysses", [1, 2])
def test_a_deferred_verdict_says_what_one_on_arrival_says(name, ulysses):
    x = [torch.randn(1, 2, 12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    said = []
    for deferred in (False, True):
        ring = Spoils(2, DAMAGES[name], 0, deferred=deferred)  # nobody passes the damage on
        plan = ContextParallel(ring, checks="checksum", ulysses=ulysses).plan(12, Full())
        try:
            said.append(plan.attention(*x).numpy().tobytes())
        except TransferError as failure:
            said.append(str(failure))
    assert said[0] == said[1] and isinstance(said[0], bytes) == (name == "none")


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("relayed", [False, True])
def test_on_a_device_nobody_waits_for_a_mark(sums, relayed):
    """Tensors without bytes: who looks at one fails."""
    buffer, header = torch.empty(512, dtype=torch.uint8, device="meta"), transfers()[0].header
    found = Marks(sums)
    with NobodyReads():
        clear(buffer)
        seal(buffer, header, sums=sums, relayed=relayed)
        check(buffer, header, "it", sums=sums, marks=found)
        assert found.flag().shape == ()


@given(st.booleans(), st.integers(0, 40), st.integers(0, 7))
def test_a_flag_is_up_if_and_only_if_a_byte_that_is_checked_changed(sums, word, bit):
    header = Header(3, 1, 2, Payload.DKV, 4, 5, 320)
    buffer = torch.arange(320, dtype=torch.int64).to(torch.uint8)
    seal(buffer, header, sums=sums)
    for place in (None, 8 * word + bit if word < 40 else None):
        found, came = Marks(sums), buffer.clone()
        if place is not None:
            came[place] ^= 1 << bit
        check(came, header, "it", sums=sums, marks=found)
        watched = place is not None and (sums or place < 64 or place >= 256)
        assert bool(found.flag()) == watched
        if watched:
            with pytest.raises(TransferError):
                found.judge()
        else:
            found.judge()


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
def test_batches_in_the_order_of_one_stream_never_wait_for_each_other(route):
    """nccl runs a rank's batches one after the other, and a batch ends when all its messages have both ends. Both ends
    of a message are in batches of one name (step, moment, due), and those come in the same order on every rank, so the
    first that is not done always can be. And messages of two ranks in a batch come in the order in which they went."""
    for size, mask, layout in [
        (4, Causal(), Zigzag()), (4, Full(), Contiguous()), (4, Causal() & Window(5), Contiguous()),
        (6, Causal() & (Window(3) | Anchors(2)), Contiguous()), (2, Causal(), Zigzag()),
    ]:  # fmt: skip
        geometry = Geometry(size, tuple(range(size)), layout, parse_route(route))
        schedules = geometry.schedule(mask, seq_len=4 * size + 1)
        for direction in ("forward", "backward"):
            ends: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
            for rank, schedule in enumerate(schedules):
                for row in getattr(schedule, direction).messages:
                    sends = row[MessageColumn.ACTION] == Action.SEND
                    peer, batch = int(row[MessageColumn.PEER]), row[_BATCH].tolist()
                    pair = (rank, peer) if sends else (peer, rank)
                    ends[(*pair, int(sends))].append((*batch, *row[_CONTENT].tolist()))
            for (sender, receiver, sends), those in ends.items():
                assert those == ends[sender, receiver, 1 - sends], (route, size, str(mask), direction)


_BATCH = [MessageColumn.STEP, MessageColumn.MOMENT, MessageColumn.DUE]
_CONTENT = [MessageColumn.PAYLOAD, MessageColumn.SOURCE, MessageColumn.STRIDE]


def test_standing_streams_find_a_race():
    for ordered in (True, False):
        streams, x = StandingStreams(), torch.zeros(8)
        streams.touch(streams.caller, "write", [], [x])
        if ordered:
            streams.own.wait_event(streams.caller.record_event())
        streams.touch(streams.own, "read", [x], [])
        assert streams.races == ([] if ordered else ["read on own beside write on caller"])
