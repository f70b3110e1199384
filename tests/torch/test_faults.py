"""Faults do what they say, where they are told to; orders are all tried; a campaign finds what checks let through."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, Full, Window
from ringspun.core.route.base import Action
from ringspun.core.wire import Payload
from ringspun.errors import TransferError
from ringspun.testing.campaign import RIGHT, WRONG, on_gloo, on_loopback, trials
from ringspun.testing.faults import (
    KINDS,
    Delay,
    Drop,
    Duplicate,
    Faulty,
    Flip,
    Kill,
    Reorder,
    Stale,
    Swap,
    Truncate,
    random_fault,
)
from ringspun.testing.orders import Ordered, every_order
from ringspun.testing.soak import Stretch, growth, soak
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.drivers import Transfer

R, S = 3, 24  # blocks of whole 64 bytes: padding holds anything


class Listening(Loopback):
    """Keeps what it delivers; a message cut short is passed on as it is."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.heard: list[tuple[tuple[int, int], Transfer, torch.Tensor]] = []

    def deliver(self, sender, receiver, sent, wanted):
        self.heard.append(((sender, receiver), sent, sent.buffer.clone()))
        super().deliver(sender, receiver, sent, wanted)


def one_round(ring, mask=None, layout=None, checks="header", backward="auto") -> list[torch.Tensor]:
    """Forward and backward; as many heads of keys as of queries, so that these travel in backward."""
    context = ContextParallel(ring, layout=layout or Contiguous(), checks=checks, backward=backward)
    x = torch.randn(3, 1, 2, S, 4, generator=torch.Generator().manual_seed(1)).unbind()
    ends = [t.requires_grad_() for t in x]
    out = context.plan(S, Full() if mask is None else mask).attention(*ends)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), ends)]


def on_link(ring: Listening, link=(0, 1)) -> list[torch.Tensor]:
    return [data for ends, _, data in ring.heard if ends == link]


def heard_with(fault) -> tuple[list[torch.Tensor], list[torch.Tensor], Faulty]:
    """What comes over the link from 0 to 1 in peace and with a fault in its first message."""
    peace, ring = Listening(R), Listening(R)
    one_round(peace)
    faulty = Faulty(ring, fault)
    with suppress(TransferError):
        one_round(faulty)
    return on_link(peace), on_link(ring), faulty


# -- kinds -----------------------------------------------------------------------------------------------------------

FIRST = {"sender": 0, "receiver": 1}


def test_a_flipped_bit_is_that_bit():
    right, found, _ = heard_with(Flip(**FIRST, bit=8 * 70 + 3))
    different = (right[0] != found[0]).nonzero().flatten().tolist()
    assert different == [70] and int(right[0][70] ^ found[0][70]) == 1 << 3


def test_swapped_words_are_the_same_words():
    right, found, _ = heard_with(Swap(**FIRST, words=(9, 12)))
    a, b = right[0].view(torch.int64), found[0].view(torch.int64)
    assert a[9] == b[12] and a[12] == b[9] and a[9] != a[12] and (a != b).sum() == 2


def test_a_truncated_message_keeps_its_beginning():
    right, found, _ = heard_with(Truncate(**FIRST, keep=100))
    assert torch.equal(found[0], right[0][:100])


def test_a_duplicate_comes_twice_and_a_dropped_one_never():
    right, found, _ = heard_with(Duplicate(**FIRST))
    assert torch.equal(found[0], right[0]) and torch.equal(found[1], right[0]) and not torch.equal(right[0], right[1])
    right, found, _ = heard_with(Drop(**FIRST))
    assert not any(torch.equal(x, right[0]) for x in found)


def test_a_reordered_message_is_overtaken_by_the_next():
    right, found, _ = heard_with(Reorder(**FIRST))
    assert torch.equal(found[0], right[1])
    last = one_round(Faulty(Loopback(R), Reorder(**FIRST, backward=False, step=1)))  # none follows in that call
    assert all(map(torch.equal, last, one_round(Loopback(R))))


def test_a_stale_buffer_holds_what_it_held():
    ring = Faulty(Loopback(R))
    one_round(ring)
    plan = ContextParallel(ring, layout=Contiguous()).plan(S, Full())
    x = torch.ones(1, 2, S, 4)
    plan.attention(x, x, x)  # leaves its blocks in the buffers of the next call
    ring.arm(Stale(**FIRST, step=1))
    with pytest.raises(TransferError, match=r"sent at step 1 of call 3 must carry its own header; got step 0 instead"):
        plan.attention(x, x, x)


def test_a_delay_changes_nothing():
    right = one_round(Loopback(R))
    for nth in range(3 * (R - 1)):
        ring = Faulty(Ordered(R, seed=nth), Delay(sender=0, nth=nth))
        assert all(map(torch.equal, one_round(ring), right)) and len(ring.injected) == 1


def test_a_killed_rank_is_among_those_that_wait():
    with pytest.raises(TransferError, match=r"all wait: .*ring rank 2 waits for nothing more: it was killed"):
        one_round(Faulty(Loopback(R), Kill(sender=2, backward=True)))


# -- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ({"sender": 1}, "KV of ring rank 1 at step 0"),
        ({"receiver": 1, "nth": 1}, "KV of ring rank 2 at step 1"),
        ({"sender": 2, "step": 1}, "KV of ring rank 1 at step 1"),
        ({"sender": 1, "payload": Payload.DKV, "nth": 1}, "DKV of ring rank 2 at step 2"),
        ({"sender": 0, "call": 1, "nth": 2}, "DKV of ring rank 2 at step 1"),
        ({"sender": 0, "backward": True}, "KV of ring rank 0 at step 0"),
        ({"sender": 1, "payload": Payload.DQ, "nth": 1}, "DQ of ring rank 2 at step 2"),
        ({"sender": 2, "payload": Payload.QUERIES}, "QUERIES of ring rank 2 at step 0"),
    ],
    ids=str,
)
def test_a_fault_strikes_the_message_that_it_is_told(where, what):
    ring = Faulty(Loopback(R), Delay(**where))
    one_round(ring, backward="queries" if where.get("payload", 0) >= Payload.QUERIES else "keys")
    (struck,) = ring.injected
    assert struck.what.startswith(what) and struck.fault == Delay(**where)
    assert where.get("sender", struck.sender) == struck.sender
    assert where.get("receiver", struck.receiver) == struck.receiver


def test_faults_strike_once_and_one_to_a_message():
    ring = Faulty(Loopback(R), Delay(sender=0), Delay(sender=0), Delay(sender=0, nth=2))
    one_round(ring)
    one_round(ring)
    assert [x.fault.nth for x in ring.injected] == [0, 2]
    ring.arm(Delay(sender=0))
    one_round(ring)
    assert [x.fault.nth for x in ring.injected] == [0, 2, 0]


def test_messages_are_counted_as_without_faults():
    plain, ring = Loopback(R), Faulty(Loopback(R))
    one_round(plain)
    one_round(ring)
    assert ring.counts.messages == plain.counts.messages
    assert "faulty" in repr(ContextParallel(ring))


@settings(max_examples=25)
@given(st.integers(0, 2**31))
def test_a_random_fault_strikes_wherever_messages_are(seed):
    peace = Loopback(R)
    one_round(peace, Causal())
    fault = random_fault(seed, peace.counts.messages, kinds=(Delay, Duplicate))
    assert fault == random_fault(seed, dict(peace.counts.messages), kinds=(Delay, Duplicate))
    ring = Faulty(Loopback(R), fault)
    try:
        one_round(ring, Causal())
    except TransferError:
        assert isinstance(fault, Duplicate)
    assert [x.fault for x in ring.injected] == [fault]


def test_a_ring_without_messages_has_no_random_fault():
    with pytest.raises(ValueError, match="messages must hold at least one link; got none"):
        random_fault(0, Loopback(1).counts.messages)


# -- orders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "mask", "count"), [(2, Full(), 56), (2, Causal(), 15), (3, Window(2), 296)], ids=str)
def test_every_order_of_a_small_ring_gives_the_same_bits(ranks, mask, count):
    x = torch.randn(3, 1, 1, 2 * ranks, 2, generator=torch.Generator().manual_seed(1)).unbind()
    found = [
        ContextParallel(ring, layout=Contiguous()).plan(2 * ranks, mask).attention(*x) for ring in every_order(ranks)
    ]
    assert len(found) == count and all(torch.equal(out, found[0]) for out in found)


def racing(actions: list[list[tuple[str, int]]], log: list[object]):
    """One program a rank: "send", "peek" at what has arrived, "wait" for it; `log` keeps what each peek saw."""

    def program(rank, mine):
        tickets, boxes = [], []
        for word, peer in mine:
            if word == "wait":
                yield from tickets
                tickets = []
            elif word == "peek":
                log.append((rank, [int(box) for box in boxes]))
            else:
                action = Action.SEND if word == "send" else Action.RECEIVE
                box = torch.full((1,), 1 + rank if word == "send" else 0, dtype=torch.uint8)
                if word == "receive":
                    boxes.append(box)
                tickets.append((yield [Transfer(action, peer, box, word)]))
        return 0

    return [program(rank, mine) for rank, mine in enumerate(actions)]


def outcome(ring, actions) -> tuple:
    """What every rank saw, rank by rank: the same for orders that differ in independent events only."""
    log: list = []
    ring.run(racing(actions, log))
    return tuple(tuple(tuple(seen) for who, seen in log if who == rank) for rank in range(len(actions)))


RACES = [
    [[("send", 1), ("wait", 0)], [("receive", 0), ("peek", 0), ("wait", 0), ("peek", 0)]],
    [[("send", 1), ("send", 2)], [("receive", 0), ("peek", 0)], [("receive", 0), ("peek", 0), ("peek", 0)]],
    [
        [("receive", 1), ("receive", 2), ("peek", 0)],
        [("send", 0)],
        [("send", 0)],
    ],
]


@pytest.mark.parametrize("actions", RACES, ids=["two", "three", "two to one"])
def test_every_order_sees_all_that_any_order_can_see(actions):
    """Races that many random orders show are shown by few orders, all different."""
    at_random = {outcome(Ordered(len(actions), seed=seed), actions) for seed in range(2000)}
    found = [outcome(ring, actions) for ring in every_order(len(actions))]
    assert set(found) == at_random and len(at_random) > 1
    assert len(found) < 200


def test_what_is_done_with_each_ring_must_be_the_same():
    masks = iter([Full(), Window(1)])
    with pytest.raises(ValueError, match="must be the same; got other events"):
        for ring in every_order(2):
            x = torch.ones(1, 1, 4, 2)
            ContextParallel(ring).plan(4, next(masks)).attention(x, x, x)


def test_a_limit_ends_the_search():
    assert len([one_round(ring) for ring in every_order(R, limit=7)]) == 7


# -- campaigns -------------------------------------------------------------------------------------------------------


def test_faults_on_loopback_never_give_a_wrong_number():
    """What is not bit for bit right raises; headers alone let damaged bytes through."""
    many = list(trials(27 * len(KINDS), seed=1, ranks=(2, 3, 4, 2, 3, 5, 2, 8)))
    outcomes = list(on_loopback(many))
    assert all(o.struck for _, o in outcomes)
    assert {o.result for _, o in outcomes} == {RIGHT, "TransferError"}
    for kind in KINDS:
        results = {o.result for trial, o in outcomes if isinstance(trial.fault, kind)}
        assert ("TransferError" in results) == (kind is not Delay), kind
    damage = [replace(t, checks="header") for t in many if isinstance(t.fault, Flip | Swap)]
    missed = [o for _, o in on_loopback(damage) if o.result == WRONG]
    assert len(missed) > len(damage) / 4


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_faults_between_processes_are_found_in_time():
    many = list(trials(len(KINDS), seed=3, ranks=[3]))
    for trial, told in on_gloo(replace(t, timeout_s=1.0) for t in many):
        assert told.struck and told.result not in (WRONG, "hung"), (trial, told)
        assert told.longest_s < 3.0
        assert told.detected or isinstance(trial.fault, Delay | Duplicate | Reorder), (trial, told)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::ringspun.errors.RingspunWarning")
def test_a_short_soak(pools):
    """Every call another plan, every result held against dense attention; what is out of its bar raises."""
    told = pools(2).run(soak, 1.0, 0.5, 5, timeout_s=50)
    for rank in told:
        assert len(rank) == 2 and rank[-1].plans > 0 and rank[-1].calls >= 2 * rank[-1].plans
        assert all(stretch.resident > 1e7 for stretch in rank)
    assert 0 < max(rank[-1].worst for rank in told) <= 1


def test_growth_counts_from_where_caches_are_full():
    sizes = [50, 90, 100, 100, 100, 101, 102, 103, 103, 110]
    told = [Stretch(0.0, 0, 300 * n, 0.0, size) for n, size in enumerate(sizes)]
    assert growth(told) == pytest.approx(103 / 101 - 1)
    assert math.isnan(growth(told[:4]))
