"""Headers are read, lengths are checked, and what goes over the wire is what accounting says."""

from __future__ import annotations

import pytest
import torch

from ringspun import Causal, Contiguous, Documents, Full, Striped, Window, Zigzag
from ringspun.core import ways
from ringspun.core.accounting import account
from ringspun.core.wire import HEADER_BYTES, Format
from ringspun.errors import TransferError
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.drivers import Transfer

R, S = 4, 22
WORDS = ("magic", "plan", "call", "phase", "payload", "step", "source", "length")


class Damaged(Loopback):
    """A loopback that damages the `at`-th message by a function of its sent bytes."""

    def __init__(self, size: int, at: int, damage) -> None:
        super().__init__(size, seed=at)
        self.at, self.damage, self.seen, self.hit = at, damage, 0, None

    def deliver(self, sender: int, receiver: int, sent: Transfer, wanted: Transfer) -> None:
        if self.seen == self.at:
            self.hit = (sender, receiver)
            sent = Transfer(sent.action, sent.peer, self.damage(sent.buffer), sent.what)
        self.seen += 1
        super().deliver(sender, receiver, sent, wanted)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = ((1, 4, S, 6), (1, 2, S, 6), (1, 2, S, 5))
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def one_round(ring: Loopback) -> list[torch.Tensor]:
    """Forward and backward of one call."""
    plan = ContextParallel(ring, layout=Zigzag()).plan(S, Causal())
    x = tensors()
    return list(torch.autograd.grad(plan.attention(*x).square().sum(), x))


def flip(word: int):
    def damage(buffer: torch.Tensor) -> torch.Tensor:
        damaged = buffer.clone()
        damaged[8 * word] ^= 1
        return damaged

    return damage


@pytest.mark.parametrize("word", range(8), ids=WORDS)
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_header_with_one_wrong_field_raises(moment, word):
    """Every field is compared; the error names both ranks, the step and the field."""
    whole = Loopback(R)
    one_round(whole)
    messages = sum(whole.counts.messages.values())
    ring = Damaged(R, 3 if moment == "forward" else messages - 3, flip(word))
    with pytest.raises(TransferError) as caught:
        one_round(ring)
    sender, receiver = ring.hit
    message = str(caught.value)
    assert message.startswith(f"ring rank {receiver}: ") and f"that ring rank {sender} sent at step " in message
    assert f"must carry its own header; got {WORDS[word]} " in message and " instead of " in message
    assert ("DKV block" in message or "KV block" in message) and "the result is not returned" in message


def test_every_message_s_header_is_read():
    """Whichever of a call's messages is foreign."""
    whole = Loopback(R)
    right = one_round(whole)
    messages = sum(whole.counts.messages.values())
    assert messages == 3 * R * (R - 1)  # blocks in forward, blocks and their gradients in backward
    for at in range(messages):
        with pytest.raises(TransferError, match=r"got call \d+ instead of \d+\."):
            one_round(Damaged(R, at, flip(2)))
    untouched = Damaged(R, messages, flip(2))
    assert all(torch.equal(a, b) for a, b in zip(right, one_round(untouched), strict=True))


def test_a_stale_message_raises():
    """The bytes of the call before: right in all but the call's number."""

    class Stale(Loopback):
        kept = None
        replay = False

        def deliver(self, sender, receiver, sent, wanted):
            if (sender, receiver) == (1, 2):
                if self.replay:
                    sent = Transfer(sent.action, sent.peer, self.kept, sent.what)
                elif self.kept is None:
                    self.kept = sent.buffer.clone()
            super().deliver(sender, receiver, sent, wanted)

    ring = Stale(R)
    plan = ContextParallel(ring).plan(S, Full())
    x = [t.detach() for t in tensors()]
    right = plan.attention(*x)
    ring.replay = True
    with pytest.raises(TransferError, match=r"ring rank 2: .*ring rank 1 sent at step 0 .*got call 0 instead of 1"):
        plan.attention(*x)
    ring.replay = False
    assert torch.equal(plan.attention(*x), right)  # the ring goes on


def test_swapped_messages_raise():
    """Two blocks over one link in the wrong order."""

    class Swapped(Loopback):
        kept = None

        def deliver(self, sender, receiver, sent, wanted):
            if (sender, receiver) == (0, 1):
                if self.kept is None:
                    self.kept = sent.buffer.clone()
                else:
                    sent = Transfer(sent.action, sent.peer, self.kept, sent.what)
            super().deliver(sender, receiver, sent, wanted)

    with pytest.raises(TransferError, match="step 0 instead of 1, source 0 instead of 3"):
        ContextParallel(Swapped(R)).plan(S + 2, Full()).attention(*(torch.randn(1, 2, S + 2, 4) for _ in range(3)))


@pytest.mark.parametrize("cut", [1, 64, HEADER_BYTES + 64])
@pytest.mark.parametrize("at", [0, 7, -1])
def test_a_short_message_raises(at, cut):
    whole = Loopback(R)
    one_round(whole)
    ring = Damaged(R, at % sum(whole.counts.messages.values()), lambda buffer: buffer[:-cut])
    with pytest.raises(
        TransferError, match=r"ring rank \d: D?KV of ring rank \d at step \d of call \d from ring rank \d must be"
    ) as e:
        one_round(ring)
    sender, receiver = ring.hit
    assert str(e.value).startswith(f"ring rank {receiver}: ") and f"from ring rank {sender} must be " in str(e.value)


MASKS = (
    Full(),
    Causal(),
    Window(3),
    Window(9),
    Causal() & Documents([7, 9], [0, 8]),
    Documents([2], [10]),
    Documents([]),
)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_messages_and_bytes_on_the_wire_are_those_of_accounting(layout, dtype):
    for ranks in (1, 2, 3, 5):
        for mask in MASKS:
            ring = Loopback(ranks)
            plan = ContextParallel(ring, layout=layout).plan(S, mask)
            q, k, v = (t.detach().to(dtype).requires_grad_() for t in tensors())
            wire = Format(1, 4, 2, 6, 5, str(dtype)[6:], dtype.itemsize, 8 if dtype == torch.float64 else 4)
            out = plan.attention(q, k, v)
            check_counts(ring, plan, wire, backward=False)
            ring.counts.messages.clear()
            ring.counts.bytes.clear()
            out.sum().backward()
            check_counts(ring, plan, wire, backward=True)


def check_counts(ring: Loopback, plan, wire: Format, *, backward: bool) -> None:
    for schedule, taken in zip(plan.schedules, ways.taken(plan.schedules, wire), strict=True):
        told = account(taken.backward if backward else schedule.forward, wire, backward=backward)
        mine = {receiver: n for (sender, receiver), n in ring.counts.bytes.items() if sender == schedule.ring_rank}
        assert mine == told.sent_bytes
        assert sum(n for (s, _), n in ring.counts.messages.items() if s == schedule.ring_rank) == told.messages


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
def test_a_full_mask_takes_one_hop_less_than_ranks(layout):
    """Each rank sends R - 1 messages forward, all to the next one."""
    ring = Loopback(R)
    plan = ContextParallel(ring, layout=layout).plan(S, Full())
    plan.attention(*(t.detach() for t in tensors()))
    assert dict(ring.counts.messages) == {(r, (r + 1) % R): R - 1 for r in range(R)}


@pytest.mark.parametrize("window", [1, 2, 5, 6, 7, 11, 12, 24])
def test_a_window_on_contiguous_shards_takes_only_the_hops_it_needs(window):
    """ceil((w - 1) / T) hops, at most R - 1."""
    local = 5
    ring = Loopback(R)
    plan = ContextParallel(ring, layout=Contiguous()).plan(R * local, Window(window))
    plan.attention(*(torch.randn(1, 1, R * local, 4) for _ in range(3)))
    hops = min(R - 1, -(-(window - 1) // local))
    assert max(ring.counts.messages.values(), default=0) == hops
    assert sum(ring.counts.messages.values()) == sum(min(hops, R - 1 - r) for r in range(R))


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(2)], ids=str)
def test_a_ring_of_one_sends_nothing(mask):
    ring = Loopback(1)
    one = ContextParallel(ring).plan(S, mask)
    x = tensors()
    torch.autograd.grad(one.attention(*x).sum(), x)
    assert not ring.counts.messages and not ring.counts.bytes
    assert len(one.schedule.forward.messages) == len(one.schedule.backward.messages) == 0
