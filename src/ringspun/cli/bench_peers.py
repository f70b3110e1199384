"""`ringspun bench peers`: the same attention by everybody who can be installed here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringspun.cli.measured import MOST_RANKS, measured_rows
from ringspun.cli.options import bounded, integers, split_list

if TYPE_CHECKING:
    from ringspun.testing.peers import Peer
    from ringspun.testing.peers.rows import Row


def peers(
    rows: Annotated[str, typer.Option(help="Rows whose name holds one of these, comma list; see --list.")] = "all",
    ranks: Annotated[str, typer.Option(help="Rows of these ring sizes, comma list.")] = "2,4",
    who: Annotated[str, typer.Option("--peers", help="Besides ours, peers whose name holds one of these.")] = "all",
    rounds: Annotated[int, typer.Option(help="Timed calls of each, in turn; the median counts.")] = 5,
    tokens: Annotated[
        int | None, typer.Option(help="Instead of each row's own length, for a quick look.", show_default="none")
    ] = None,
    judged_tokens: Annotated[int, typer.Option(help="Length at which errors are measured.")] = 512,
    plot: Annotated[str | None, typer.Option(help="Draw it into this file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of Markdown.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the names of rows and peers; measure nothing.")] = False,
) -> None:
    """Ringspun beside everybody: time, memory, bytes sent and errors of the same attention, all in turn in one run.

    A peer that is not installed is listed as such; benchmarks/peers.txt has them all.
    """
    from ringspun.testing.peers.comparing import Outcome, compare, rank_pools
    from ringspun.testing.peers.report import markdown

    def wanted() -> list[tuple[Row, list[Peer]]]:
        bounded("rounds", rounds, least=1)
        bounded("judged-tokens", judged_tokens, least=16, most=4096)
        if tokens is not None:
            bounded("tokens", tokens, least=16)
        if plot is not None:
            import matplotlib  # noqa: F401  # missing: said before the measurement, not after it
        return _chosen(rows, integers("ranks", ranks, least=1, most=MOST_RANKS), who)

    if names:
        (chosen,) = measured_rows(lambda: [wanted()], lambda some: some)
        typer.echo("\n".join([*(row.name for row, _ in chosen), "", *(peer.name for peer in chosen[0][1])]))
        return
    with rank_pools() as pools:

        def measure(one: tuple[Row, list[Peer]]) -> tuple[Row, list[Outcome]]:
            row, some = one
            typer.echo(f"ringspun bench: {row.name}", err=True)
            return row, compare(row, some, pools, rounds=rounds, judged_tokens=judged_tokens, tokens=tokens)

        found = measured_rows(wanted, measure)
    if plot is not None:
        from ringspun.testing.peers.picture import draw

        draw(found, Path(plot), tokens)
    if as_json:
        table = [{"row": asdict(row), "name": row.name, "peers": [asdict(o) for o in some]} for row, some in found]
        typer.echo(json.dumps({"rounds": rounds, "judged_tokens": judged_tokens, "tokens": tokens, "rows": table}))
        return
    typer.echo(markdown(found, rounds=rounds, judged_tokens=judged_tokens, tokens=tokens))


def _chosen(rows: str, ranks: list[int], who: str) -> list[tuple[Row, list[Peer]]]:
    from ringspun.testing.peers import PEERS
    from ringspun.testing.peers.rows import ROWS

    some = [row for row in ROWS if row.ranks in ranks and _named(row.name, rows)]
    if not some:
        raise ValueError(f"rows must name rows of the table; got {rows!r} with ranks {ranks}. See --list.")
    others = [peer for peer in PEERS[1:] if _named(peer.name, who)]
    if not others:
        raise ValueError(f"peers must name peers; got {who!r}. See --list.")
    return [(row, [PEERS[0], *others]) for row in some]


def _named(name: str, wanted: str) -> bool:
    return wanted == "all" or any(part in name for part in split_list(wanted))
