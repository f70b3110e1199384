"""`ringspun bench peers`: what it says of peers that are right, wrong, missing, refusing, and of those that fail."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from ringspun.core import regions
from ringspun.core.accounting import account
from ringspun.core.geometry import Geometry
from ringspun.core.mask import Causal, Documents, Full, Window
from ringspun.core.wire import Format
from ringspun.testing.cases import LONG_TAILED
from ringspun.testing.peers import PEERS, comparing
from ringspun.testing.peers.absent import Absent
from ringspun.testing.peers.base import Ready
from ringspun.testing.peers.comparing import Outcome, compare
from ringspun.testing.peers.lucidrains import Lucidrains
from ringspun.testing.peers.own import Heads, Ring
from ringspun.testing.peers.record import Comparison
from ringspun.testing.peers.report import remarks, summary, table
from ringspun.testing.peers.rows import ROWS, Row, long_tailed, mask_and_layout
from ringspun.testing.peers.torch_ring import TorchRing
from ringspun.testing.peers.traffic import Traffic
from ringspun.testing.peers.whole import Alone, pieces_of
from tests.test_cli_bench_machine import told

TOKENS = 64
HERE = (Ring(), Heads(), TorchRing("gather", rotate="allgather"), TorchRing("hop", rotate="alltoall"), Alone())
"""Those that need nothing installed."""


@dataclass(frozen=True)
class Faulty(Ring):
    """Ours with a fault planted. `fault`: "gradient": dv doubled; "out": out moved; "order": says that it holds
    other tokens; "raise": raises."""

    fault: str = ""

    def prepare(self, ring_rank, work):
        ready = super().prepare(ring_rank, work)

        def attend(q, k, v):
            if self.fault == "raise":
                raise ValueError("planted")
            if self.fault == "gradient":
                v = v * 2 - v.detach()
            return ready.attend(q, k, v) + (1e-3 if self.fault == "out" else 0)

        positions = ready.positions[::-1].copy() if self.fault == "order" else ready.positions
        return Ready(positions, attend, sent_bytes=ready.sent_bytes)


def compared(pools, row: Row, *peers, tokens: int = TOKENS) -> list[Outcome]:
    return compare(row, peers, pools, rounds=2, judged_tokens=tokens, tokens=tokens)


@pytest.mark.processes
@pytest.mark.parametrize(
    "row",
    [Row("causal", 4096), Row("full", 4096), Row("causal", 4096, heads=4, kv_heads=2, dtype="bfloat16")],
    ids=lambda row: row.name,
)
def test_peers_that_need_nothing_installed_are_right_and_timed(pools, row):
    for found in compared(pools, row, *HERE):
        assert found.status == "right" and not found.instead, found
        assert len(found.forward_s) == len(found.both_s) == 2
        assert all(0 < f < b for f, b in zip(found.forward_s, found.both_s, strict=True))
        assert set(found.errors) == {"out", "dq", "dk", "dv"} and found.peak_bytes > 0
        assert found.sent_bytes == 0 if found.peer == Alone().name else found.sent_bytes > 0


@pytest.mark.processes
def test_a_wrong_peer_is_reported_wrong_and_not_timed_as_if_right(pools):
    faults = ("gradient", "out", "order")
    names = [replace(Faulty(), name=fault, fault=fault) for fault in faults]
    _, gradient, out, order = compared(pools, Row("causal", 4096), Ring(), *names)
    assert (gradient.status, gradient.words) == ("wrong", "wrong: dv")
    assert gradient.errors["dv"] == pytest.approx(1.0, rel=1e-3) and gradient.errors["dk"] < 1e-5
    assert gradient.forward_s and not gradient.both_s and gradient.peak_bytes is None
    assert out.status == order.status == "wrong" and "out" in out.words and "dq" in order.words
    assert not out.forward_s and not order.forward_s
    assert "**wrong: dv**; only its forward is timed" in remarks(gradient) and "not timed" in remarks(out)


@pytest.mark.processes
def test_one_that_refuses_does_what_comes_nearest_and_it_says_so(pools):
    ours, ring, alone = compared(pools, Row("window", 32768), Ring(), HERE[2], Alone())
    assert (ours.status, ours.refusal) == ("right", "")
    for other in (ring, alone):
        assert other.refusal and other.instead == "full causal" and other.status == "right" and other.both_s
        assert "refuses: " in remarks(other) and "**instead: full causal**" in remarks(other)
    cells = summary(Comparison(2, TOKENS, TOKENS, "").and_row(Row("window", 32768), [ours, ring]))[2]
    assert "gather, full causal instead" in cells


@pytest.mark.processes
def test_documents_one_after_the_other_are_right_and_refusals_have_their_reasons(pools):
    ours, alone, ring = compared(pools, Row("documents", 32768), Ring(), Alone(), HERE[3], tokens=66)
    assert ours.status == alone.status == "right" and "one call per document" in alone.remark
    assert ring.status == "refused" and "knows the causal mask" in ring.refusal and not ring.instead  # 66 over 4 chunks
    assert ring.forward_s == () and ours.both_s


@pytest.mark.processes
def test_missing_failing_and_slow_peers_are_listed(pools):
    gone, long = Absent("gone", why="lost"), replace(Alone(), name="long", most_tokens=TOKENS - 1)
    missing = replace(Lucidrains(), module="no_such_module")
    _, absent, away, failed, slow = compared(
        pools, Row("causal", 4096), Ring(), gone, missing, Faulty("failing", fault="raise"), long
    )
    assert (absent.status, absent.words, absent.version) == ("absent", "lost", None)
    assert away.status == "absent" and "benchmarks/peers.txt" in away.words
    assert (failed.status, failed.words) == ("failed", "ValueError: planted") and not failed.errors
    assert slow.status == "long" and slow.errors and not slow.forward_s
    assert len(table([absent, away, failed, slow])) == 2 + 4
    compared(pools, Row("causal", 4096), Ring())  # the ranks are as good as new


def _traffic(ring_rank):
    x, y, flat = torch.ones(6, 4), torch.zeros(6, 4), torch.ones(24)
    counted = []
    for call in (
        lambda: [w.wait() for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - ring_rank),
                                                           dist.P2POp(dist.irecv, y, 1 - ring_rank)])],
        lambda: dist.all_to_all_single(y, x),
        lambda: collectives.permute_tensor(flat, [1, 0], dist.group.WORLD).sum(),
        lambda: collectives.permute_tensor(flat, [0, 1], dist.group.WORLD).sum(),
        lambda: collectives.all_gather_single(x, gather_dim=0, group=dist.group.WORLD).sum(),
        dist.barrier,
        lambda: dist.all_reduce(y),
    ):  # fmt: skip
        with Traffic() as traffic:
            call()
        counted.append(traffic.bytes)
    return counted


@pytest.mark.processes
def test_bytes_are_those_that_go_to_others(pools):
    whole = 6 * 4 * 4
    assert pools(2).run(_traffic) == [[whole, whole // 2, whole, 0, whole, 0, None]] * 2


@pytest.mark.processes
def test_our_bytes_are_those_of_the_accounting(pools):
    row = Row("causal", 4096, heads=2, kv_heads=1)
    (ours,) = compared(pools, row, Ring())
    work = row.work(TOKENS)
    wire = Format(1, 2, 1, 64, 64, "float32", 4, 4)
    schedules = Geometry(2, (0, 1), work.layout, work.route).schedule(work.mask, TOKENS)
    assert ours.sent_bytes == max(
        account(s.forward, wire, backward=False).total_sent_bytes
        + account(s.backward, wire, backward=True).total_sent_bytes
        for s in schedules
    )


def test_masks_of_rows_stretch_and_are_shared_evenly():
    for n in (*range(64, 512, 37), 16384, 32768):
        assert sum(long_tailed(n)) == n and min(long_tailed(n)) > 0
    assert long_tailed(16384) == list(LONG_TAILED) and len(long_tailed(32768)) == 32
    for row in ROWS:
        work = row.work()
        schedules = Geometry(row.ranks, tuple(range(row.ranks)), work.layout, work.route).schedule(
            work.mask, row.seq_len
        )
        pairs = [sum(s.forward.pairs) for s in schedules]
        assert sum(pairs) == regions.count(work.mask.regions(row.seq_len, row.seq_len)).sum()
        assert max(pairs) <= 1.03 * np.mean(pairs), row.name
    assert mask_and_layout("window", 32768, 2)[0] == Window(1024)
    assert max(Counter(row.name for row in ROWS).values()) == 1


def test_pieces_are_the_mask():
    n = 24
    for mask in (Causal(), Full(), Causal() & Documents([5, 0, 19]), Documents([20, 4])):
        dense = np.zeros((n, n), bool)
        for a, b, causal in pieces_of(mask, n):
            dense[a:b, a:b] = np.tri(b - a, dtype=bool) if causal else True
        assert np.array_equal(dense, mask.as_array(n))
    assert pieces_of(Window(3), n) is None and pieces_of(Causal() & Documents([5]), n) is None


def test_the_command_lists_and_refuses(tmp_path):
    listed = told("peers", "--list", "--rows", "window", "--ranks", "2").split("\n")
    assert listed[0] == "window-32768-r2-h2-d64-float32" and PEERS[0].name in listed and "picotron ring" in listed
    for options, words in (
        (["--rows", "nothing"], "rows must name rows of the table; got 'nothing'"),
        (["--peers", "nobody"], "peers must name peers; got 'nobody'"),
        (["--rounds", "0"], "rounds must be at least 1; got 0."),
        (["--tokens", "1"], "tokens must be at least 16; got 1."),
        (["--save", str(tmp_path / "no" / "file")], "save must be a place for a file; got "),
        (["--judged-tokens", "1"], "judged-tokens must be at least 16; got 1."),
    ):
        assert words in told("peers", *options, code=1 if "--save" in options else 2)


def test_the_command_prints_tables_json_and_a_picture(monkeypatch, tmp_path):
    row = ROWS[0]
    same = dict.fromkeys(("out", "dq", "dk", "dv"), 1e-7)
    ours = replace(Outcome("ringspun, ring", "1", "right", is_ours=True, errors=same), forward_s=(1.0,) * 2)
    ours = replace(ours, both_s=(2.0, 2.0), peak_bytes=1 << 20, sent_bytes=1 << 21)
    other = replace(
        ours, peer="other", is_ring=True, is_ours=False, both_s=(3.0, 3.0), sent_bytes=None, peak_bytes=3 << 20
    )
    monkeypatch.setattr(comparing, "compare", lambda *args, **kwargs: [ours, other])
    picture = tmp_path / "peers.png"
    printed = told("peers", "--rows", row.name, "--plot", str(picture))
    assert "| 2.000 | other | 3.000 | 1.500 | 1.00 | 3.00 |" in printed
    assert "| other | 1 | 1.000 | 3.000 | 1.500 | 3.00 | ? | 1.0e-07 |" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    read = json.loads(told("peers", "--rows", row.name, "--json"))
    assert read["rows"][0]["row"]["seq_len"] == 4096 and read["rows"][0]["peers"][1]["both_s"] == [3.0, 3.0]


def test_what_was_saved_is_told_again(monkeypatch, tmp_path):
    ours = Outcome("ringspun, ring", "1", "right", both_s=(2.0,), forward_s=(1.0,))
    monkeypatch.setattr(comparing, "compare", lambda *args, **kwargs: [ours])
    files = [str(tmp_path / f"{n}.json") for n in "ab"]
    first, second = (
        told("peers", "--rows", row.name, "--save", file) for row, file in zip(ROWS[:2], files, strict=True)
    )
    assert told("peers", "--from", files[0]) == first
    both = told("peers", "--from", ",".join(files))
    assert all(line in both for line in (*first.splitlines(), *second.splitlines()))
    assert told("peers", "--from", files[0], "--json") == (tmp_path / "a.json").read_text() + "\n"
    told("peers", "--rows", ROWS[1].name, "--rounds", "6", "--save", files[1])
    assert "files must be measured alike" in told("peers", "--from", ",".join(files), code=1)
    (tmp_path / "a.json").write_text("{}")
    assert "must be a file of `ringspun bench peers --save`" in told("peers", "--from", files[0], code=1)
