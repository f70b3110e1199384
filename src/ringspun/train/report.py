"""What a run shows and writes, on rank 0 alone: progress bar, JSON lines, TensorBoard scalars, loss curve."""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

MIB = 1 << 20
_LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class StepRecord:
    """One line of `log.jsonl`."""

    step: int
    loss: float  # mean over the sequence's targets, before the update
    grad_norm: float  # before clipping
    lr: float
    seconds: float
    tokens_per_s: float
    documents: int  # in this sequence
    documents_cut: int  # 1 if the last one goes on in the next sequence
    peak_bytes: tuple[int, ...] | None = None  # per rank, above the step's start; of the one step that is profiled


class Report:
    """Shows and writes the steps of one run; use as a context manager.

    Args:
        folder: gets `log.jsonl`, `tensorboard/` and `loss.png`.
        steps: of the whole run.
        done: steps that a resumed run has already; later lines of an old log are dropped.
        console: where to print; a bar is drawn only on a terminal, elsewhere one line every 10 seconds.
    """

    def __init__(self, folder: Path, *, steps: int, done: int = 0, console: Console | None = None) -> None:
        self._folder = folder
        self._steps = steps
        self._console = console or Console()
        folder.mkdir(parents=True, exist_ok=True)
        self.records = _keep_until(folder / "log.jsonl", done)
        self._log = (folder / "log.jsonl").open("a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", done)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=done, figures="")
        self._peak = ""
        self._next_line_s = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._log.close()
        if self._board is not None:
            self._board.close()
        if self.records:
            self._draw()

    def say(self, text: str) -> None:
        """Prints one line."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        """Shows and writes one step."""
        values = {key: value for key, value in asdict(record).items() if value is not None}
        self.records.append(values)
        self._log.write(json.dumps(values) + "\n")
        self._log.flush()
        if self._board is not None:
            for key in ("loss", "grad_norm", "lr", "tokens_per_s"):
                self._board.add_scalar(f"train/{key}", values[key], record.step)
        if record.peak_bytes:
            self._peak = f", peak {max(record.peak_bytes) / MIB:,.1f} MiB a rank"
        figures = f"loss {record.loss:.4f}, {record.tokens_per_s:,.0f} tokens/s{self._peak}"
        self._bar.update(self._task, completed=record.step, figures=figures)
        if self._bar.disable and (record.step in (1, self._steps) or time.monotonic() > self._next_line_s):
            self._next_line_s = time.monotonic() + _LINE_EVERY_S
            self.say(f"step {record.step}/{self._steps}: {figures}")

    def _draw(self) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            self.say("loss.png is not drawn: pip install 'ringspun[plot]'")
            return
        draw_loss(self.records, self._folder / "loss.png")


def draw_loss(records: list[dict[str, Any]], path: Path) -> None:
    """The loss curve as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], marker=".")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _keep_until(path: Path, done: int) -> list[dict[str, Any]]:
    """The log's records up to step `done`; an interrupted run may have written more, or half a line."""
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            if record["step"] <= done and isinstance(record["loss"], float):
                kept.append(record)
        except (ValueError, TypeError, KeyError):
            break
    fresh = path.with_name(path.name + ".new")
    fresh.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    fresh.replace(path)
    return kept


def _tensorboard(folder: Path, done: int) -> Any:
    """A writer, or None where TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=done + 1)
