"""All ranks of a ring in plain Python: moves block names and sets of contributions along the message rows, and computes
nothing. It keeps the waiting rule of `ringspun.core.route.base` and takes every freedom that the rule leaves: a message
counts as under way from the moment it is posted until it is waited for, and ranks run in any order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from ringspun.core.route.base import KEPT, NONE, OWN, Action, MessageColumn, Moment, Rows, StepColumn, pack_slot
from ringspun.core.wire import Payload, Side


class Fault(AssertionError):
    """The messages do not do what the steps need."""


def check(condition, message):
    if not condition:
        raise Fault(message)


@dataclass
class Slot:
    """One buffer: the block whose rows are in it, of which stride of heads, who has added gradients to them, and what
    is under way."""

    owner: int | None = None
    stride: int = 0
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
            receive.slot.stride = send.slot.stride
            send.done = receive.done = True
            self.events += 1

    def close(self):
        for (sender, receiver), (sends, receives) in self.posts.items():
            check(
                len(sends) == len(receives),
                f"{sender} to {receiver}: {len(sends)} sends, {len(receives)} receives",
            )


class Rank:
    """One rank's pass: `computes` are the steps that have pairs, `owners` the ranks that own the blocks, `parts` the
    blocks that are put together as one more, `kept` those that lie there from another pass, by slot."""

    def __init__(self, rank, size, legs, computes, tokens, owners, wires, parts=(), kept=None):
        self.rank, self.legs, self.computes, self.tokens, self.wires = rank, legs, computes, tokens, wires
        self.size, self.owners, self.side = size, owners, getattr(legs, "side", Side.KEYS)
        self.parts, self.whole = set(parts), len(owners)
        self.slots = defaultdict(Slot)
        for slot, block in (kept or {}).items():
            self.slots[self.side.block, slot].owner = block
        self.kept = kept
        self.own = defaultdict(Counter)
        self.open = {}

    def run(self, backward):
        for step, row in enumerate(self.legs.steps.tolist()):
            yield from self.wait(step, Moment.BEFORE)
            self.put_together(step, row)
            self.post(step, Moment.BEFORE)
            if step in self.computes:
                self.read_block(step, *row[:2], row[StepColumn.STRIDE])
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

    def unpacked(self, step, payload):
        """What is due at a step and belongs elsewhere than in its slot: block and slot."""
        for row in self.legs.messages.tolist():
            _, _, action, kind, _, source, *_, slot, due = row
            if (action, kind, due) == (Action.RECEIVE, payload, step) and slot <= OWN:
                place = self.slots[payload, pack_slot(slot)]
                check(not place.receiving and place.owner == source, f"rank {self.rank}, step {step}: lacks {source}")
                yield source, place

    def put_together(self, step, row):
        source, slot, stride = row[0], row[1], row[StepColumn.STRIDE]
        came = dict(self.unpacked(step, self.side.block))
        where = f"rank {self.rank}, step {step}: puts together {sorted(came)}"
        if source != self.whole or step not in self.computes:
            return
        foreign = {part for part in self.parts if self.owners[part] != self.rank}
        check(came.keys() == foreign and all(p.stride == stride for p in came.values()), where)
        place = self.slots[self.side.block, slot]
        check(not place.sending and not place.receiving, f"{where}, over what is under way")
        place.owner, place.stride = source, stride

    def post(self, step, moment):
        for row in self.legs.messages.tolist():
            if row[:2] != [step, moment]:
                continue
            _, _, action, payload, peer, source, row0, row1, stride, strides, slot, due = row
            where = f"rank {self.rank}, step {step}, {Payload(payload).name} {source} in slot {slot}"
            check(peer != self.rank and 0 <= peer < self.size, f"{where}: peer {peer}")
            check((row0, row1) == (0, self.tokens[source]) and stride < strides, f"{where}: not the whole block")
            place = self.slots[payload, pack_slot(slot)]
            if action == Action.RECEIVE:
                check(slot > OWN or self.whole_there, f"{where}: unpacks where nothing is put together")
                check(not place.sending and not place.receiving, f"{where}: overwrites")
                check(slot < KEPT or (self.kept is None and place.owner is None), f"{where}: overwrites what is kept")
                place.receiving, place.owner = True, None
            else:
                if slot <= OWN:
                    own = self.owners[source] == self.rank
                    check(not place.sending and not place.receiving, f"{where}: packs over what is under way")
                    place.owner, place.stride = source, stride
                    if payload == self.side.block:
                        source_slot = self.legs.steps[step, StepColumn.SLOT]
                        here = source_slot >= KEPT and self.slots[payload, source_slot].owner == source
                        check(own or here, f"{where}: packs what is neither its own nor kept")
                    else:
                        whole = self.slots[payload, self.legs.steps[step, StepColumn.GRAD_SLOT]]
                        holds = whole.owner == self.whole and whole.stride == stride and source in self.parts
                        check(holds, f"{where}: packs out of {whole.owner}")
                        place.added = Counter(whole.added)
                check(not place.receiving and place.owner == source, f"{where}: sends {place.owner}")
                place.sending += 1
            post = Post(Action(action), (step, payload, source, row0, row1, stride, strides), place)
            check(due > step, f"{where}: due at {due}")
            self.open.setdefault((due, moment), []).append(post)
            ends = (self.rank, peer) if action == Action.SEND else (peer, self.rank)
            self.wires.post(*ends, post)

    @property
    def whole_there(self):
        return bool((self.legs.messages[:, MessageColumn.STRIDES] > 1).any() or self.parts)

    def read_block(self, step, source, slot, stride):
        where = f"rank {self.rank}, step {step}: computes with block {source} in slot {slot}"
        if slot == OWN:
            check(self.owners[source] == self.rank, f"{where}, its own")
        else:
            place = self.slots[self.side.block, slot]
            held = not place.receiving and (place.owner, place.stride) == (source, stride)
            check(held, f"{where}, which holds {place.owner}")

    def add_gradients(self, step, source, _, slot, fresh, home, home_block, reader, stride, strides):
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
                place.owner, place.stride, place.added = source, stride, Counter()
            check(not place.receiving and place.owner == source, f"{where}: which holds {place.owner}")
            if step in self.computes:
                check(idle, f"{where}: adds to what is under way")
                place.added[reader] += 1
        if home != NONE:
            place = self.slots[self.side.gradients, home]
            mine = home_block == self.whole or self.owners[home_block] == self.rank
            check(not place.receiving and mine and place.owner == home_block, f"{where}: not home, holds {place.owner}")
            self.own[self.rank if home_block == self.whole else home_block] += place.added
        for block, place in self.unpacked(step, self.side.gradients):
            check(self.owners[block] == self.rank, f"{where}: {block} is not home")
            self.own[block] += place.added


def play(legs, computes, tokens, *, backward, seed=0, owners=None, parts=None, kept=None):
    """Run every rank's pass to its end; who added to each block's gradients, how often, in order of their first time.

    Args:
        legs: anything with `steps` and `messages`, per rank. computes: per rank the steps that have pairs.
        tokens, owners: rows and rank of each block; default: block r is rank r's. parts: blocks that each rank puts
            together; default: none. kept: per rank the blocks that forward left, by slot; default: none.
    """
    rng, wires = np.random.default_rng(seed), Wires()
    owners = list(range(len(tokens))) if owners is None else list(map(int, owners))
    parts, tokens = [()] * len(legs) if parts is None else parts, list(map(int, tokens))
    kept = [None] * len(legs) if kept is None else kept
    ranks = [
        Rank(r, len(legs), one, computes[r], tokens, owners, wires, parts[r], kept[r]) for r, one in enumerate(legs)
    ]
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


def read_steps(steps: Rows) -> dict[int, int]:
    """The step at which each block is computed with: the first that names it with a reader."""
    found: dict[int, int] = {}
    for step, (source, reader) in enumerate(steps[:, [0, 6]].tolist()):
        if reader != NONE:
            found.setdefault(source, step)
    return found
