"""`ringspun bench peers`: the same attention by everybody who can be installed here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspun.cli.measured import MOST_RANKS, measured_rows
from ringspun.cli.options import bounded, integers, split_list

if TYPE_CHECKING:
    from ringspun.testing.peers import Peer
    from ringspun.testing.peers.record import Comparison
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
    save: Annotated[str | None, typer.Option(help="Write everything into this file, after each row.")] = None,
    saved: Annotated[str | None, typer.Option("--from", help="Measure nothing: files of --save, comma list.")] = None,
    plot: Annotated[str | None, typer.Option(help="Draw it into this file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of Markdown.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the names of rows and peers; measure nothing.")] = False,
) -> None:
    """Ringspun beside everybody: time, memory, bytes sent and errors of the same attention, all in turn in one run.

    A peer that is not installed is listed as such; benchmarks/peers.txt has them all.
    """
    from ringspun.testing.peers.record import Comparison, machine
    from ringspun.testing.peers.report import markdown

    if plot is not None:
        import matplotlib  # noqa: F401  # missing: said before the measurement, not after it
    if saved is not None:
        files = [Path(path) for path in saved.split(",")]
        (found,) = measured_rows(lambda: [files], Comparison.from_files)
    else:

        def wanted() -> list[list[tuple[Row, list[Peer]]]]:
            bounded("rounds", rounds, least=1)
            bounded("judged-tokens", judged_tokens, least=16, most=4096)
            bounded("tokens", 16 if tokens is None else tokens, least=16)
            return [_chosen(rows, integers("ranks", ranks, least=1, most=MOST_RANKS), who)]

        if names:
            (chosen,) = measured_rows(wanted, lambda some: some)
            typer.echo("\n".join([*(row.name for row, _ in chosen), "", *(peer.name for peer in chosen[0][1])]))
            return
        start = Comparison(rounds, judged_tokens, tokens, machine())
        (found,) = measured_rows(wanted, lambda some: _measure(some, start, save))
    if plot is not None:
        from ringspun.testing.peers.picture import draw

        draw(found, Path(plot))
    typer.echo(found.to_json() if as_json else markdown(found))


def _measure(chosen: list[tuple[Row, list[Peer]]], found: Comparison, save: str | None) -> Comparison:
    from ringspun.testing.peers import comparing

    settings: dict[str, Any] = {name: getattr(found, name) for name in ("rounds", "judged_tokens", "tokens")}
    if save is not None:
        found.save(Path(save))  # a place where no file can be is found before the measurement
    with comparing.rank_pools() as pools:
        for row, some in chosen:
            typer.echo(f"ringspun bench: {row.name}", err=True)
            found = found.and_row(row, comparing.compare(row, some, pools, **settings))
            if save is not None:
                found.save(Path(save))
    return found


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
