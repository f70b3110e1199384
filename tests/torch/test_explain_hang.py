"""What merged step logs say, on rings whose time is counted: every verdict here is exact and the same in every run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from virtual_ring import START, CountedKernel, VirtualRing, run

from ringspun import Causal, Contiguous, Full, Window, Zigzag
from ringspun.cli.explain_hang import app
from ringspun.errors import DataError, TransferError
from ringspun.steplog import Row, What, dump
from ringspun.steplog.page import page
from ringspun.steplog.timeline import Member, Message, read
from ringspun.steplog.verdict import Kind, Verdict, judge
from ringspun.torch import ContextParallel

TRUST = Path(__file__).parents[2] / "docs" / "trust.md"
QUICK, S_NS = 1e-3, 10**9


def verdict_of(ring: VirtualRing, folder) -> Verdict:
    """What the ring's own logs say; other loopbacks of this process may have some too."""
    rings = {r.name: r for r in read([dump(folder)])}
    return judge(rings[ring.state.logs[0].ring])


def ring_of(size: int, pair_us=lambda rank: 1.0, link_us=lambda a, b: QUICK) -> VirtualRing:
    return VirtualRing(size, pair_us, link_us)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_contiguous_causal_ring_waits_for_its_last_rank(tmp_path, size):
    ring = ring_of(size)
    run(ring, Causal(), Contiguous())
    verdict = verdict_of(ring, tmp_path)
    assert verdict.cause is not None and (verdict.cause.kind, verdict.cause.ranks) == (Kind.COMPUTE, (size - 1,))
    shares = [verdict.shares[r].compute for r in range(size)]
    assert shares == sorted(shares) and verdict.shares[0].peer > 3 * verdict.shares[0].transfer
    assert "imbalance: " in page(verdict) and f"most for ring rank {size - 1}" in page(verdict)


@pytest.mark.parametrize("size", [2, 4])
def test_a_zigzag_causal_ring_is_balanced(tmp_path, size):
    ring = ring_of(size)
    run(ring, Causal(), Zigzag())
    verdict = verdict_of(ring, tmp_path)
    assert verdict.cause is None and "balanced: hardly any waiting" in page(verdict)


@pytest.mark.parametrize("slow", [(0, 1), (1, 2), (3, 0)])
@pytest.mark.parametrize(("layout", "calls"), [(Zigzag(), 2), (Contiguous(), 2), (Zigzag(), 12)], ids=str)
def test_a_slow_link_is_named(tmp_path, slow, layout, calls):
    """With 12 calls older rows are gone."""
    ring = ring_of(4, link_us=lambda a, b: 3000.0 if (a, b) == slow else QUICK)
    run(ring, Full(), layout, calls=calls)
    verdict = verdict_of(ring, tmp_path)
    assert verdict.cause is not None and (verdict.cause.kind, verdict.cause.ranks) == (Kind.LINK, slow)
    assert verdict.blame[verdict.cause] > 0.9 * verdict.blame.total()
    assert "link: " in page(verdict) and f"from ring rank {slow[0]} to ring rank {slow[1]}" in page(verdict)


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_rank_is_named(tmp_path, slow):
    ring = ring_of(4, pair_us=lambda rank: 3.0 if rank == slow else 1.0)
    run(ring, Full(), Zigzag())
    verdict = verdict_of(ring, tmp_path)
    assert verdict.cause is not None and (verdict.cause.kind, verdict.cause.ranks) == (Kind.COMPUTE, (slow,))
    computes = [share.compute for share in verdict.shares.values()]
    assert computes[slow] == max(computes) > 1.5 * sum(computes) / 4
    assert f"most for ring rank {slow}" in page(verdict) and "times the mean" in page(verdict)


def test_a_rank_that_comes_late_from_elsewhere_is_named(tmp_path):
    """A slow data loader, say."""
    ring = ring_of(3)
    run(ring, Full(), Zigzag())
    ring.now[1] += 50_000_000
    run(ring, Full(), Zigzag(), calls=1)
    verdict = verdict_of(ring, tmp_path)
    assert verdict.cause is not None and (verdict.cause.kind, verdict.cause.ranks) == (Kind.OUTSIDE, (1,))


@settings(max_examples=12)
@given(
    st.integers(2, 5),
    st.lists(st.floats(0.1, 5), min_size=5, max_size=5),
    st.lists(st.floats(QUICK, 500), min_size=5, max_size=5),
    st.sampled_from([Causal(), Full(), Window(9)]),
    st.sampled_from([Contiguous(), Zigzag()]),
    st.integers(1, 8),
)
def test_every_moment_of_every_rank_is_given_to_something_once(
    tmp_path_factory, size, pairs, links, mask, layout, calls
):
    """The shares of a rank add up to the window, and what was waited for to all waiting; also where the log is full."""
    ring = ring_of(size, lambda rank: pairs[rank], lambda a, b: links[(a + 2 * b) % 5])
    run(ring, mask, layout, calls=calls, tokens=20)
    verdict = verdict_of(ring, tmp_path_factory.mktemp("logs"))
    start, end = verdict.ring.window
    for share in verdict.shares.values():
        assert sum(vars(share).values()) == pytest.approx(end - start)
    waited = sum(s.peer + s.transfer for s in verdict.shares.values())
    assert verdict.blame.total() == pytest.approx(waited)


def seen_at(verdict: Verdict, time: int) -> Verdict:
    """The verdict of dumps that all ranks had written at that time (ns)."""
    for member in verdict.ring.members.values():
        member.dumped = time
    return judge(verdict.ring)


class StuckOnce(CountedKernel):
    """Rank 1 takes 10 s for its second step."""

    def forward(self, block, tiles):
        computed = [r for r in self.ring.state.logs[1].rows if r.what == What.COMPUTE]
        if self.ring.rank == 1 and len(computed) == 2:
            self.ring.now[1] += 10 * S_NS
        return super().forward(block, tiles)


def test_a_rank_that_hangs_while_it_computes_is_the_root(tmp_path):
    ring = ring_of(4)
    plan = ContextParallel(ring, layout=Zigzag()).plan(12, Full())
    x = torch.ones(1, 1, 12, 2)
    plan.attention(x, x, x, kernel=StuckOnce(ring))
    verdict = seen_at(verdict_of(ring, tmp_path), START + 5 * S_NS)
    assert verdict.root is not None and (verdict.root.kind, verdict.root.ranks) == (Kind.COMPUTE, (1,))
    assert verdict.waits == {0: 1, 2: 1}  # rank 3 has all that it needs of rank 1, which passed it on
    assert "root: ring rank 1 computes step 1 of call 0 (forward), for 5 s so far" in page(verdict)
    assert "from ring rank 1, which has not sent it yet" in page(verdict)
    verdict.ring.name = "0"
    assert f"```text\n{page(verdict)}\n```" in TRUST.read_text(encoding="utf-8")


class Dropping(VirtualRing):
    """No message over one link ever lands."""

    ends = (2, 0)

    def _match(self, sender, receiver):
        if (sender, receiver) != self.ends:
            super()._match(sender, receiver)


def test_a_link_that_drops_messages_is_the_root_and_the_error_leaves_a_log(tmp_path):
    ring = Dropping(3, lambda rank: 1.0, lambda a, b: QUICK)
    plan = ContextParallel(ring, layout=Zigzag(), log_dir=tmp_path).plan(12, Full())
    x = torch.ones(1, 1, 12, 2)
    with pytest.raises(TransferError, match="every rank must advance") as caught:
        plan.attention(x, x, x, kernel=CountedKernel(ring))
    (file,) = tmp_path.glob("ringspun-*.json")
    assert caught.value.__notes__ == [f"step log: {file}. Run `ringspun explain-hang`."]
    told = json.loads(file.read_text())
    assert told["reason"] == "error" and told["failure"].startswith("TransferError: every rank must advance")
    (merged,) = [r for r in read([file]) if r.name == ring.state.logs[0].ring]
    for member in merged.members.values():
        member.spans.pop()  # nobody failed by himself: the loopback did
    verdict = seen_at(judge(merged), START + S_NS)
    assert verdict.root is not None and (verdict.root.kind, verdict.root.ranks) == (Kind.LINK, (2, 0))


def test_what_is_older_than_a_log_has_been_posted():
    """Its row was dropped, so that nobody is blamed for it."""
    member = Member(0, Path(), 0, 0, oldest=(5, 2))

    def message(call: int, step: int) -> Message:
        return Message(True, 1, (call, 0, 0, step, 3, 0))

    assert [member.has_posted(message(*at), 9) for at in ((4, 7), (5, 1), (5, 2), (6, 0))] == [True, True, False, False]
    member.posted[message(6, 0)] = 7
    assert [member.has_posted(message(6, 0), time) for time in (6, 7)] == [False, True]
    member.oldest = None
    assert not member.has_posted(message(4, 7), 9)


def by_rank(ring: VirtualRing, folder, *, machines: int = 1) -> list[Path]:
    """The ring's dump as one file per rank, dealt to machines whose monotonic clocks have nothing in common."""
    told = json.loads(dump(folder / "whole").read_text())
    files = []
    for log in (x for x in told["logs"] if x["ring"] == ring.state.logs[0].ring):
        machine = log["ring_rank"] % machines
        at, shift = Row._fields.index("monotonic"), machine * 10**13
        log["monotonic"] += shift
        log["rows"] = [[*row[:at], row[at] + shift, *row[at + 1 :]] for row in log["rows"]]
        file = folder / f"rank{log['ring_rank']}.json"
        file.write_text(json.dumps({**told, "boot": f"machine {machine}", "logs": [log]}))
        files.append(file)
    return files


def test_ranks_of_two_machines_are_compared_by_wall_clocks(tmp_path):
    ring = ring_of(4, link_us=lambda a, b: 3000.0 if (a, b) == (1, 2) else QUICK)
    run(ring, Full(), Zigzag())
    whole = verdict_of(ring, tmp_path)
    (merged,) = read(by_rank(ring, tmp_path, machines=2))
    apart = judge(merged)
    assert "wall clocks of several machines" in page(apart) and "one clock" in page(whole)
    assert (apart.blame, apart.shares) == (whole.blame, whole.shares)


@pytest.mark.parametrize("dead", range(3))
def test_a_rank_without_a_dump_is_the_root_of_those_that_wait_for_it(tmp_path, dead):
    ring = Dropping(3, lambda rank: 1.0, lambda a, b: QUICK)
    ring.ends = (dead, (dead + 1) % 3)
    plan = ContextParallel(ring, layout=Zigzag()).plan(12, Full())
    x = torch.ones(1, 1, 12, 2)
    with pytest.raises(TransferError):
        plan.attention(x, x, x, kernel=CountedKernel(ring))
    files = by_rank(ring, tmp_path)
    (merged,) = read(files[:dead] + files[dead + 1 :])
    for member in merged.members.values():
        member.spans.pop()
    verdict = seen_at(judge(merged), START + S_NS)
    assert verdict.root is not None and (verdict.root.kind, verdict.root.ranks) == (Kind.ABSENT, (dead,))
    assert merged.absent == [dead]
    assert f"root: ring rank {dead} left no dump" in page(verdict) and "gone: 100 %" in page(verdict)


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_reads_a_folder_and_prints_a_page(tmp_path):
    ring = ring_of(2)
    run(ring, Causal(), Contiguous())
    dump(tmp_path)
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "imbalance: " in result.output and "root: " in result.output
    assert "rank   compute  waits: peers  transfer  between calls   where it is" in result.output


def test_the_command_prints_data(tmp_path):
    ring = ring_of(2)
    run(ring, Causal(), Contiguous())
    result = CliRunner().invoke(app, ["--json", str(dump(tmp_path))])
    told = {r["ring"]: r for r in json.loads(result.output)}[ring.state.logs[0].ring]
    assert told["cause"] == {"kind": "imbalance", "ranks": [1]} and told["absent"] == []
    assert set(told["ranks"]["0"]) == {"compute", "peer", "transfer", "outside", "where"}


BAD = {
    "no file": None,
    "no JSON": "{",
    "another JSON": "[1]",
    "another format": '{"format": 99}',
    "rows that are none": '{"format": 1, "boot": "", "columns": COLUMNS, "logs": [{"ring": "", "ranks": [0, 1], '
    '"ring_rank": 0, "full": false, "monotonic": 1, "wall": 1, "rows": [[1]]}]}',
    "nothing": '{"format": 1, "boot": "", "columns": COLUMNS, "logs": []}',
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_dump_is_refused(tmp_path, kind):
    file = tmp_path / "ringspun-x.json"
    if BAD[kind] is not None:
        file.write_text(BAD[kind].replace("COLUMNS", json.dumps(Row._fields)))
    with pytest.raises(DataError, match=r"dumps? must "):
        read([file])
    result = CliRunner().invoke(app, [str(file)])
    assert result.exit_code == 2 and "ringspun explain-hang: dump" in result.output


def test_an_empty_folder_is_refused(tmp_path):
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == 2 and "must get at least one dump" in result.output


def test_pieces_of_one_step_are_told_apart(tmp_path):
    """Of four pieces sent at once, which arrive one by one, the first has landed when the second is waited for."""
    ring = VirtualRing(2, lambda rank: 1.0, lambda a, b: QUICK)
    plan = ContextParallel(ring, layout=Contiguous(), block_size=2).plan(16, Full())
    x = torch.ones(1, 1, 16, 2)
    plan.attention(x, x, x, kernel=CountedKernel(ring))
    (merged,) = [r for r in read([dump(tmp_path)]) if r.name == ring.state.logs[0].ring]
    for member in merged.members.values():
        assert len(member.posted) == len(member.landed) == 8
        assert len({member.landed[m] for m in member.posted if not m.sends}) > 1
