"""`ringspun bench memory`: what a rank of a ring holds at its peak, and how long a sequence a budget takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspun.cli.measured import (
    BYTES,
    MOST_RANKS,
    attention_work,
    described,
    machine_bytes,
    measured_rows,
    route_in_blocks,
)
from ringspun.cli.options import bounded, integers, split_list

if TYPE_CHECKING:
    from ringspun.testing.timing import Work

MB = 1_000_000


def memory(
    ranks: Annotated[str, typer.Option(help="Ring sizes, comma list.")] = "2,8",
    tokens_per_rank: Annotated[
        int | None, typer.Option(help="Local length T of every rank (tokens).", show_default="4096")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Instead: global length S, shared by the ranks (tokens).")] = None,
    budget_mb: Annotated[
        int | None, typer.Option(help="Instead: find the longest S of which each rank holds at most this (10^6 bytes).")
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[str, typer.Option(help="Key/value heads, comma list.")] = "4,1",
    head_size: Annotated[int, typer.Option(help="Head size.")] = 64,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16, float16; comma list.")] = "float32,bfloat16",
    mask: Annotated[str, typer.Option(help="Mask.")] = "causal",
    layout: Annotated[str, typer.Option(help="Layout.")] = "zigzag",
    route: Annotated[str, typer.Option(help="Route.")] = "ring",
    block_size: Annotated[
        int | None, typer.Option(help="Most tokens of a travelling block; default: whole shards.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Peak bytes per rank of a ring's forward + backward, by the profiler's memory events, at a fixed local or global
    length; or the longest sequence within a budget.

    Of a length: above q, k, v and the gradient of the output. Of a budget: with them, and nothing but attention.
    """

    def wanted() -> list[Work]:
        given = {"seq-len": seq_len, "tokens-per-rank": tokens_per_rank, "budget-mb": budget_mb}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise ValueError(f"{names[0]} and {names[1]} must not both be given. Leave one out.")
        for name in names:
            bounded(name, given[name] or 0, least=1)
        sizes = integers("ranks", ranks, least=1, most=MOST_RANKS)
        shapes = [(heads, k, head_size, d) for d in split_list(dtype) for k in integers("kv-heads", kv_heads, least=1)]
        used = route_in_blocks(route, block_size)

        def works(local: int) -> list[Work]:
            asked = [(r, shape) for shape in shapes for r in sizes]
            return [attention_work(r, seq_len or r * local, shape, mask, layout, used) for r, shape in asked]

        if not budget:
            return works(tokens_per_rank or 4096)
        _holds(budget_mb or 0, max(sizes))
        works(2)  # a mask made for one length does not fit both
        return works(1)

    budget = MB * (budget_mb or 0)
    rows = measured_rows(wanted, (lambda work: _longest(work, budget)) if budget else _peak)
    _compare(rows, "seq_len" if budget else "peak_bytes")
    if as_json:
        typer.echo(json.dumps({"rows": rows}, indent=1))
        return
    for row in rows:
        typer.echo(_told(row))


def _holds(budget_mb: int, ranks: int) -> None:
    """The search asks for up to twice the budget of every rank; in one machine."""
    if 2 * ranks * budget_mb * MB > machine_bytes():
        most = machine_bytes() // (2 * ranks * MB)
        raise ValueError(f"budget-mb must be at most {most} for {ranks} ranks on this machine; got {budget_mb}.")


def _peak(work: Work) -> dict[str, Any]:
    with _on_ranks(work.ranks) as peaks_of:
        peaks = peaks_of(work)
    element = work.heads * -(-work.seq_len // work.ranks) * work.head_size * BYTES[work.dtype]
    inputs = {"input_bytes": _input_bytes(work)}
    return {**described(work), "peak_bytes": max(peaks), "peaks": peaks, **inputs, "units": max(peaks) / element}


def _longest(work: Work, budget: int) -> dict[str, Any]:
    from ringspun.testing.context_length import longest

    with _on_ranks(work.ranks) as peaks_of:

        def peak(tokens: int) -> int:
            longer = replace(work, seq_len=tokens * work.ranks)
            return max(peaks_of(longer)) + _input_bytes(longer)

        tokens, held, _ = longest(peak, budget, start=64)
    found = {"tokens_per_rank": tokens, "peak_bytes": held, "budget_bytes": budget}
    return {**described(replace(work, seq_len=tokens * work.ranks)), **found}


@contextmanager
def _on_ranks(ranks: int) -> Iterator[Callable[[Work], list[int]]]:
    """Measures peaks, by rank, over one pool of processes."""
    from ringspun.testing.pool import RankPool
    from ringspun.testing.timing import peak_on_rank

    with RankPool(ranks) as pool:
        yield lambda work: pool.run(peak_on_rank, work, timeout_s=600.0)


def _input_bytes(work: Work) -> int:
    """q, k, v and the gradient of the output, on the rank with most tokens."""
    return 2 * (work.heads + work.kv_heads) * -(-work.seq_len // work.ranks) * work.head_size * BYTES[work.dtype]


def _compare(rows: list[dict[str, Any]], what: str) -> None:
    """Each row beside the first ring size, and the one before, of the same heads and dtype."""
    of_shape: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        same = of_shape.setdefault((row["dtype"], row["kv_heads"]), [])
        same.append(row)
        row["over_first"] = row[what] / same[0][what]
        row["over_last"] = row[what] / same[max(0, len(same) - 2)][what]


def _told(row: dict[str, Any]) -> str:
    who = f"R={row['ranks']} K={row['kv_heads']} {row['dtype']}"
    beside = f"{row['over_first']:.3f} of the first ring size, {row['over_last']:.3f} of the one before"
    if "budget_bytes" in row:
        each = f"{row['tokens_per_rank']:,} a rank, {row['peak_bytes'] / row['tokens_per_rank']:,.0f} bytes each"
        return f"{who}: {row['seq_len']:,} tokens ({each}), {beside}"
    return f"{who}: {row['peak_bytes']:,} bytes per rank, {beside}; {row['units']:.1f} x H*T*D elements"
