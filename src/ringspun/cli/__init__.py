"""The `ringspun` command. Each subcommand is one file, imported when it is called: `--help` needs no framework."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

COMMANDS = {
    "check": "Certify this machine: errors of a ring against the float64 oracle.",
    "bench": "Measure a ring beside one process.",
    "plan": "Say what fits, what hides, how fast, and whether to ring, before anything is rented.",
    "show": "Draw masks, layouts, schedules, balance, memory and time.",
    "train": "Train a language model on sequences cut over ranks.",
    "eval": "Say what a model finds in a long context, and how well it predicts with it.",
    "explain-hang": "Say who waits for whom, from the step logs of a job's ranks.",
}


_EXTRAS = {"torch": "torch", "jax": "jax", "transformers": "train", "safetensors": "train", "matplotlib": "plot"}
"""What a missing module is an extra of."""


class _LazyGroup(TyperGroup):
    """Knows its commands by name and imports the file of one only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"ringspun.cli.{cmd_name.replace('-', '_')}")
        command = get_command(module.app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    cls=_LazyGroup,
    help="Exact attention over sequences that no single device can hold.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback()
def _root() -> None:
    """Exact attention over sequences that no single device can hold."""


def main() -> None:
    """Entry point of the `ringspun` script."""
    try:
        app()
    except ModuleNotFoundError as problem:
        if problem.name not in _EXTRAS:
            raise
        extra = _EXTRAS[problem.name]
        typer.echo(f"ringspun must find {problem.name}; install it: pip install 'ringspun[{extra}]'.", err=True)
        raise SystemExit(1) from None
