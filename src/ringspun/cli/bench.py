"""`ringspun bench`: measurements in pairs, as JSON or in words."""

from __future__ import annotations

import json
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspun.cli.options import integers, split_list
from ringspun.core.host import cores
from ringspun.core.text import parse_layout, parse_mask

if TYPE_CHECKING:
    from ringspun.testing.timing import Work

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
DTYPES = ("float64", "float32", "bfloat16")


@app.callback()
def _bench() -> None:
    """Measure on this machine. Run it alone: it uses every core."""


@app.command()
def ring(
    ranks: Annotated[str, typer.Option(help="Ring sizes, comma list.")] = "2,4",
    seq_len: Annotated[str, typer.Option(help="Global lengths (tokens), comma list.")] = "16384",
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; default: as many as query heads.")] = None,
    head_size: Annotated[int, typer.Option(help="Head size.")] = 64,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float32",
    mask: Annotated[str, typer.Option(help="Mask.")] = "causal",
    layout: Annotated[str, typer.Option(help="Layout.")] = "zigzag",
    pairs: Annotated[int, typer.Option(help="Timed pairs, at least 9.")] = 11,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """A ring of local processes beside one process with all cores: the same forward + backward, in turn in one run."""
    from ringspun.testing.timing import Work

    try:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}.")
        if pairs < 9:
            raise ValueError(f"pairs must be at least 9 for an interval; got {pairs}.")
        shape = (heads, kv_heads or heads, head_size, dtype, parse_mask(mask), parse_layout(layout))
        lengths, sizes = integers("seq-len", seq_len, least=1), integers("ranks", ranks, least=1)
        wanted = [Work(r, s, *shape) for s in lengths for r in sizes]
    except ValueError as problem:
        typer.echo(f"ringspun bench: {problem}", err=True)
        raise typer.Exit(2) from None
    rows = [_measure(work, pairs) for work in wanted]
    if as_json:
        typer.echo(json.dumps(rows[0] if len(rows) == 1 else {"rows": rows}, indent=1))
        return
    for row in rows:
        typer.echo(
            f"R={row['ranks']} S={row['seq_len']} {row['mask']} {row['dtype']}: "
            f"ring {row['ring_s']:.3f} s, one process "
            f"{row['alone_s']:.3f} s, ratio {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        )


@app.command()
def memory(
    ranks: Annotated[str, typer.Option(help="Ring sizes, comma list.")] = "2,8",
    tokens_per_rank: Annotated[int, typer.Option(help="Local length T of every rank (tokens).")] = 4096,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[str, typer.Option(help="Key/value heads, comma list.")] = "4,1",
    head_size: Annotated[int, typer.Option(help="Head size.")] = 64,
    dtype: Annotated[str, typer.Option(help="Comma list.")] = "float32,bfloat16",
    mask: Annotated[str, typer.Option(help="Mask.")] = "causal",
    layout: Annotated[str, typer.Option(help="Layout.")] = "zigzag",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Peak bytes per rank of a ring's forward + backward at a fixed local length, by the profiler's memory events."""
    from ringspun.testing.timing import Work

    try:
        m, lay = parse_mask(mask), parse_layout(layout)
        wanted = [
            Work(r, r * tokens_per_rank, heads, k, head_size, d, m, lay)
            for d in split_list(dtype)
            for k in integers("kv-heads", kv_heads, least=1)
            for r in integers("ranks", ranks, least=1)
        ]
    except ValueError as problem:
        typer.echo(f"ringspun bench: {problem}", err=True)
        raise typer.Exit(2) from None
    rows = [_peaks(work) for work in wanted]
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


def _peaks(work: Work) -> dict[str, Any]:
    from ringspun.testing.pool import RankPool
    from ringspun.testing.timing import peak_on_rank

    with RankPool(work.ranks) as pool:
        peaks = pool.run(peak_on_rank, work, timeout_s=600.0)
    element = work.heads * (work.seq_len // work.ranks) * work.head_size * (2 if work.dtype == "bfloat16" else 4)
    return {**_described(work), "peak_bytes": max(peaks), "peaks": peaks, "units": max(peaks) / element}


def _described(work: Work) -> dict[str, Any]:
    sizes = {k: v for k, v in asdict(work).items() if isinstance(v, int | str)}
    return {**sizes, "mask": str(work.mask), "layout": str(work.layout)}


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
