"""All ranks of a ring in plain Python: moves block names and sets of contributions along the message rows, and computes
nothing. It keeps the waiting rule of `ringspun.core.route.base` and takes every freedom that the rule leaves: a message
counts as under way from the moment it is posted until it is waited for, and ranks run in any order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from ringspun.core.route.base import NONE, OWN, Action, Moment, Rows, pack_slot
from ringspun.core.wire import Payload, Side


class Fault(AssertionError):
    """The messages do not do what the steps need."""


def check(condition, message):
    if not condition:
        raise Fault(message)


@dataclass
class Slot:
    """One buffer: the owner of the rows in it, who has added gradients to them, and what is under way."""

    owner: int | None = None
    added: Counter = field(default_factory=Counter)
    sending: int = 0
    receiving: bool = False


@dataclass
class Post:
    """One posted message. `label` is what both ends must say alike."""

    action: Action
    label: tuple
    slot: Slot
    done: bool = False


class Wires:
    """Between each two ranks the i-th send is the i-th receive, as on every real transport without tags."""

    def __init__(self):
        self.posts = defaultdict(lambda: ([], []))
        self.events = 0

    def post(self, sender, receiver, post):
        ends = self.posts[sender, receiver]
        ends[post.action].append(post)
        self.events += 1
        i = len(ends[post.action]) - 1
        if i < min(map(len, ends)):
            send, receive = ends[Action.SEND][i], ends[Action.RECEIVE][i]
            check(
                send.label == receive.label,
                f"{sender} to {receiver}: sends {send.label}, expects {receive.label}",
            )
            receive.slot.owner, receive.slot.added = send.slot.owner, Counter(send.slot.added)
            send.done = receive.done = True
            self.events += 1

    def close(self):
        for (sender, receiver), (sends, receives) in self.posts.items():
            check(
                len(sends) == len(receives),
                f"{sender} to {receiver}: {len(sends)} sends, {len(receives)} receives",
            )


class Rank:
    """One rank's pass: `computes` are the steps that have pairs, `owners` the ranks that own the blocks."""

    def __init__(self, rank, size, legs, computes, tokens, owners, wires):
        self.rank, self.legs, self.computes, self.tokens, self.wires = rank, legs, computes, tokens, wires
        self.size, self.owners, self.side = size, owners, getattr(legs, "side", Side.KEYS)
        self.slots = defaultdict(Slot)
        self.own = defaultdict(Counter)
        self.open = {}

    def run(self, backward):
        for step, row in enumerate(self.legs.steps.tolist()):
            yield from self.wait(step, Moment.BEFORE)
            self.post(step, Moment.BEFORE)
            if step in self.computes:
                self.read_block(step, *row[:2])
            yield from self.wait(step, Moment.AFTER)
            if backward:
                self.add_gradients(step, *row)
            self.post(step, Moment.AFTER)
        for due, moment in sorted(self.open):
            yield from self.wait(due, moment)

    def wait(self, step, moment):
        """For what is due: a message of a step that was never waited for would be under way still."""
        for post in self.open.pop((step, moment), []):
            while not post.done:
                yield
            if post.action == Action.SEND:
                post.slot.sending -= 1
            else:
                post.slot.receiving = False

    def post(self, step, moment):
        for row in self.legs.messages.tolist():
            if row[:2] != [step, moment]:
                continue
            _, _, action, payload, peer, source, row0, row1, head0, head1, slot, due = row
            where = f"rank {self.rank}, step {step}, {Payload(payload).name} {source} in slot {slot}"
            check(peer != self.rank and 0 <= peer < self.size, f"{where}: peer {peer}")
            check((row0, row1, head0, head1) == (0, self.tokens[source], 0, -1), f"{where}: not the whole block")
            place = self.slots[payload, pack_slot(slot)]
            if action == Action.RECEIVE:
                check(slot > OWN and not place.sending and not place.receiving, f"{where}: overwrites")
                place.receiving, place.owner = True, None
            else:
                if slot <= OWN:
                    own = self.owners[source] == self.rank
                    check(payload == self.side.block and own, f"{where}: packs what is not its own")
                    check(not place.sending and not place.receiving, f"{where}: packs over what is under way")
                    place.owner = source
                check(not place.receiving and place.owner == source, f"{where}: sends {place.owner}")
                place.sending += 1
            post = Post(Action(action), (step, payload, source, row0, row1), place)
            check(due > step, f"{where}: due at {due}")
            self.open.setdefault((due, moment), []).append(post)
            ends = (self.rank, peer) if action == Action.SEND else (peer, self.rank)
            self.wires.post(*ends, post)

    def read_block(self, step, source, slot):
        where = f"rank {self.rank}, step {step}: computes with block {source} in slot {slot}"
        if slot == OWN:
            check(self.owners[source] == self.rank, f"{where}, its own")
        else:
            place = self.slots[self.side.block, slot]
            check(not place.receiving and place.owner == source, f"{where}, which holds {place.owner}")

    def add_gradients(self, step, source, _, slot, fresh, home, home_block, reader):
        where = f"rank {self.rank}, step {step}: gradients of block {source} in slot {slot}"
        if slot == OWN:
            check(not fresh, f"{where}: own accumulators start from zero once")
            if step in self.computes:
                check(self.owners[source] == self.rank, f"{where}: not its own")
                self.own[source][reader] += 1
        else:
            place = self.slots[self.side.gradients, slot]
            idle = not place.sending and not place.receiving
            if fresh:
                check(idle, f"{where}: zeroes what is under way")
                place.owner, place.added = source, Counter()
            check(not place.receiving and place.owner == source, f"{where}: which holds {place.owner}")
            if step in self.computes:
                check(idle, f"{where}: adds to what is under way")
                place.added[reader] += 1
        if home != NONE:
            place = self.slots[self.side.gradients, home]
            mine = place.owner == home_block and self.owners[home_block] == self.rank
            check(not place.receiving and mine, f"{where}: not home, holds {place.owner}")
            self.own[home_block] += place.added


def play(legs, computes, tokens, *, backward, seed=0, owners=None):
    """Run every rank's pass to its end; who added to each block's gradients, how often, in order of their first time.

    Args:
        legs: anything with `steps` and `messages`, per rank. computes: per rank the steps that have pairs.
        tokens, owners: rows and rank of each block; default: block r is rank r's.
    """
    rng, wires = np.random.default_rng(seed), Wires()
    owners = list(range(len(tokens))) if owners is None else list(map(int, owners))
    ranks = [Rank(r, len(legs), one, computes[r], list(map(int, tokens)), owners, wires) for r, one in enumerate(legs)]
    running = {r: rank.run(backward) for r, rank in enumerate(ranks)}
    while running:
        before, alive = wires.events, len(running)
        for r in rng.permutation(list(running)).tolist():
            for _ in running[r]:
                break
            else:
                del running[r]
        check(wires.events > before or len(running) < alive, f"ranks {sorted(running)} wait for each other")
    wires.close()
    return [ranks[owner].own[block] for block, owner in enumerate(owners)]


def first_steps(steps: Rows) -> dict[int, int]:
    """The step at which each block is computed with: the first that names its owner."""
    found: dict[int, int] = {}
    for step, source in enumerate(steps[:, 0].tolist()):
        found.setdefault(source, step)
    return found
