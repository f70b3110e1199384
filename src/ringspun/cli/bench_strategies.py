"""`ringspun bench strategies`: one transformer block by every way to share it among ranks."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspun.cli.measured import MOST_RANKS, measured_rows
from ringspun.cli.options import bounded, one_of

if TYPE_CHECKING:
    from ringspun.testing.strategies import Model


def strategies(
    ranks: Annotated[int, typer.Option(help="Local processes, an even number.")] = 4,
    seq_len: Annotated[int, typer.Option(help="Global length (tokens).")] = 4096,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 4,
    head_size: Annotated[int, typer.Option(help="Head size.")] = 32,
    hidden_size: Annotated[int, typer.Option(help="Of the feed-forward layer.")] = 1024,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    repeats: Annotated[int, typer.Option(help="Rounds through all of them, at least 3; the median time counts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """A block (attention and feed-forward, forward + backward) on local ranks: ring, Ulysses, USP, tensor parallel,
    tensor parallel with Megatron's sequence parallel.

    Bytes are what one rank sends: for activations, and for gradients of weights (an all-reduce, which data parallelism
    makes in any case). Losses are compared with one process.
    """

    def wanted() -> list[Model]:
        from ringspun.testing.strategies import Model

        bounded("ranks", ranks, least=2, most=MOST_RANKS)
        bounded("repeats", repeats, least=3)
        one_of("dtype", dtype, ("float32", "bfloat16"))
        if ranks % 2 or heads % kv_heads or kv_heads % ranks or hidden_size % ranks or seq_len % ranks:
            raise ValueError(
                f"ranks must be even and divide seq-len, kv-heads and hidden-size, and kv-heads heads, so that every "
                f"strategy can run; got ranks = {ranks}, seq-len = {seq_len}, heads = {heads}, kv-heads = {kv_heads}, "
                f"hidden-size = {hidden_size}."
            )
        return [Model(seq_len, heads, kv_heads, head_size, hidden_size, dtype)]

    (rows,) = measured_rows(wanted, lambda model: _measure(model, ranks, repeats))
    if as_json:
        typer.echo(json.dumps({"rows": rows}, indent=1))
        return
    for row in rows:
        typer.echo(
            f"{row['strategy']:8} {1e3 * row['seconds']:8.1f} ms  peak {row['peak_bytes'] / 2**20:7.1f} MiB  sends "
            f"{row['sent_bytes'] / 2**20:6.2f} MiB, for weights {row['gradient_bytes'] / 2**20:.2f} MiB  loss off by "
            f"{row['loss_error']:.1e}  ranks: {row['largest_degree']}"
        )


def _measure(model: Model, ranks: int, repeats: int) -> list[dict[str, Any]]:
    from ringspun.testing.pool import RankPool
    from ringspun.testing.strategies import STRATEGIES, alone, largest_degree, on_rank

    right = alone(model)
    found: dict[str, list[Any]] = {name: [] for name in STRATEGIES}
    with RankPool(ranks) as pool:
        for _ in range(repeats):
            for name in STRATEGIES:
                found[name].append(pool.run(on_rank, name, model, timeout_s=600.0))
    rows = []
    for name, rounds in found.items():
        last = rounds[-1]
        rows.append(
            {
                "strategy": name,
                "seconds": median(max(one.seconds for one in told) for told in rounds),
                "peak_bytes": max(one.peak_bytes for one in last),
                "sent_bytes": max(one.sent_bytes for one in last),
                "gradient_bytes": max(one.gradient_bytes for one in last),
                "loss_error": abs(sum(one.loss for one in last) / right - 1),
                "largest_degree": largest_degree(name, model),
            }
        )
    return rows
