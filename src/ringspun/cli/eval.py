"""`ringspun eval`: what a model finds in a long context, and how well it predicts with it."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from ringspun.cli.options import bounded, integers, one_of, split_list, tokens, told

if TYPE_CHECKING:
    from ringspun.evaluation.job import EvalJob, Results
    from ringspun.pictures.figures import Figure

app = typer.Typer(add_completion=False, rich_markup_mode=None)
TASKS = ("lines", "passkey", "perplexity")
WIDTH = 80
_ONE_PICTURE = (".png", ".svg")


@app.command(no_args_is_help=True)
def evaluate(
    model: Annotated[
        Path, typer.Argument(help="A run's folder (its newest checkpoint), a checkpoint's, or a Hugging Face model's.")
    ],
    task: Annotated[str, typer.Option(help="lines, passkey, perplexity; a comma list.")] = "lines",
    seq_len: Annotated[str, typer.Option(help="Tokens of a text with its question (512, 16K), comma list.")] = "512",
    ranks: Annotated[int, typer.Option(help="Processes that share each text.")] = 1,
    loopback: Annotated[bool, typer.Option("--loopback", help="Play the ranks in this process.")] = False,
    layout: Annotated[str, typer.Option(help="Who holds which token.")] = "zigzag",
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16: by autocast.")] = "float32",
    depths: Annotated[int, typer.Option(help="Equal parts of a document that are told apart.")] = 10,
    questions: Annotated[int, typer.Option(help="Of each length.")] = 50,
    per_document: Annotated[int, typer.Option(help="lines: of them, about one document.")] = 50,
    keys: Annotated[int, typer.Option(help="passkey: keys hidden in one document, each asked for.")] = 1,
    hard_negatives: Annotated[
        bool, typer.Option("--hard-negatives", help="lines: numbers that differ in one digit, values that begin alike.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="perplexity: held-out text, JSON lines or Parquet, a file or a folder.")
    ] = None,
    sequences: Annotated[int, typer.Option(help="perplexity: of each length.")] = 4,
    buckets: Annotated[int, typer.Option(help="perplexity: equal parts of a sequence.")] = 8,
    window: Annotated[
        str | None, typer.Option(help="perplexity: compare with the last so many tokens alone, comma list.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the documents; the same seed, the same questions.")] = 0,
    recipe: Annotated[
        Path | None, typer.Option(help="Python file whose build_model made it.", show_default="the run's own")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this file; - prints them.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Draw it into a file: .html, or one task's .png or .svg.")] = None,
) -> None:
    """Ask a model for numbered lines or pass keys of long texts, and measure its loss by position.

    An answer is exact if each of its tokens has the largest logit after those before it: what greedy decoding would
    give. All questions about a text are asked in one pass, none seeing another, each rank holding its share.
    """
    with told("eval", output="save"):
        from ringspun.evaluation.job import EvalJob, run

        names = tuple(dict.fromkeys(one_of("task", name, TASKS) for name in split_list(task)))
        job = EvalJob(
            model, recipe, names, tuple(tokens(item, least=2) for item in split_list(seq_len)), ranks, loopback, layout,
            cast(Literal["float32", "bfloat16"], one_of("dtype", dtype, ("float32", "bfloat16"))), depths, questions,
            (bounded("per-document", per_document, least=1), bounded("keys", keys, least=1)), seed, hard_negatives,
            data, sequences, buckets, () if window is None else tuple(integers("window", window, least=2)),
        )  # fmt: skip
        _check_files(job, as_json, save)
        quiet = as_json is not None and str(as_json) == "-"
        results = run(job)
        if os.environ.get("RANK", "0") == "0":  # under torchrun, one rank speaks
            _out(job, results, as_json, save, quiet=quiet)


def _check_files(job: EvalJob, *files: Path | None) -> None:
    """Refuses what could not be written at the end."""
    for path in files:
        if path is not None and str(path) != "-" and not path.absolute().parent.is_dir():
            raise ValueError(f"save and json must be files in a folder that is there; got {path}.")
    *_, save = files
    if save is None:
        return
    one_of("save's ending", save.suffix, (*_ONE_PICTURE, ".html"))
    pictures = len(job.tasks) + (len(job.seq_lens) - 1) * ("perplexity" in job.tasks)
    if save.suffix in _ONE_PICTURE:
        importlib.import_module("ringspun.pictures.plot")  # without matplotlib it fails now, not after the evaluation
        if pictures > 1:
            raise ValueError(f"save must be an .html for {pictures} pictures; got {save.name!r}.")


def _out(job: EvalJob, results: Results, as_json: Path | None, save: Path | None, *, quiet: bool) -> None:
    from rich.console import Console

    from ringspun.pictures import save as files
    from ringspun.pictures.terminal import show

    figures = _figures(job, results)
    if not quiet:
        console = Console()
        if console.width > WIDTH or not console.is_terminal:
            console.width = WIDTH
        for figure in figures:
            console.print()
            show(figure, console)
    if as_json is not None:
        text = json.dumps(_numbers(job, results), indent=1, allow_nan=False)
        typer.echo(text) if quiet else as_json.write_text(text + "\n", encoding="utf-8")
    if save is not None:
        files.save(figures, save)
    for path in (as_json, save):
        if path is not None and str(path) != "-":
            typer.echo(f"wrote {path}", err=quiet)


def _figures(job: EvalJob, results: Results) -> Sequence[Figure]:
    from ringspun.evaluation.heatmap import curves, heatmap

    figures: list[Figure] = [heatmap(grid, model=results.words, notes=(results.tokens,)) for grid in results.grids]
    for loss, whole in zip(results.losses, results.whole, strict=True):
        joined = job.sequences - whole
        note = f"{job.sequences} sequences of {job.data}, {whole} of them the beginning of one document"
        notes = (results.tokens, note + (", the others of several, joined" if joined else ""))
        figures.append(curves(loss, model=results.words, notes=notes))
    return figures


def _numbers(job: EvalJob, results: Results) -> dict[str, Any]:
    """Plain data for JSON, with what was asked."""
    from dataclasses import asdict

    asked = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(job).items()}
    return {
        "model": results.words,
        "tokens": results.tokens,
        "asked": asked,
        "results": [
            *(grid.as_dict() for grid in results.grids),
            *(
                loss.as_dict() | {"whole_documents": whole}
                for loss, whole in zip(results.losses, results.whole, strict=True)
            ),
        ],
    }
