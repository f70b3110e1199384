"""A verdict as a page to read, and as plain data."""

from __future__ import annotations

from typing import Any

from ringspun.steplog.timeline import Member, Merged, State, partner
from ringspun.steplog.verdict import Kind, Root, Verdict, under_way


def page(verdict: Verdict) -> str:
    """What to read."""
    ring = verdict.ring
    start, end = ring.window
    clocks = "one clock" if ring.one_clock else "wall clocks of several machines: their offset enters every figure"
    lines = [
        f"ring {ring.name} (world ranks {', '.join(map(str, ring.ranks))}): {len(ring.members)} dumps, {clocks}",
        "",
        f"root: {root_words(verdict)}",
        f"over the last {_seconds(end - start)}: {cause_words(verdict)}",
        "",
        "rank   compute  waits: peers  transfer  between calls   where it is",
    ]
    for rank in range(ring.size):
        if rank not in ring.members:
            lines.append(f"{rank:4}  {'no dump: dead, or not asked for one':45}   ?")
            continue
        share = verdict.shares[rank]
        parts = [f"{_percent(x, end - start)}" for x in (share.compute, share.peer, share.transfer, share.outside)]
        lines.append(
            f"{rank:4}   {parts[0]:>7}  {parts[1]:>12}  {parts[2]:>8}  {parts[3]:>13}   {_doing(verdict, rank)}"
        )
    return "\n".join(lines)


def as_data(verdict: Verdict) -> dict[str, Any]:
    """For programs; times in seconds, shares of the window."""
    ring = verdict.ring
    start, end = ring.window
    length = max(end - start, 1)
    return {
        "ring": ring.name,
        "world_ranks": list(ring.ranks),
        "absent": ring.absent,
        "one_clock": ring.one_clock,
        "seconds": (end - start) / 1e9,
        "root": _root(verdict.root),
        "cause": _root(verdict.cause),
        "waits_for": {str(r): peer for r, peer in verdict.waits.items()},
        "ranks": {
            str(r): {name: x / length for name, x in vars(share).items()} | {"where": _doing(verdict, r)}
            for r, share in verdict.shares.items()
        },
    }


def root_words(verdict: Verdict) -> str:
    """What the ranks that wait at the end wait for."""
    root, ring = verdict.root, verdict.ring
    if root is None:
        return "nobody waits"
    who = f"ring rank {root.ranks[0]}"
    if root.kind == Kind.ABSENT:
        return f"{who} left no dump: it is dead, or cannot write one (send it SIGUSR1)"
    if root.kind == Kind.LINK:
        return f"the link from {who} to ring rank {root.ranks[-1]}: both ends have posted a message that has not landed"
    if root.kind == Kind.CIRCLE:
        return f"ring ranks {', '.join(map(str, root.ranks))} wait for one another: they are not in the same call"
    member = ring.members[root.ranks[0]]
    if root.kind == Kind.FAILED:
        assert member.failure is not None
        return f"{who} failed in {member.failure.place}: {member.failure.words}"
    span = member.at(verdict.now)
    lasting = _seconds(verdict.now - span.start)
    if root.kind == Kind.COMPUTE:
        return f"{who} computes {span.place}, for {lasting} so far"
    last = max(m.at(verdict.now).call for m in ring.members.values())
    behind = f", {last - span.call} behind" if last > span.call else ""
    return f"{who} is {span.state.value}, {span.place}{behind}, for {lasting} so far"


def cause_words(verdict: Verdict) -> str:
    """What all waiting in the window was for."""
    cause = verdict.cause
    if cause is None:
        return "balanced: hardly any waiting"
    kind = cause.kind
    share = f"{_percent(verdict.waited[kind], verdict.blame.total())} of all waiting is for"
    most = _percent(verdict.blame[cause], verdict.blame.total())
    who = f"ring rank {cause.ranks[0]}"
    if kind == Kind.COMPUTE:
        computes = [s.compute for s in verdict.shares.values()]
        ratio = verdict.shares[cause.ranks[0]].compute / max(sum(computes) / len(computes), 1)
        return (
            f"imbalance: {share} a peer's compute, most for {who} ({most}), which computes {ratio:.1f} times the mean"
        )
    if kind == Kind.LINK:
        return f"link: {share} messages under way, most from {who} to ring rank {cause.ranks[-1]} ({most})"
    if kind == Kind.OUTSIDE:
        return f"late: {share} ranks between calls, most for {who} ({most}): look at what it does outside of the ring"
    if kind == Kind.ABSENT:
        return f"gone: {share} ranks without a dump, most for {who} ({most})"
    if kind == Kind.FAILED:
        return f"failure: {share} ranks that an error ended, most for {who} ({most})"
    return f"circle: {share} ranks that wait for one another: {', '.join(map(str, cause.ranks))}"


def _doing(verdict: Verdict, rank: int) -> str:
    """One rank's state at the end, in words."""
    member = verdict.ring.members[rank]
    span = member.at(verdict.now)
    if span.state == State.WAITING:
        return f"waits for {_waited(verdict.ring, member, verdict.now)}"
    if span.state == State.TOGETHER:
        peer = verdict.waits[rank]
        return f"waits for {'the others' if peer is None else f'ring rank {peer}'} in {span.words}"
    if span.state == State.FAILED:
        return f"failed in {span.place}: {span.words.splitlines()[0][:200]}"
    return f"{span.state.value}, {span.place}"


def _waited(ring: Merged, member: Member, now: int) -> str:
    """The message that a rank waits for, and how far it is."""
    messages = under_way(ring, member.ring_rank, member.at(now), now)
    for m in sorted(messages, key=lambda m: m.sends):
        peer = ring.members.get(m.peer)
        if peer is None:
            return f"{m.words}, which left no dump"
        if not peer.has_posted(partner(m, member.ring_rank), now):
            return f"{m.words}, which has not {'asked for' if m.sends else 'sent'} it yet"
    return f"{', '.join(m.words for m in messages)}: under way"


def _root(root: Root | None) -> dict[str, Any] | None:
    return None if root is None else {"kind": root.kind.value, "ranks": list(root.ranks)}


def _seconds(ns: float) -> str:
    return f"{ns / 1e9:.3g} s"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / max(whole, 1):.0f} %"
