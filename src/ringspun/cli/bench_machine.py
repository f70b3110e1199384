"""`ringspun bench links` and `kernels`: what this machine's links and cores can do, whatever runs on them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringspun.cli.measured import BYTES, MOST_RANKS, measured_rows
from ringspun.cli.options import bounded, integers, one_of, split_list
from ringspun.core.host import cores
from ringspun.core.links import Links

if TYPE_CHECKING:
    from ringspun.testing.speeds import Speed


def links(
    ranks: Annotated[int, typer.Option(help="Local processes.")] = 2,
    largest: Annotated[int, typer.Option(help="Longest message (bytes).")] = 1 << 26,
    repeats: Annotated[int, typer.Option(help="Of each length, at least 3; the median counts.")] = 9,
    output: Annotated[str | None, typer.Option(help="Write the profile that `plan` and `bench ring` read.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How long a message to the next rank takes, by length: alone, and while every rank sends.

    Over local processes; on a cluster call `ringspun.testing.links.measure_links()` on every rank of your group.
    """

    def wanted() -> list[tuple[int, ...]]:
        bounded("ranks", ranks, least=2, most=MOST_RANKS)
        bounded("largest", largest, least=1024, most=1 << 30)
        bounded("repeats", repeats, least=3)
        return [tuple(1 << n for n in range(10, 31, 2) if 1 << n <= largest)]

    (found,) = measured_rows(wanted, lambda sizes: _measure_links(ranks, sizes, repeats))
    if output is not None:
        try:
            found.save(Path(output))
        except OSError as problem:
            typer.echo(
                f"ringspun bench: output must be a place for a file; got {output}: {problem.strerror}.", err=True
            )
            raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
        return
    link = found.near
    for n, alone, together in zip(link.message_bytes, link.alone_s, link.together_s, strict=True):
        typer.echo(f"{n:>12,} bytes: alone {_rate(n, alone)}, all {found.ranks} at once {_rate(n, together)}")
    typer.echo(f"peak {link.peak / 1e9:.2f} GB/s; a rank is {link.shared:.1f} times slower while all send")


def kernels(
    tokens: Annotated[str, typer.Option(help="Queries and keys of a tile, comma list.")] = "128,512,2048",
    heads: Annotated[int, typer.Option(help="Heads.")] = 4,
    head_size: Annotated[int, typer.Option(help="Head size.")] = 64,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16, float16; comma list.")] = "float32,bfloat16",
    threads: Annotated[int | None, typer.Option(help="Default: every core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """FLOP per second of every kernel, by size of the tile, beside a matrix product of the same dtype."""

    def wanted() -> list[tuple[list[int], list[str]]]:
        bounded("heads", heads, least=1)
        bounded("head-size", head_size, least=1)
        bounded("threads", 1 if threads is None else threads, least=1)
        names = [one_of("dtype", d, tuple(BYTES)) for d in split_list(dtype)]
        return [(integers("tokens", tokens, least=1, most=1 << 16), names)]

    rows = [
        row for some in measured_rows(wanted, lambda w: _measure_kernels(*w, heads, head_size, threads)) for row in some
    ]
    if as_json:
        typer.echo(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
        return
    for row in rows:
        what = f"{row.kernel} {row.dtype} {'causal' if row.causal else 'full'} {row.tokens}"
        if row.refusal is not None:
            typer.echo(f"{what}: refused, {row.refusal}")
            continue
        of_gemm = " and ".join(f"{x / 1e9:.1f} GFLOP/s ({x / row.gemm:.0%})" for x in (row.forward, row.backward))
        typer.echo(f"{what}: forward and backward {of_gemm} of a product's {row.gemm / 1e9:.1f}")


def _rate(n_bytes: int, seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} us ({n_bytes / seconds / 1e9:.2f} GB/s)"


def _measure_links(ranks: int, sizes: tuple[int, ...], repeats: int) -> Links:
    from ringspun.testing.links import links_on_rank
    from ringspun.testing.pool import RankPool

    with RankPool(ranks) as pool:
        link = pool.run(links_on_rank, sizes, repeats, timeout_s=600.0)[0]
    return Links(ranks, link, where=f"{ranks} local processes, gloo, {sys.platform}")


def _measure_kernels(
    tokens: list[int], dtypes: list[str], heads: int, head_size: int, threads: int | None
) -> list[Speed]:
    import torch

    from ringspun.testing.speeds import measure_kernels

    before = torch.get_num_threads()
    torch.set_num_threads(threads or cores())
    try:
        return list(measure_kernels(tokens, dtypes, heads=heads, head_size=head_size))
    finally:
        torch.set_num_threads(before)
