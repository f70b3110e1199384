"""What `ringspun train --dry-run` shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ringspun.train.checkpoints.checkpointing import Checkpoint
from ringspun.train.checkpoints.resume import leg_at
from ringspun.train.config import TrainConfig
from ringspun.train.dry_run import Foreseen
from ringspun.train.stages import told

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def show_stages(stages: Sequence[Foreseen], *, device: str | None) -> None:
    """The table of stages, and how far it is to be trusted."""
    out = Console(highlight=False, markup=False, soft_wrap=True)
    table = Table("stage", box=SIMPLE)
    for name in ("sequence", "tokens/step", "steps", "a rank", "s/step"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in stages:
        leg = one.leg
        size = _bytes(one.memory_bytes) + ("" if one.is_whole else " + ?")
        seconds = "?" if one.seconds is None else f"{one.seconds:.3g}"
        row = [f"{leg.seq_len:,}", f"{one.tokens_per_step:,}", f"{leg.steps:,}", size, seconds]
        table.add_row(str(leg.number + 1), *row)
    out.print(table)
    for one in stages:
        out.print(f"{one.leg}: {told(one.leg)}")
    where = f"{device}, by published rates" if device else "this machine, its rates measured just now"
    known = [one.seconds * one.leg.steps for one in stages if one.seconds is not None]
    if len(known) == len(stages):
        out.print(f"about {_time(sum(known))} on {where}; memory is good to a factor of about 1.6")
    else:
        out.print("a recipe's model: weights, gradients and moments alone; activations and time are not known")
    out.print(f"{stages[0].parameters:,} parameters; nothing was started")


def show_checkpoint(config: TrainConfig, found: Checkpoint | None) -> None:
    """Where the run would begin."""
    out = Console(highlight=False, markup=False, soft_wrap=True)
    if found is None:
        out.print(f"begins anew in {config.output}" + ("" if config.init is None else f", from {config.init}"))
    elif found.step == config.steps:
        out.print(f"has all its {found.step} steps: {found.path}")
    else:
        leg = leg_at(config.legs, found.step)
        of = f" in {leg}" if len(leg.lengths) > 1 else ""
        out.print(f"goes on from {found.path}, after {found.step - leg.first_step} of {leg.steps} steps{of}")


def _time(seconds: float) -> str:
    unit, name = next((row for row in ((3600.0, "hours"), (60.0, "minutes")) if seconds >= row[0]), (1.0, "seconds"))
    return f"{seconds / unit:,.2g} {name}"


def _bytes(size: float) -> str:
    unit, name = next((row for row in _UNITS if size >= row[0]), (1, "B"))
    return f"{size / unit:,.3g} {name}"
