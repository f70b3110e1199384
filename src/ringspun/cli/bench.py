"""`ringspun bench`: measurements in pairs, as JSON or in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspun.cli import (
    bench_checkpointing,
    bench_context,
    bench_machine,
    bench_memory,
    bench_peers,
    bench_strategies,
)
from ringspun.cli.measured import BYTES, MOST_RANKS, attention_work, described, measured_rows, route_in_blocks
from ringspun.cli.options import FRAMEWORKS, bounded, integers, one_of, refuse_with_jax
from ringspun.core.host import cores
from ringspun.core.links import Links
from ringspun.errors import RingspunError

if TYPE_CHECKING:
    from ringspun.testing.work import Work

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
PAYS = 1.05
"""A ring over one process with all cores that is taken to cost nothing: what the measurement can tell."""


@app.callback()
def _bench() -> None:
    """Measure on this machine. Run it alone: it uses every core."""


app.command()(bench_machine.links)
app.command()(bench_machine.kernels)
app.command()(bench_memory.memory)
app.command()(bench_strategies.strategies)
app.command()(bench_checkpointing.checkpointing)
app.command()(bench_peers.peers)
app.command()(bench_context.context)


@app.command()
def ring(
    ranks: Annotated[str, typer.Option(help="Ring sizes, comma list.")] = "2,4",
    seq_len: Annotated[str, typer.Option(help="Global lengths (tokens), comma list.")] = "16384",
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; default: as many as query heads.")] = None,
    head_size: Annotated[int, typer.Option(help="Head size.")] = 64,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "float32",
    mask: Annotated[str, typer.Option(help="Mask.")] = "causal",
    layout: Annotated[str, typer.Option(help="Layout.")] = "zigzag",
    route: Annotated[str | None, typer.Option(help="Route; default 'ring'.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Most tokens of a travelling block; default: whole shards.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, comma list.")] = "1",
    ulysses: Annotated[
        str | None, typer.Option(help="Of the ranks, how many split heads, comma list; default 1.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Timed pairs, at least 9.")] = 11,
    sweep: Annotated[
        bool, typer.Option(help="Of ascending lengths, stop at the first from which a ring pays.")
    ] = False,
    links: Annotated[str | None, typer.Option(help="A file of `bench links`: how much of them was used.")] = None,
    framework: Annotated[
        str, typer.Option(help="'torch', or 'jax': a ring of this process's devices beside one of them.")
    ] = "torch",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """A ring of local processes beside one process with all cores: the same forward + backward, in turn in one run.

    With --framework jax, a ring of devices of this process beside one of them; of a CPU they share all cores.

    With --sweep, a ring pays where it takes at most 1.05 times as long (the whole interval says so), for each rank
    holds 1/R of the sequence only.
    """
    found = None if links is None or framework == "jax" else _links(links)

    def wanted() -> list[list[Work]]:
        bounded("pairs", pairs, least=9)
        if one_of("framework", framework, FRAMEWORKS) == "jax":
            refuse_with_jax({"route": route, "block-size": block_size, "ulysses": ulysses, "links": links})
        shape = (heads, heads if kv_heads is None else kv_heads, head_size, dtype)
        used = route_in_blocks(route or "ring", block_size)
        lengths, sizes = integers("seq-len", seq_len, least=1), integers("ranks", ranks, least=1, most=MOST_RANKS)
        batches, degrees = integers("batch", batch, least=1), integers("ulysses", ulysses or "1", least=1)
        asked = [(r, u, b) for b in batches for r in sizes for u in degrees]

        def works(r: int, u: int, b: int) -> list[Work]:
            return [attention_work(r, s, shape, mask, layout, used, b, u) for s in sorted(lengths)]

        if framework == "jax":
            _make_devices(max(sizes))
        if sweep:
            return [works(*one) for one in asked]
        return [[work] for one in asked for work in works(*one)]

    def measured(works: list[Work]) -> list[dict[str, Any]]:
        rows = []
        for work in works:
            on_ranks = framework == "torch"
            rows.append(_on_ranks(work, pairs) if on_ranks else _on_devices(work, pairs))
            rows[-1] |= _utilisation(work, found) if on_ranks else {}
            rows[-1]["utilisation"] = rows[-1].pop("least_s", 0.0) / rows[-1]["ring_s"] if found else None
            if sweep and rows[-1]["ratio_high"] <= PAYS:
                break
        return rows

    rows = [row for some in measured_rows(wanted, measured) for row in some]
    if as_json:
        typer.echo(json.dumps(rows[0] if len(rows) == 1 else {"rows": rows}, indent=1))
        return
    for row in rows:
        used = "" if row["utilisation"] is None else f"; {row['utilisation']:.1%} of its link's peak"
        typer.echo(
            f"R={row['ranks'] // row['ulysses']}{' U=' + str(row['ulysses']) if row['ulysses'] > 1 else ''} "
            f"B={row['batch']} S={row['seq_len']} {row['mask']} {row['dtype']} {row['route']}: "
            f"ring {row['ring_s']:.3f} s, one process "
            f"{row['alone_s']:.3f} s, ratio {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]{used}"
        )
        if sweep and row["ratio_high"] <= PAYS:
            typer.echo(f"R={row['ranks']} B={row['batch']}: pays from {row['seq_len']} tokens")


def _links(path: str) -> Links:
    try:
        return Links.load(Path(path))
    except RingspunError as problem:
        typer.echo(f"ringspun bench: {problem}", err=True)
        raise typer.Exit(2) from None


def _utilisation(work: Work, links: Links | None) -> dict[str, Any]:
    """Bytes that the busiest rank sends, in how many hops of its ring, and how long its link would take at its peak."""
    from ringspun.core.accounting import account, exchanged
    from ringspun.core.degrees import Degrees, HeadSplit
    from ringspun.core.geometry import Geometry
    from ringspun.core.ways import taken
    from ringspun.core.wire import Format

    element = BYTES[work.dtype]
    wire = Format(
        work.batch, work.heads, work.kv_heads, work.head_size, work.head_size, work.dtype, element, max(4, element)
    )
    degrees = Degrees(work.ranks // work.ulysses, work.ulysses)
    geometry = Geometry(degrees.ring, tuple(range(degrees.ring)), work.layout, work.route, degrees)
    split, sides = HeadSplit(work.heads, work.kv_heads, work.ulysses), geometry.sides(work.seq_len)
    schedules = geometry.schedule(work.mask, work.seq_len)
    totals, hops = [], 0
    for rank in range(work.ranks):
        place, mine = degrees.place(rank)
        first, last = split.queries(mine)
        of_ring = replace(wire, heads=last - first, kv_heads=len(split.held(mine)))
        forward = account(schedules[place].forward, of_ring, backward=False)
        backward = account(taken(schedules, of_ring, work.backward)[place].backward, of_ring, backward=True)
        moved = sum(exchanged(split, degrees, sides, rank, wire))
        totals.append(forward.total_sent_bytes + backward.total_sent_bytes + moved)
        hops = max(hops, forward.hops)
    sent = max(totals)
    return {"sent_bytes": sent, "hops": hops, "least_s": sent / links.near.peak if links else 0.0}


def _make_devices(count: int) -> None:
    from ringspun.testing.jax import make_devices

    make_devices(count)


def _on_devices(work: Work, pairs: int) -> dict[str, Any]:
    from ringspun.testing.jax_timing import sent, time_in_turn, version

    ring_s, alone_s, alone_is = time_in_turn(work, pairs)
    # all devices of a process share its threads
    told = {"alone": alone_is, "threads_per_rank": None, "cores": cores(), "jax": version()}
    return {**_compared(work, ring_s, alone_s), **told, **sent(work)}


def _on_ranks(work: Work, pairs: int) -> dict[str, Any]:
    """Warm both once, then time them in turn."""
    import torch

    from ringspun.testing.pool import RankPool
    from ringspun.testing.timing import threads_per_rank, time_alone, time_on_rank

    limit_s = 600.0
    with RankPool(work.ranks) as pool:
        pool.run(time_on_rank, work, 1, timeout_s=limit_s)
        _, alone_is = time_alone(work, 1)
        ring_s, alone_s = [], []
        for _ in range(pairs):
            ring_s.append(max(times[0] for times in pool.run(time_on_rank, work, 1, timeout_s=limit_s)))
            alone_s.append(time_alone(work, 1)[0][0])
    told = {"alone": alone_is, "threads_per_rank": threads_per_rank(work.ranks), "cores": cores()}
    return {**_compared(work, ring_s, alone_s), **told, "torch": str(torch.__version__)}


def _compared(work: Work, ring_s: list[float], alone_s: list[float]) -> dict[str, Any]:
    """The work, and the ratio of its pairs."""
    from ringspun.testing.work import paired_ratio

    ratio = paired_ratio(ring_s, alone_s)
    return {
        **described(work),
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "interval": ratio.level,
        "pairs": len(ring_s),
        "ring_s": median(ring_s),
        "alone_s": median(alone_s),
    }
