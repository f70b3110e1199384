"""`ringspun bench`: measurements in pairs, as JSON or in words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspun.cli.options import bounded, integers, one_of, split_list
from ringspun.core.host import cores
from ringspun.core.mask import Mask
from ringspun.core.text import parse_layout, parse_mask
from ringspun.errors import RingspunError

if TYPE_CHECKING:
    from ringspun.testing.timing import Work

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Element size of every dtype that a ring takes on a CPU."""
MOST_RANKS = 64


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
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "float32",
    mask: Annotated[str, typer.Option(help="Mask.")] = "causal",
    layout: Annotated[str, typer.Option(help="Layout.")] = "zigzag",
    pairs: Annotated[int, typer.Option(help="Timed pairs, at least 9.")] = 11,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """A ring of local processes beside one process with all cores: the same forward + backward, in turn in one run."""

    def wanted() -> list[Work]:
        bounded("pairs", pairs, least=9)
        shape = (heads, heads if kv_heads is None else kv_heads, head_size, dtype)
        lengths, sizes = integers("seq-len", seq_len, least=1), integers("ranks", ranks, least=1, most=MOST_RANKS)
        return [_work(r, s, shape, mask, layout) for s in lengths for r in sizes]

    rows = _rows(wanted, lambda work: _measure(work, pairs))
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
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16, float16; comma list.")] = "float32,bfloat16",
    mask: Annotated[str, typer.Option(help="Mask.")] = "causal",
    layout: Annotated[str, typer.Option(help="Layout.")] = "zigzag",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Peak bytes per rank of a ring's forward + backward at a fixed local length, by the profiler's memory events."""

    def wanted() -> list[Work]:
        bounded("tokens-per-rank", tokens_per_rank, least=1)
        sizes = integers("ranks", ranks, least=1, most=MOST_RANKS)
        shapes = [(heads, k, head_size, d) for d in split_list(dtype) for k in integers("kv-heads", kv_heads, least=1)]
        return [_work(r, r * tokens_per_rank, shape, mask, layout) for shape in shapes for r in sizes]

    rows = _rows(wanted, _peaks)
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


def _rows(wanted: Callable[[], list[Work]], measure: Callable[[Work], dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured of all that is wanted; what cannot be is told in one line."""
    try:
        works = wanted()
    except (ValueError, TypeError) as problem:
        typer.echo(f"ringspun bench: {problem}", err=True)
        raise typer.Exit(2) from None
    try:
        return [measure(work) for work in works]
    except RingspunError as problem:
        typer.echo(f"ringspun bench: {_brief(problem)}", err=True)
        raise typer.Exit(1) from None


def _brief(problem: RingspunError) -> str:
    """An error in one line: of an error on the ranks, what the first of them says, not its call stack."""
    for rank, failure in getattr(problem, "failures", {}).items():
        return f"ring rank {rank} raised {failure.kind}: {failure.message}"
    return str(problem)


def _work(ranks: int, seq_len: int, shape: tuple[int, int, int, str], mask: str, layout: str) -> Work:
    """The work, if a ring can do it on this machine."""
    from ringspun.testing.timing import Work

    heads, kv_heads, head_size, dtype = shape
    element = BYTES[one_of("dtype", dtype, tuple(BYTES))]
    bounded("heads", heads, least=1)
    bounded("head-size", head_size, least=1)
    if heads % bounded("kv-heads", kv_heads, least=1):
        raise ValueError(f"kv-heads must divide heads; got {kv_heads} and heads = {heads}.")
    needed = 4 * seq_len * (heads + kv_heads) * head_size * element  # q, k, v, out and their gradients
    if needed > _memory():
        raise ValueError(
            f"q, k, v, out and their gradients must fit this machine's {_memory():,} bytes; they take {needed:,} "
            f"(seq-len {seq_len}, heads {heads} and {kv_heads}, head-size {head_size}, {dtype}). Ask for less."
        )
    return Work(ranks, seq_len, *shape, _fitting(mask, seq_len), parse_layout(layout))


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
    element = work.heads * (work.seq_len // work.ranks) * work.head_size * BYTES[work.dtype]
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
