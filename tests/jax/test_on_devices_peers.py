"""Peers in JAX beside the others: judged by the same oracle, timed by the same clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ringspun.testing.peers.comparing import compare
from ringspun.testing.peers.judging import Judge
from ringspun.testing.peers.on_devices import MOST_DEVICES, Ejkernel, JaxRing, Published
from ringspun.testing.peers.on_ranks import judge_on_rank
from ringspun.testing.peers.own import Ring
from ringspun.testing.peers.report import table
from ringspun.testing.peers.rows import Row

CAUSAL = Row("causal", 4096, heads=2, kv_heads=2, head_size=16)


def judged(peer, work):
    judge = Judge.of(work)
    errors = judge.errors([judge_on_rank(0, peer, work)])
    return judge.wrong(errors), errors


@pytest.mark.parametrize(
    ("peer", "row", "tokens"),
    [
        (Published(), CAUSAL, 64),
        (JaxRing(), replace(CAUSAL, kv_heads=1, dtype="bfloat16"), 64),
        (JaxRing(), replace(CAUSAL, kind="window"), 66),  # shards of unequal sizes
    ],
    ids=["published", "bfloat16", "window"],
)
def test_they_are_right(peer, row, tokens):
    wrong, errors = judged(peer, row.work(tokens))
    assert not wrong, errors


def test_the_published_ring_that_loses_a_hop_is_wrong(monkeypatch):
    import jax

    from ringspun.testing.peers import jax_published

    jax.clear_caches()  # or a trace of the right one is taken, where an earlier test made it
    monkeypatch.setattr(jax_published, "_behind", lambda i, j, number, rows, chunk: (number == 0) & (j <= i))
    wrong, errors = judged(Published(), CAUSAL.work(64))
    jax.clear_caches()
    assert "out" in wrong and min(errors.values()) > 1e-3


def test_what_they_cannot_they_refuse():
    work = CAUSAL.work(64)
    assert Published().refuses(work) is None and Ejkernel().refuses(work) is None
    window = replace(CAUSAL, kind="window").work(64)
    assert "causal mask" in Published().refuses(window) and "causal mask" in Ejkernel().refuses(window)
    grouped = replace(work, kv_heads=1)
    assert "grouped heads" in Published().refuses(grouped) and "grouped heads" in Ejkernel().refuses(grouped)
    assert "2 must divide the length" in Published().refuses(CAUSAL.work(63))
    assert f"at most {MOST_DEVICES} devices" in JaxRing().refuses(replace(work, ranks=9))


@pytest.mark.processes
def test_they_are_timed_in_one_process_with_the_others(pools):
    ours, in_jax = compare(CAUSAL, [Ring(), JaxRing()], pools, rounds=2, judged_tokens=64, tokens=64)
    assert ours.status == in_jax.status == "right" and in_jax.is_ours
    assert len(in_jax.both_s) == 2 and all(f < b for f, b in zip(in_jax.forward_s, in_jax.both_s, strict=True))
    assert in_jax.peak_bytes is None and in_jax.sent_bytes is None and "2 devices of one process" in in_jax.remark
    assert "| ? |" in table([ours, in_jax])[-1] and np.isfinite(in_jax.errors["dk"])
