"""`ringspun bench context`: the longest sequence that can be trained within a budget of memory per rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringspun.cli.measured import MOST_RANKS, measured_rows
from ringspun.cli.options import bounded, integers

if TYPE_CHECKING:
    from ringspun.testing.context_length import Longest, Shape

HEADS = 4
NAMES = {4: "MHA", 1: "GQA 4:1"}
"""Key/value heads beside 4 query heads."""


def context(
    budget_mib: Annotated[float, typer.Option(help="Memory of each rank (MiB), weights and moments included.")] = 8.0,
    ranks: Annotated[str, typer.Option(help="Ring sizes, comma list.")] = "2,4,8",
    kv_heads: Annotated[str, typer.Option(help="Key/value heads beside 4 query heads: 4, 1, or both.")] = "4,1",
    layers: Annotated[int, typer.Option(help="Layers.")] = 8,
    hidden_size: Annotated[int, typer.Option(help="Width, a multiple of 8; feed-forward is 4 times as wide.")] = 32,
    vocab_size: Annotated[int, typer.Option(help="Entries of the vocabulary.")] = 512,
    block_size: Annotated[int, typer.Option(help="Tokens of a block of feed-forward and of a chunk of loss.")] = 64,
    plot: Annotated[str | None, typer.Option(help="Draw it into this file, too.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The longest trainable sequence of a small Llama at a fixed budget: plain, attention in tiles, blockwise, rings.

    By the profiler's memory events of one step, of the rank that needs most; nothing is checkpointed.
    """
    if plot is not None:
        import matplotlib  # noqa: F401  # missing: said before the measurement, not after it
    rings: list[int] = []

    def wanted() -> list[Shape]:
        from ringspun.testing.context_length import Shape

        rings.extend(integers("ranks", ranks, least=2, most=MOST_RANKS))
        groups = integers("kv-heads", kv_heads, least=1, most=HEADS)
        for name, value in (("layers", layers), ("vocab-size", vocab_size), ("block-size", block_size)):
            bounded(name, value, least=1)
        if HEADS % groups[0] or any(HEADS % group for group in groups) or hidden_size % 8 or hidden_size < 8:
            raise ValueError(
                f"kv-heads must divide {HEADS} and hidden-size be a multiple of 8; got {kv_heads} and {hidden_size}."
            )
        if not budget_mib > 0:
            raise ValueError(f"budget-mib must be above 0; got {budget_mib}.")
        return [Shape(layers, hidden_size, HEADS, k, 4 * hidden_size, vocab_size, block_size) for k in groups]

    tables = measured_rows(wanted, lambda shape: (shape, _measure(shape, budget_mib, rings)))
    if plot is not None:
        draw(tables, budget_mib, Path(plot))
    if as_json:
        rows = [{**asdict(shape), "rows": [asdict(row) for row in found]} for shape, found in tables]
        typer.echo(json.dumps({"budget_mib": budget_mib, "models": rows}, indent=1))
    elif markdown:
        typer.echo("\n".join(_markdown(tables)))
    else:
        _print(tables, budget_mib)


def _measure(shape: Shape, budget_mib: float, rings: list[int]) -> list[Longest]:
    from ringspun.testing.context_length import MIB, compare

    name = _name(shape)
    return compare(shape, int(budget_mib * MIB), rings, lambda line: typer.echo(f"{name}, {line}", err=True))


def _name(shape: Shape) -> str:
    return NAMES.get(shape.kv_heads, f"{HEADS} : {shape.kv_heads} heads")


def _cells(shape: Shape, found: Sequence[Longest]) -> list[tuple[str, ...]]:
    """Rows of the table: lengths, and what they are beside plain, and beside blockwise in one process."""
    plain = found[0].seq_len
    alone = next(row.seq_len for row in found if row.way == "blockwise")
    return [
        (
            _name(shape),
            row.name,
            f"{row.seq_len:,}",
            f"{row.seq_len / plain:.1f}",
            f"{row.seq_len / alone:.2f}" if row.way == "blockwise" else "",
            f"{row.seq_len / alone / row.ranks:.2f}" if row.ranks > 1 else "",
        )
        for row in found
    ]


TITLES = ("heads", "way", "longest (tokens)", "x plain", "x blockwise", "per rank")
Tables = Sequence[tuple["Shape", Sequence["Longest"]]]


def _markdown(tables: Tables) -> list[str]:
    rows = [cells for shape, found in tables for cells in _cells(shape, found)]
    head = ["| " + " | ".join(TITLES) + " |", "|---|---|" + "---:|" * (len(TITLES) - 2)]
    return head + ["| " + " | ".join(cells) + " |" for cells in rows]


def _print(tables: Tables, budget_mib: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"longest trainable sequence, {budget_mib:g} MiB per rank")
    for i, title in enumerate(TITLES):
        table.add_column(title, justify="left" if i < 2 else "right")
    for shape, found in tables:
        for cells in _cells(shape, found):
            table.add_row(*cells)
        table.add_section()
    Console().print(table)


def draw(tables: Tables, budget_mib: float, path: Path) -> None:
    """The lengths as bars, on a log scale; the kind of picture by the path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(tables)
    for i, (shape, found) in enumerate(tables):
        places = [x + i * width for x in range(len(found))]
        bars = axes.bar(places, [row.seq_len for row in found], width, label=_name(shape))
        axes.bar_label(bars, [f"{row.seq_len:,}" for row in found], fontsize=7)
    names = [row.name for row in tables[0][1]]
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(names))], names)
    axes.set_yscale("log")
    axes.set(ylabel="tokens", title=f"longest trainable sequence, {budget_mib:g} MiB per rank")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
