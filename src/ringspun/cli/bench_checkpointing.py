"""`ringspun bench checkpointing`: what each policy of activation checkpointing keeps, sends and takes."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspun.cli.measured import MOST_RANKS, measured_rows
from ringspun.cli.options import bounded

if TYPE_CHECKING:
    from ringspun.testing.recomputing import Told
    from ringspun.testing.strategies import Model


def checkpointing(
    ranks: Annotated[int, typer.Option(help="Local processes, at least 2.")] = 4,
    seq_len: Annotated[int, typer.Option(help="Global length (tokens).")] = 4096,
    layers: Annotated[int, typer.Option(help="Transformer layers.")] = 4,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 2,
    head_size: Annotated[int, typer.Option(help="Head size.")] = 64,
    hidden_size: Annotated[int, typer.Option(help="Of the feed-forward layer.")] = 512,
    repeats: Annotated[int, typer.Option(help="Rounds through all of them, at least 3; the median time counts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Layers on local ranks, forward + backward, by every policy of activation checkpointing: memory kept and at its
    peak, extra FLOPs, laps of the ring, bytes sent, time. Prints predicted / measured, of the rank that has most.

    ring_step n: a ring leaves the keys and values of n of its hops to backward.
    """

    def wanted() -> list[Model]:
        from ringspun.testing.strategies import Model

        bounded("ranks", ranks, least=2, most=MOST_RANKS)
        bounded("layers", layers, least=1)
        bounded("repeats", repeats, least=3)
        for name, value in (("heads", heads), ("kv-heads", kv_heads), ("head-size", head_size)):
            bounded(name, value, least=1)
        bounded("hidden-size", hidden_size, least=1)
        bounded("seq-len", seq_len, least=ranks)
        if heads % kv_heads:
            raise ValueError(f"kv-heads must divide heads; got {kv_heads} and heads = {heads}.")
        return [Model(seq_len, heads, kv_heads, head_size, hidden_size)]

    (rows,) = measured_rows(wanted, lambda model: _measure(model, layers, ranks, repeats))
    if as_json:
        typer.echo(json.dumps({"rows": rows}, indent=1))
        return
    from ringspun.testing.recomputing import table

    typer.echo("\n".join(table(rows)))


def _measure(model: Model, layers: int, ranks: int, repeats: int) -> list[dict[str, Any]]:
    from ringspun.testing.pool import RankPool
    from ringspun.testing.recomputing import on_rank, predicted, time_on_rank, variants

    all_of_them = variants(ranks)
    with RankPool(ranks) as pool:
        found = {v: pool.run(on_rank, model, layers, v, timeout_s=600.0) for v in all_of_them}
        times: dict[Any, list[float]] = {v: [] for v in all_of_them}
        for _ in range(repeats):
            for v in all_of_them:
                times[v].append(max(pool.run(time_on_rank, model, layers, v, timeout_s=600.0)))
    rows: list[dict[str, Any]] = []
    for v in all_of_them:
        says = [predicted(model, layers, ranks, v, r) for r in range(ranks)]
        rows.append(
            {
                "policy": v.name,
                "predicted": _most(says)._asdict(),
                "measured": _most(found[v])._asdict(),
                "seconds": median(times[v]),
            }
        )
    for kind in ("predicted", "measured"):
        least = rows[0][kind]["flops"]
        for row in rows:
            row[kind]["extra_flops"] = row[kind]["flops"] / least - 1
    return rows


def _most(told: list[Told]) -> Told:
    """Of each figure the largest among the ranks."""
    kind = type(told[0])
    return kind(*map(max, zip(*told, strict=True)))
