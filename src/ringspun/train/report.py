"""What a run shows and writes, on rank 0 alone: progress bar, JSON lines, TensorBoard scalars, loss curve, pictures.

None of it is worth the run: what cannot be written is told once, and training goes on. (A checkpoint is.)
"""

from __future__ import annotations

import importlib.util
import io
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ringspun.errors import RingspunError
from ringspun.pictures import Scene
from ringspun.pictures.notebook import pictures_of
from ringspun.pictures.page import page
from ringspun.train.log import Log
from ringspun.train.output import write_whole

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
        folder: gets `log.jsonl`, `tensorboard/`, `loss.png` and `ring.html`.
        steps: of the whole run.
        done: steps that a resumed run has already; later lines of an old log are dropped.
        console: where to print; a bar is drawn only on a terminal, elsewhere one line every 10 seconds.
    """

    def __init__(self, folder: Path, *, steps: int, done: int = 0, console: Console | None = None) -> None:
        self._folder = folder
        self._steps = steps
        self._console = console or Console()
        self._log = Log(folder / "log.jsonl", done=done)
        self._behind = False  # whether it was told that the log waits for room
        self._board: Any = None
        self._on_board(self._open_board, done)
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
        with suppress(OSError):
            self._bar.stop()
        try:
            self._log.close()
        except OSError as problem:
            self.say(f"log.jsonl lacks its last lines: {_reason(problem)}")
        if self._board is not None:
            self._on_board(self._board.close)
        if self._log.records:
            self._draw()

    def sequence(self, scene: Scene) -> None:
        """Writes `ring.html`: a page of pictures of how a sequence is shared out."""
        try:
            write_whole(self._folder / "ring.html", page(pictures_of(scene).figures).encode())
        except RingspunError as problem:
            self.say(f"ring.html is not drawn: {problem}")

    def say(self, text: str) -> None:
        """Prints one line; where nothing can be printed (to a file on a full disk), nothing."""
        with suppress(OSError):
            self._console.print(text, highlight=False, soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        """Shows and writes one step."""
        values = {key: value for key, value in asdict(record).items() if value is not None}
        self._add_to_log(values)
        for key in ("loss", "grad_norm", "lr", "tokens_per_s"):
            if self._board is not None:
                self._on_board(self._board.add_scalar, f"train/{key}", values[key], record.step)
        if record.peak_bytes:
            self._peak = f", peak {max(record.peak_bytes) / MIB:,.1f} MiB a rank"
        figures = f"loss {record.loss:.4f}, {record.tokens_per_s:,.0f} tokens/s{self._peak}"
        with suppress(OSError):
            self._bar.update(self._task, completed=record.step, figures=figures)
        if self._bar.disable and (record.step in (1, self._steps) or time.monotonic() > self._next_line_s):
            self._next_line_s = time.monotonic() + _LINE_EVERY_S
            self.say(f"step {record.step}/{self._steps}: {figures}")

    def _add_to_log(self, values: dict[str, Any]) -> None:
        try:
            self._log.add(values)
        except OSError as problem:
            if not self._behind:
                self.say(
                    f"log.jsonl cannot be written: {_reason(problem)}. Training goes on; its lines are kept in memory "
                    "and written when that is possible."
                )
        else:
            if self._behind:
                self.say("log.jsonl is written again; no line is missing")
        self._behind = self._log.behind

    def _on_board(self, call: Callable[..., Any], *values: Any) -> None:
        try:
            call(*values)
        except Exception as problem:  # not always an OSError: with tensorflow installed it is one of its own
            self._board = None  # its thread ended with the first error
            self.say(f"tensorboard/ cannot be written any more: {_reason(problem)}. Training goes on without it.")

    def _open_board(self, done: int) -> None:
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=done + 1)

    def _draw(self) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            self.say("loss.png is not drawn: pip install 'ringspun[plot]'")
            return
        try:
            draw_loss(self._log.records, self._folder / "loss.png")
        except RingspunError as problem:
            self.say(f"loss.png is not drawn: {problem}")


def draw_loss(records: list[dict[str, Any]], path: Path) -> None:
    """The loss curve as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], marker=".")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
    axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    write_whole(path, picture.getvalue())


def _reason(problem: Exception) -> str:
    return str(getattr(problem, "strerror", None) or problem)
