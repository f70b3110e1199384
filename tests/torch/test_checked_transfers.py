"""Checked transfers: whatever is done to a message on its way, the receiver raises, and says who, when and what.

What `checks="header"` sees without reading the bytes between header and end mark is here beside what needs checksums.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_ranks_transfers import disagree_on_checks, send_damaged
from test_wire import Damaged, R, S, flip, tensors

from ringspun import Causal, Full, Zigzag
from ringspun.core.wire import END_BYTES, HEADER_BYTES
from ringspun.errors import TransferError
from ringspun.torch import ContextParallel, Loopback, messages
from ringspun.torch.checksum import BLOCK, checksum, weighted_sum
from ringspun.torch.drivers import Transfer
from ringspun.torch.mail import Mail

SUMS = (checksum, weighted_sum)


def one_round(ring: Loopback, checks: str = "checksum") -> list[torch.Tensor]:
    """Forward and backward of one call."""
    plan = ContextParallel(ring, layout=Zigzag(), checks=checks).plan(S, Causal())
    x = tensors()
    return list(torch.autograd.grad(plan.attention(*x).square().sum(), x))


MESSAGES = 3 * R * (R - 1)


def length(at: int) -> int:
    """Bytes of the `at`-th message of a round."""
    sizes = []
    one_round(Damaged(R, at, lambda buffer: (sizes.append(buffer.numel()), buffer)[1]))
    return sizes[0]


# -- the sums ----------------------------------------------------------------------------------------------------------

WORDS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=40)


def bytes_of(words: list[int]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).view(torch.uint8)


@pytest.mark.parametrize("total", SUMS)
@given(words=WORDS, data=st.data())
def test_a_flipped_bit_changes_the_sum(total, words, data):
    whole = bytes_of(words)
    other = whole.clone()
    other[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert total(whole) == total(whole.clone()) != total(other)


@pytest.mark.parametrize("total", SUMS)
@pytest.mark.parametrize("size", [8, 4, 2])
@given(words=WORDS, data=st.data())
def test_swapped_words_change_the_sum(total, size, words, data):
    whole = bytes_of(words)
    other = whole.clone().view(-1, size)
    a, b = (data.draw(st.integers(0, len(other) - 1)) for _ in range(2))
    other[[a, b]] = other[[b, a]]
    assert (total(whole) == total(other.view(-1))) == torch.equal(whole, other.view(-1))


@pytest.mark.parametrize("total", SUMS)
@pytest.mark.parametrize("value", [1.0, -3.5, 0.0])
@pytest.mark.parametrize("numbers", [2, 4, 64])
def test_signs_flipped_in_pairs_change_the_sum(total, value, numbers):
    """The highest bits of words: in a sum of 64-bit words times odd weights two of them cancel."""
    whole = torch.full((128,), value)
    for start in range(0, 64, 16):
        other = whole.clone()
        other[start : start + numbers] *= -1
        assert total(whole.view(torch.uint8)) != total(other.view(torch.uint8))


def test_blocks_that_change_places_change_the_weighted_sum():
    words = torch.arange(3 * BLOCK + 2, dtype=torch.int32)
    swapped = torch.cat([words[BLOCK : 2 * BLOCK], words[:BLOCK], words[2 * BLOCK :]])
    assert weighted_sum(words.view(torch.uint8)) != weighted_sum(swapped.view(torch.uint8))


@pytest.mark.parametrize("total", SUMS)
def test_a_sum_is_an_int64_and_all_are_used(total):
    values = [total(bytes_of([n, 0])) for n in range(400)]
    assert len(set(values)) == 400
    assert 150 < sum(value < 0 for value in values) < 250 and all(-(2**63) <= value < 2**63 for value in values)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_checks_change_no_result():
    """And no byte count: accounting knows nothing of checks."""
    rings = {checks: Loopback(R) for checks in ("header", "checksum", "checksum/2")}
    results = [one_round(ring, checks) for checks, ring in rings.items()]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert len({tuple(sorted(ring.counts.bytes.items())) for ring in rings.values()}) == 1


@pytest.mark.parametrize("at", range(MESSAGES))
def test_a_flipped_bit_in_any_message_raises(at):
    """Keys, values, gradients at each of their hops, padding between segments."""
    for place in range(HEADER_BYTES, length(at) - END_BYTES, 97):
        ring = Damaged(R, at, lambda buffer, place=place: flip_bit(buffer, place))
        with pytest.raises(TransferError) as caught:
            one_round(ring)
        sender, receiver = ring.hit
        message = str(caught.value)
        assert message.startswith(f"ring rank {receiver}: the ")
        assert f"that ring rank {sender} sent at step " in message and " of call " in message
        assert "must arrive as it was sent; got checksum 0x" in message and "Bytes were damaged" in message


def flip_bit(buffer: torch.Tensor, place: int) -> torch.Tensor:
    damaged = buffer.clone()
    damaged[place] ^= 1 << place % 8
    return damaged


@pytest.mark.parametrize("checks", ["header", "checksum"])
@pytest.mark.parametrize("word", range(-8, 0))
def test_a_flipped_bit_in_the_end_mark_raises_at_every_level(word, checks):
    for at in (0, MESSAGES - 1):
        with pytest.raises(TransferError, match=r"must (end with its own mark|arrive as it was sent); got "):
            one_round(Damaged(R, at, flip(word)), checks)


@pytest.mark.parametrize("at", [0, 7, 20, MESSAGES - 1])
def test_two_words_that_change_places_raise(at):
    """Anywhere in the message, header and end mark included, unless they are equal."""
    n = length(at) // 8
    for a, b in [
        (1, 2),
        (2, 7),
        (0, n - 8),
        (4, n // 2),
        (n - 2, n - 3),
        *((i, n - 9 - i) for i in range(8, n // 2, 7)),
    ]:
        equal = []

        def swap(buffer, a=a, b=b, equal=equal):
            words = buffer.clone().view(torch.int64)
            equal.append(bool(words[a] == words[b]))
            words[[a, b]] = words[[b, a]]
            return words.view(torch.uint8)

        try:
            one_round(Damaged(R, at, swap))
        except TransferError:
            assert equal == [False]
        else:
            assert equal == [True], (a, b)


class CutShort(Loopback):
    """The `at`-th message lacks its last bytes, whose places in the receiver's buffer keep what they held."""

    def __init__(self, at: int, missing: int) -> None:
        super().__init__(R)
        self.at, self.missing, self.seen = at, missing, 0

    def deliver(self, sender: int, receiver: int, sent: Transfer, wanted: Transfer) -> None:
        before = wanted.buffer.clone()
        super().deliver(sender, receiver, sent, wanted)
        if self.seen == self.at:
            wanted.buffer[-self.missing :] = before[-self.missing :]
        self.seen += 1


@pytest.mark.parametrize("checks", ["header", "checksum"])
@pytest.mark.parametrize("missing", [64, 72, 200])
@pytest.mark.parametrize("at", [0, 1, 5, 11, 12, 23, 30, 35])
def test_a_message_cut_short_shows_by_its_end(at, missing, checks):
    """At the first use of a buffer and at the second, whose old content has a whole end mark."""
    for damaged in (CutShort(at, missing), CutShort(at + MESSAGES, missing)):
        with pytest.raises(TransferError, match=r"must end with its own mark; got (none|magic).*A message cut short"):
            plan = ContextParallel(damaged, layout=Zigzag(), checks=checks).plan(S, Causal())
            for _ in range(2):
                x = tensors()
                torch.autograd.grad(plan.attention(*x).square().sum(), x)


@pytest.mark.parametrize("checks", ["header", "checksum"])
def test_memory_that_holds_the_very_end_mark_expected_does_not_pass_for_one(checks):
    """Two rings, one after the other, count their calls alike; the second gets the first one's buffers."""
    pool = None
    for ring_of_one_call in (Loopback(R), CutShort(0, END_BYTES + 32)):
        context = ContextParallel(ring_of_one_call, checks=checks)
        context.pool = pool = pool or context.pool
        plan = context.plan(S, Full())
        if isinstance(ring_of_one_call, CutShort):
            with pytest.raises(TransferError, match=r"must end with its own mark; got none\. A message cut short"):
                plan.attention(*(t.detach() for t in tensors()))
        else:
            plan.attention(*(t.detach() for t in tensors()))


def test_what_a_relaying_rank_s_memory_does_to_a_block_raises(monkeypatch):
    """A block keeps its owner's checksum: one made afresh would confirm what was spoilt after it was checked."""
    check = Mail._check

    def check_and_spoil(mail, buffer, header, peer):
        check(mail, buffer, header, peer)
        if (mail._me, header.source) == (1, 0):
            buffer[HEADER_BYTES + 4] ^= 1

    monkeypatch.setattr(Mail, "_check", check_and_spoil)
    with pytest.raises(
        TransferError, match="ring rank 2: the KV block of ring rank 0 that ring rank 1 sent at step 1 "
    ):
        ContextParallel(Loopback(R), checks="checksum").plan(S, Full()).attention(*(t.detach() for t in tensors()))


@pytest.mark.parametrize(("checks", "made"), [("header", 0), ("checksum", R + R * (R - 1))])
def test_a_block_is_summed_once_by_its_owner_and_once_by_each_receiver(monkeypatch, checks, made):
    count = []
    monkeypatch.setattr(messages, "checksum", lambda data: count.append(data) or checksum(data))
    ContextParallel(Loopback(R), checks=checks).plan(S, Full()).attention(*(t.detach() for t in tensors()))
    assert len(count) == made


def test_one_call_in_four_sees_what_the_others_do_not():
    class Flips(Loopback):
        def deliver(self, sender, receiver, sent, wanted):
            super().deliver(sender, receiver, sent, wanted)
            wanted.buffer[HEADER_BYTES + 1] ^= 1

    plan = ContextParallel(Flips(R), checks="checksum/4").plan(S, Full())
    x = [t.detach() for t in tensors()]
    seen = []
    for _ in range(12):
        try:
            plan.attention(*x)
            seen.append(False)
        except TransferError:
            seen.append(True)
    assert [sum(seen[n : n + 4]) for n in (0, 4, 8)] == [1, 1, 1]


# -- between processes -------------------------------------------------------------------------------------------------

FOUND = {
    "flip_a_bit": "must arrive as it was sent; got checksum 0x",
    "swap_words": "must arrive as it was sent; got checksum 0x",
    "cut_short": "must end with its own mark; got ",  # gloo takes fewer bytes than asked for without a word
    "cut_to_nothing": "must carry its own header; got ",
    "send_again": "must carry its own header; got ",
}


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_damage_between_processes_is_found_by_the_rank_that_receives_it(pools):
    """In the blocks of a second forward, and in the gradients of a second backward; the ring is broken there."""
    pool = pools(2)
    blocks = [(0, 2, "KV block of ring rank 0", damage) for damage in ("flip_a_bit", "cut_short", "send_again")]
    cases = [(*case, "keys") for case in blocks]
    cases += [(1, 1, "DKV block of ring rank 0", damage, "keys") for damage in ("swap_words", "cut_to_nothing")]
    cases += [(1, 0, "QUERIES block of ring rank 1", "swap_words", "queries")]
    cases += [(0, 3, "DQ block of ring rank 1", "flip_a_bit", "queries")]
    for odd, at, block, damage, backward in cases:
        checks = "header" if FOUND[damage].startswith("must carry") else "checksum"
        kind, message, again = pool.run(send_damaged, odd, at, damage, checks, backward, timeout_s=20)[1 - odd]
        assert kind == "TransferError", (damage, message)
        assert message.startswith(f"ring rank {1 - odd}: the {block} that ring rank {odd} sent at step ")
        assert FOUND[damage] in message
        assert again == "RingBroken"
    pool.restart()


@pytest.mark.processes
def test_ranks_that_check_differently_hear_of_it(pools):
    for kind, message in pools(3).run(disagree_on_checks, timeout_s=15):
        assert kind == "PlanMismatchError" and "checks is checksum on ring rank 1 and header on ring rank 0" in message
