"""Faults found by trying to break routes, step logs, models' plans and the commands; each with its right value."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
from torch import distributed as dist
from typer.testing import CliRunner
from virtual_ring import CountedKernel, VirtualRing

from ringspun import Causal, Contiguous, Full, Window
from ringspun.core.geometry import Geometry
from ringspun.core.text import parse_route
from ringspun.errors import DataError, PlanError, PlanMismatchError, TransferError
from ringspun.steplog import Row, What, dump
from ringspun.steplog.page import page
from ringspun.steplog.timeline import read
from ringspun.steplog.verdict import Kind, judge
from ringspun.testing.faults import Drop, Faulty
from ringspun.testing.pool import RankPool
from ringspun.torch import ContextParallel, Loopback

S_NS = 10**9

# -- routes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["direct", "bidirectional"])
@pytest.mark.parametrize("size", [128, 129, 256])
@pytest.mark.parametrize("mask", [Causal(), Window(2)], ids=str)
def test_rings_of_more_than_128_ranks_can_be_planned(route, size, mask):
    """Owner times reader overflows where both are packed with a position: 'route must bring every needed block'."""
    ranks = (0, 1, size // 2, size - 1)
    schedules = Geometry(size, ranks, Contiguous(), parse_route(route)).schedule(mask, 2 * size)
    own = [int(s.forward.pairs.sum()) for s in schedules]
    assert own == [int(mask.as_array(2 * size)[2 * r : 2 * r + 2].sum()) for r in ranks]


def plan_words(world_rank: int, routes: tuple[str, ...]) -> str:
    """What a rank hears when routes differ; between processes."""
    group = dist.new_group(list(range(len(routes))))
    assert group is not None
    try:
        ContextParallel(group, route=routes[world_rank], timeout_s=5.0).plan(12, Causal())
    except PlanMismatchError as problem:
        return str(problem)
    return "planned"


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_ranks_with_different_routes_hear_which(pools: Callable[[int], RankPool]):
    """They heard 'the digests differ'."""
    for words in pools(3).run(plan_words, ("ring", "direct", "ring")):
        assert "route is direct on ring rank 1 and ring on ring rank 0 (odd ranks: [1])" in words


# -- step logs -------------------------------------------------------------------------------------------------------


def test_a_rank_waits_for_what_is_due_and_for_nothing_else(tmp_path):
    """In a double ring a step posts messages that are waited for at once and others for a lap later. Rank 0 waits for
    rank 2's over a slow link; rank 3, whose first message it needs a lap later, comes late and was blamed."""
    ring = VirtualRing(6, lambda rank: 0.0, lambda a, b: 6_000.0 if (a, b) == (2, 0) else 1e-3)
    ring.now[3] += 10 * 10**6  # 10 ms
    plan = ContextParallel(ring, layout=Contiguous(), route="double_ring(3)").plan(48, Full())
    x = torch.ones(1, 1, 48, 2)
    plan.attention(x, x, x, kernel=CountedKernel(ring))
    rings = {r.name: r for r in read([dump(tmp_path)])}
    verdict = judge(rings[ring.state.logs[0].ring])
    share = verdict.shares[0]  # of 10 ms: then rank 3 is there
    assert share.transfer > 9e6 and share.peer < 1e6
    assert verdict.cause is not None and (verdict.cause.kind, verdict.cause.ranks) == (Kind.LINK, (2, 0))


def rows_of(rank: int, start: int, calls: int) -> list[Row]:
    """One rank of two, which waits in its last call for ever."""
    rows = []
    for call in range(calls):
        t, peer = start + call * S_NS, 1 - rank
        rows += [
            Row(call, 0, What.CALL, -1, -1, -1, -1, -1, 0, t, ""),
            Row(call, 0, What.SEND, 0, 0, 0, rank, peer, 128, t + 1, ""),
            Row(call, 0, What.RECEIVE, 0, 0, 0, peer, peer, 128, t + 2, ""),
            Row(call, 0, What.COMPUTE, 0, -1, -1, rank, -1, 0, t + 3, ""),
            Row(call, 0, What.WAIT, 0, 0, -1, -1, -1, 0, t + 1000, ""),
        ]
        if call < calls - 1:
            rows += [
                Row(call, 0, What.LANDED, 0, 0, -1, -1, -1, 0, t + 2000, ""),
                Row(call, 0, What.END, -1, -1, -1, -1, -1, 0, t + 3000, ""),
            ]
    return rows


def told(rank: int, start: int, calls: int) -> dict:
    """A dump of that rank."""
    clocks = {"full": False, "monotonic": start + 10 * S_NS, "wall": start + 10 * S_NS}
    log = {"ring": "0", "ranks": [0, 1], "ring_rank": rank, "rows": rows_of(rank, start, calls), **clocks}
    head = {"format": 1, "reason": "", "failure": "", "host": "h", "boot": "b", "pid": 1, "columns": Row._fields}
    return {**head, "logs": [log]}


def test_dumps_of_yesterdays_job_do_not_stand_for_a_rank_that_is_dead_today(tmp_path):
    """Every job's default group is ring 0: of a folder that two jobs used, the dead rank's file was the old job's, and
    the living rank was blamed for being 'between calls'."""
    for name, (rank, start, calls) in {"a": (0, 100, 3), "b": (1, 100, 3), "c": (0, 10**5, 5)}.items():
        (tmp_path / f"ringspun-{name}.json").write_text(json.dumps(told(rank, start * S_NS, calls)))
    try:
        verdicts = [judge(ring) for ring in read(sorted(tmp_path.glob("*.json")))]
    except DataError:
        return  # to refuse the mixture would be as good
    assert any(v.root is not None and (v.root.kind, v.root.ranks) == (Kind.ABSENT, (1,)) for v in verdicts)


def damaged(**changes: object) -> str:
    return json.dumps({**told(0, 0, 2), **changes})


def with_row(index: int, column: int, value: object) -> str:
    one = told(0, 0, 2)
    row = list(one["logs"][0]["rows"][index])
    row[column] = value
    one["logs"][0]["rows"][index] = row
    return json.dumps(one)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({k: v for k, v in told(0, 0, 2).items() if k != "boot"}),
        damaged(boot=[[]]),
        damaged(columns=1),
        "[" * 200_000,
        with_row(2, 5, 99),
        with_row(-1, 2, 9).replace('""]]', "7]]"),
    ],
    ids=["no boot", "boot is a list", "columns is a number", "nested", "payload 99", "words are a number"],
)  # fmt: skip
def test_a_damaged_dump_is_refused_by_name(tmp_path, text):
    """They were tracebacks: KeyError, TypeError, RecursionError, ValueError, AttributeError."""
    (tmp_path / "ringspun-x.json").write_text(text)
    with pytest.raises(DataError, match=r"dump must .*ringspun-x\.json"):
        for ring in read([tmp_path / "ringspun-x.json"]):
            page(judge(ring))


def test_a_log_dir_that_cannot_be_a_path_does_not_hide_the_error():
    """Only OSError was caught where the log is written; a NUL is a ValueError, and the TransferError was lost."""
    x = torch.ones(1, 1, 12, 4)
    with pytest.raises((PlanError, TransferError)):
        ring = Faulty(Loopback(3), Drop())
        ContextParallel(ring, log_dir="a\0b").plan(12, Full()).attention(x, x, x)


# -- models ----------------------------------------------------------------------------------------------------------


def test_a_plan_put_in_the_place_of_another_is_used_or_refused():
    """`plans` returns a dict; what was put into it afterwards was ignored, and the old plan's loss came back."""
    transformers = pytest.importorskip("transformers")
    from ringspun.integrations.transformers import plans, prepare

    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 6}
    torch.manual_seed(0)
    model = prepare(transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **heads)))
    part = ContextParallel(Loopback(2)).partition(20)
    both, other = plans(model, part, Causal()), part.plan(Causal() & Window(3))
    ids = torch.arange(20)[None]
    batch = part.shard_batch({"input_ids": ids, "labels": ids})
    before = copy.copy(dict(both))
    try:
        both["sliding_attention"] = other  # of another window than the layers': to be refused, as a plain dict is
        model(**batch, ringspun_plan=both)
    except (TypeError, ValueError) as refusal:
        assert "window" in str(refusal) or isinstance(refusal, TypeError)
    else:
        pytest.fail(f"the plan put in was ignored; kept: {before}")


# -- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_bench_memory_of_fewer_tokens_than_ranks_is_no_division_by_zero():
    from ringspun.cli.bench import app

    found = CliRunner().invoke(
        app, ["memory", "--seq-len", "1", "--ranks", "2", "--kv-heads", "1", "--heads", "1", "--head-size", "4"]
    )
    assert not isinstance(found.exception, ZeroDivisionError)


def test_bench_memory_refuses_two_lengths():
    """`--tokens-per-rank` beside `--seq-len` was accepted and ignored."""
    from ringspun.cli.bench import app

    given = ["memory", "--seq-len", "64", "--tokens-per-rank", "32", "--ranks", "1", "--kv-heads", "1", "--heads", "1"]
    assert CliRunner().invoke(app, [*given, "--dtype", "float32", "--head-size", "4"]).exit_code == 2
