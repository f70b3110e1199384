"""`ringspun bench`: measurements in pairs, as JSON or in words."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspun.cli import bench_checkpointing, bench_context, bench_machine, bench_peers, bench_strategies
from ringspun.cli.measured import BYTES, MOST_RANKS, measured_rows
from ringspun.cli.options import bounded, integers, one_of, split_list
from ringspun.core.host import cores
from ringspun.core.links import Links
from ringspun.core.mask import Mask
from ringspun.core.route import Ring, Route
from ringspun.core.text import parse_layout, parse_mask, parse_route
from ringspun.errors import RingspunError

if TYPE_CHECKING:
    from ringspun.testing.timing import Work

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
PAYS = 1.05
"""A ring over one process with all cores that is taken to cost nothing: what the measurement can tell."""


@app.callback()
def _bench() -> None:
    """Measure on this machine. Run it alone: it uses every core."""


app.command()(bench_machine.links)
app.command()(bench_machine.kernels)
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
    route: Annotated[str, typer.Option(help="Route.")] = "ring",
    block_size: Annotated[
        int | None, typer.Option(help="Most tokens of a travelling block; default: whole shards.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, comma list.")] = "1",
    ulysses: Annotated[str, typer.Option(help="Of the ranks, how many split heads; comma list.")] = "1",
    pairs: Annotated[int, typer.Option(help="Timed pairs, at least 9.")] = 11,
    sweep: Annotated[
        bool, typer.Option(help="Of ascending lengths, stop at the first from which a ring pays.")
    ] = False,
    links: Annotated[str | None, typer.Option(help="A file of `bench links`: how much of them was used.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """A ring of local processes beside one process with all cores: the same forward + backward, in turn in one run.

    With --sweep, a ring pays where it takes at most 1.05 times as long (the whole interval says so), for each rank
    holds 1/R of the sequence only.
    """
    found = None if links is None else _links(links)

    def wanted() -> list[list[Work]]:
        bounded("pairs", pairs, least=9)
        shape = (heads, heads if kv_heads is None else kv_heads, head_size, dtype)
        used = _route(route, block_size)
        lengths, sizes = integers("seq-len", seq_len, least=1), integers("ranks", ranks, least=1, most=MOST_RANKS)
        batches, degrees = integers("batch", batch, least=1), integers("ulysses", ulysses, least=1)
        asked = [(r, u, b) for b in batches for r in sizes for u in degrees]

        def works(r: int, u: int, b: int) -> list[Work]:
            return [_work(r, s, shape, mask, layout, used, b, u) for s in sorted(lengths)]

        if sweep:
            return [works(*one) for one in asked]
        return [[work] for one in asked for work in works(*one)]

    def measured(works: list[Work]) -> list[dict[str, Any]]:
        rows = []
        for work in works:
            rows.append({**_measure(work, pairs), **_utilisation(work, found)})
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


@app.command()
def memory(
    ranks: Annotated[str, typer.Option(help="Ring sizes, comma list.")] = "2,8",
    tokens_per_rank: Annotated[
        int | None, typer.Option(help="Local length T of every rank (tokens).", show_default="4096")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Instead: global length S, shared by the ranks (tokens).")] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[str, typer.Option(help="Key/value heads, comma list.")] = "4,1",
    head_size: Annotated[int, typer.Option(help="Head size.")] = 64,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16, float16; comma list.")] = "float32,bfloat16",
    mask: Annotated[str, typer.Option(help="Mask.")] = "causal",
    layout: Annotated[str, typer.Option(help="Layout.")] = "zigzag",
    route: Annotated[str, typer.Option(help="Route.")] = "ring",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Peak bytes per rank of a ring's forward + backward, at a fixed local or global length, by the profiler's memory
    events."""

    def wanted() -> list[Work]:
        if seq_len is not None and tokens_per_rank is not None:
            raise ValueError("seq-len and tokens-per-rank must not both be given. Leave one out.")
        local = bounded("tokens-per-rank", 4096 if tokens_per_rank is None else tokens_per_rank, least=1)
        sizes = integers("ranks", ranks, least=1, most=MOST_RANKS)
        shapes = [(heads, k, head_size, d) for d in split_list(dtype) for k in integers("kv-heads", kv_heads, least=1)]
        length = None if seq_len is None else bounded("seq-len", seq_len, least=1)
        used = parse_route(route)
        return [_work(r, length or r * local, shape, mask, layout, used) for shape in shapes for r in sizes]

    rows = measured_rows(wanted, _peaks)
    for row in rows:
        first = next(r for r in rows if (r["dtype"], r["kv_heads"]) == (row["dtype"], row["kv_heads"]))
        row["over_first"] = row["peak_bytes"] / first["peak_bytes"]
    if as_json:
        typer.echo(json.dumps({"rows": rows}, indent=1))
        return
    for row in rows:
        typer.echo(
            f"R={row['ranks']} K={row['kv_heads']} {row['dtype']}: {row['peak_bytes']:,} bytes per rank, "
            f"{row['over_first']:.3f} of the first ring size; {row['units']:.1f} x H*T*D elements"
        )


def _work(
    ranks: int, seq_len: int, shape: tuple[int, int, int, str], mask: str, layout: str, route: Route, batch: int = 1,
    ulysses: int = 1,
) -> Work:  # fmt: skip
    """The work, if a ring can do it on this machine."""
    from ringspun.testing.timing import Work

    heads, kv_heads, head_size, dtype = shape
    element = BYTES[one_of("dtype", dtype, tuple(BYTES))]
    bounded("heads", heads, least=1)
    bounded("head-size", head_size, least=1)
    if heads % bounded("kv-heads", kv_heads, least=1):
        raise ValueError(f"kv-heads must divide heads; got {kv_heads} and heads = {heads}.")
    needed = 4 * batch * seq_len * (heads + kv_heads) * head_size * element  # q, k, v, out and their gradients
    if needed > _memory():
        raise ValueError(
            f"q, k, v, out and their gradients must fit this machine's {_memory():,} bytes; they take {needed:,} "
            f"(batch {batch}, seq-len {seq_len}, heads {heads} and {kv_heads}, head-size {head_size}, {dtype}). "
            "Ask for less."
        )
    if ranks % ulysses or ulysses > heads:
        raise ValueError(f"ulysses must divide ranks and be at most heads; got {ulysses}, {ranks} and {heads}.")
    dealt = _fitting(mask, seq_len), parse_layout(layout), batch
    return Work(ranks, seq_len, *shape, *dealt, route=route, ulysses=ulysses)


def _route(text: str, block_size: int | None) -> Route:
    route = parse_route(text)
    if block_size is None:
        return route
    if route != Ring():
        raise ValueError(f"block-size must come with --route ring; got {route}. Leave one out.")
    return Ring(bounded("block-size", block_size, least=1))


def _fitting(text: str, seq_len: int) -> Mask:
    mask = parse_mask(text)
    mask.regions(seq_len, seq_len)  # a mask that does not fit its length is refused before any rank starts
    return mask


def _memory() -> int:
    """Bytes of this machine's memory; 1 TiB where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 40


def _peaks(work: Work) -> dict[str, Any]:
    from ringspun.testing.pool import RankPool
    from ringspun.testing.timing import peak_on_rank

    with RankPool(work.ranks) as pool:
        peaks = pool.run(peak_on_rank, work, timeout_s=600.0)
    element = work.heads * -(-work.seq_len // work.ranks) * work.head_size * BYTES[work.dtype]
    return {**_described(work), "peak_bytes": max(peaks), "peaks": peaks, "units": max(peaks) / element}


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


def _described(work: Work) -> dict[str, Any]:
    sizes = {k: v for k, v in asdict(work).items() if isinstance(v, int | str)}
    return {**sizes, "mask": str(work.mask), "layout": str(work.layout), "route": str(work.route)}


def _measure(work: Work, pairs: int) -> dict[str, Any]:
    """Warm both once, then time them in turn."""
    import torch

    from ringspun.testing.pool import RankPool
    from ringspun.testing.timing import paired_ratio, threads_per_rank, time_alone, time_on_rank

    limit_s = 600.0
    with RankPool(work.ranks) as pool:
        pool.run(time_on_rank, work, 1, timeout_s=limit_s)
        _, alone_is = time_alone(work, 1)
        ring_s, alone_s = [], []
        for _ in range(pairs):
            ring_s.append(max(times[0] for times in pool.run(time_on_rank, work, 1, timeout_s=limit_s)))
            alone_s.append(time_alone(work, 1)[0][0])
    ratio = paired_ratio(ring_s, alone_s)
    return {
        **_described(work),
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "interval": ratio.level,
        "pairs": pairs,
        "ring_s": median(ring_s),
        "alone_s": median(alone_s),
        "alone": alone_is,
        "threads_per_rank": threads_per_rank(work.ranks),
        "cores": cores(),
        "torch": str(torch.__version__),
    }
