"""`ringspun explain-hang`: who waits for whom, from the step logs that the ranks of a job left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ringspun.errors import DataError
from ringspun.steplog.page import as_data, page
from ringspun.steplog.timeline import read
from ringspun.steplog.verdict import judge

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def explain_hang(
    dumps: Annotated[list[Path], typer.Argument(help="Step logs of the ranks, or folders of them.", metavar="DUMP...")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per ring, in a list.")] = False,
) -> None:
    """Merge the ranks' step logs and say who waits for whom, since when, and which rank or link is the root."""
    try:
        files = [f for d in dumps for f in (sorted(d.glob("ringspun-*.json")) if d.is_dir() else [d])]
        verdicts = [judge(ring) for ring in read(files)]
    except DataError as problem:
        typer.echo(f"ringspun explain-hang: {problem}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps([as_data(v) for v in verdicts], indent=1))
        return
    typer.echo("\n\n".join(page(v) for v in verdicts))
