"""`ringspun train`: a model trained on text, each sequence shared by several ranks."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringspun.train.config import TrainConfig
    from ringspun.train.data.text import TrainingData
    from ringspun.train.recipe import Recipe

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="TOML file that describes the run; see examples/.")],
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="File or folder, of the format in [data]; once or several times."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Processes that share each sequence; replaces the config's.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Folder of checkpoints and logs; replaces the config's.")] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--fresh",
            help="Go on from the last checkpoint, if any; or move the old output aside and begin anew.",
        ),
    ] = True,
    export: Annotated[
        Path | None, typer.Option(help="At the end, write the model into this new folder, for from_pretrained.")
    ] = None,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="At the end, compare the ring with one process: loss, gradients, memory."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show each stage's memory and time, the data, and where it would go on."),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="With --dry-run: an accelerator's name; default: this machine, measured.")
    ] = None,
) -> None:
    """Train a small language model on your own text, each long sequence cut over several ranks.

    Starts the ranks on this machine, or joins the job when started by torchrun. Run again after an
    interruption, it goes on from the last checkpoint.
    """
    from ringspun.errors import ConfigError, RingspunError

    try:
        settings, corpus, recipe = _read(config, data or [], ranks=ranks, output=output)
        if dry_run:
            _foresee(settings, corpus, recipe, device=device, fresh=not resume)
        elif device is not None:
            raise ConfigError(f"device must come with --dry-run; got {device}. A run is on this machine.")
        else:
            _train(settings, corpus, fresh=not resume, prove=prove, export=export)
    except RingspunError as problem:
        typer.echo(f"ringspun train: {problem}", err=True)
        raise typer.Exit(1) from problem
    except OSError as problem:  # a disk that fills up, a folder that is taken away
        typer.echo(f"ringspun train: files must stay readable and writable; {problem}.", err=True)
        raise typer.Exit(1) from problem
    except KeyboardInterrupt:
        typer.echo(
            "interrupted; the same command, without --fresh, goes on from the last checkpoint if there is one", err=True
        )
        raise typer.Exit(130) from None


def _read(
    config: Path, data: list[Path], *, ranks: int | None, output: str | None
) -> tuple[TrainConfig, TrainingData, Recipe]:
    """Config, data and recipe, all of which are found right here, before anything starts."""
    _require("torch", "transformers", "safetensors", "filelock")
    from ringspun.train.config import load_config
    from ringspun.train.data.opening import open_data
    from ringspun.train.recipe import OwnData, Recipe

    settings = load_config(config, ranks=ranks, output=output)
    recipe = Recipe.of(settings)
    own = recipe.sequences is not None and not data and not settings.data.path
    corpus: TrainingData = OwnData() if own else open_data(settings, data)
    if os.environ.get("RANK", "0") == "0":  # under torchrun, one rank speaks
        typer.echo(f"{corpus.summary} from {', '.join(map(str, data or settings.data.path)) or settings.recipe}")
    return settings, corpus, recipe


def _foresee(settings: TrainConfig, corpus: TrainingData, recipe: Recipe, *, device: str | None, fresh: bool) -> None:
    from ringspun.cli.train_tables import show_checkpoint, show_stages
    from ringspun.train.checkpoints.resume import find_checkpoint
    from ringspun.train.dry_run import foresee
    from ringspun.train.launch import Job, check

    check(Job(settings, corpus))
    show_stages(foresee(settings, recipe, device=device), device=device)
    show_checkpoint(settings, None if fresh else find_checkpoint(settings, corpus, warn=typer.echo))


def _train(settings: TrainConfig, corpus: TrainingData, *, fresh: bool, prove: bool, export: Path | None) -> None:
    from ringspun.train.checkpoints import export as exporting  # heavy: only once config and data are right
    from ringspun.train.launch import Job, launch

    first = os.environ.get("RANK", "0") == "0"
    say = typer.echo if first else _silent
    if export is not None:
        exporting.check_target(export)
    launch(Job(settings, corpus, fresh=fresh, prove=prove))
    if export is not None and first:
        exporting.export_newest(settings.output, export)
        say(f"exported: {export} is for from_pretrained")
    of_model = " (their model/ is for from_pretrained)" if settings.checkpoints == "whole" else ""
    say(f"done: checkpoints{of_model}, log, report.html and loss curve are in {settings.output}")


def _silent(_: str) -> None:
    pass


def _require(*names: str) -> None:
    from ringspun.errors import MissingExtra

    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(f"train must find {name}; install it: pip install 'ringspun[train]'.")
