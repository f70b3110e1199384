"""What a run shows and writes, on rank 0 alone: progress bar, JSON lines, TensorBoard scalars, curves, pictures.

None of it is worth the run: what cannot be written is told once, and training goes on. (A checkpoint is.)
"""

from __future__ import annotations

import importlib.util
import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ringspun.errors import RingspunError
from ringspun.pictures import Scene
from ringspun.pictures.figures.run import shown
from ringspun.pictures.notebook import pictures_of
from ringspun.pictures.page import page
from ringspun.train.output import LOG, REPORT, write_whole
from ringspun.train.reporting.log import Log
from ringspun.train.reporting.run_page import pictures_name, write_page, write_settings

MIB = 1 << 20
_LINE_EVERY_S = 10.0
_SCALARS = {"loss", "grad_norm", "lr", "tokens_per_s", "stage", "seq_len", "mfu", "waiting", "waiting_most"}
"""Of `StepRecord`, what TensorBoard gets."""


@dataclass(frozen=True)
class StepRecord:
    """One line of `log.jsonl`."""

    step: int
    loss: float  # mean over the targets of the step's sequences, before the update
    grad_norm: float  # before clipping
    lr: float
    seconds: float
    tokens_per_s: float
    documents: int  # in these sequences
    documents_cut: int  # of them, those that go on in the next sequence
    peak_bytes: tuple[int, ...] | None = None  # per rank, above the step's start; of the one step that is profiled
    stage: int = 0  # counted from 0
    seq_len: int = 0  # 0: not told
    mfu: float | None = None  # model FLOP/s over the ranks' peak; None: one of them is not known
    waiting: float | None = None  # of the step's time, what is spent waiting for messages: mean of the ranks
    waiting_most: float | None = None  # and the rank that waits most; None, both: there is one rank alone


class Report:
    """Shows and writes the steps of one run; use as a context manager.

    Args:
        folder: gets `log.jsonl`, `run.json`, `tensorboard/`, `ring.html`, and at the end `report.html` and `loss.png`.
        steps: of the whole run.
        done: steps that a resumed run has already; later lines of an old log are dropped.
        stages: how many there are.
        config: of the run, as JSON has it.
        console: where to print; a bar is drawn only on a terminal, elsewhere one line every 10 seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        done: int = 0,
        stages: int = 1,
        config: Mapping[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        self._folder = folder
        self._steps, self._done = steps, done
        self._stage, self._stages = 0, stages
        self._console = console or Console()
        self._log = Log(folder / LOG, done=done)
        write_settings(folder, steps=steps, config=config or {})
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
        if any("loss" in record for record in self._log.records):
            self._draw()

    def stage(self, number: int, *, seq_len: int, first_step: int, steps: int, text: str) -> None:
        """A stage begins, or goes on in a run that was resumed inside of it; call it before its first step.

        Args:
            number: counted from 0; people are shown 1 more.
            seq_len: tokens of its sequences.
            first_step: number of its first step, which is 1 for the first stage, as in `StepRecord.step`.
            steps: of the stage.
            text: its mesh and rotations, in a line.
        """
        self._stage, self._peak = number, ""  # each stage has a peak of its own
        begins = {"seq_len": seq_len, "first_step": first_step, "steps": steps, "text": text}
        before = [r for r in self._log.records if "begins" in r]
        if not before or (before[-1]["stage"], before[-1]["begins"]) != (number, begins):
            self._add_to_log({"step": max(first_step - 1, self._done), "stage": number, "begins": begins})
        if self._stages > 1:
            name = f"stage {number + 1} of {self._stages}"
            with suppress(OSError):
                self._bar.update(self._task, description=f"{name}, {seq_len:,} tokens")
            self.say(f"{name}: steps {first_step} to {first_step + steps - 1} of {seq_len:,} tokens; {text}")

    def evaluation(self, step: int, stage: int, values: dict[str, float]) -> None:
        """Shows and writes what was measured on held-out sequences after a step.

        Args:
            step: the last that was done; 0 before the first.
            stage: whose rotations the model had, counted from 0.
            values: by name, a length behind an @: ``loss@512``, ``lines@512``.
        """
        record = {"step": step, "stage": stage, "evaluation": values}
        if record not in self._log.records:  # a resumed run may evaluate again what the log has
            self._add_to_log(record)
        for name, value in values.items():
            self._scalar(f"evaluation/{name}", value, step)
        when = f"after step {step}" + (f", as in stage {stage + 1}" if self._stages > 1 else "")
        self.say(f"{when}: {', '.join(f'{name} {value:.4f}' for name, value in values.items())}")

    def sequence(self, scene: Scene) -> None:
        """Writes `ring.html`, a page of pictures of how a sequence is shared out; `ring-stage-2.html` in stage 1."""
        name = pictures_name(self._stage)
        with self._drawing(name):
            write_whole(self._folder / name, page(pictures_of(scene).figures).encode())

    def say(self, text: str) -> None:
        """Prints one line; where nothing can be printed (to a file on a full disk), nothing."""
        with suppress(OSError):
            self._console.print(text, highlight=False, soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        """Shows and writes one step."""
        values = {key: value for key, value in asdict(record).items() if value is not None}
        self._add_to_log(values)
        self._done = record.step
        for key in _SCALARS & values.keys():
            self._scalar(f"train/{key}", values[key], record.step)
        if record.peak_bytes:
            self._peak = f", peak {max(record.peak_bytes) / MIB:,.1f} MiB a rank"
        figures = f"loss {record.loss:.4f}, {record.tokens_per_s:,.0f} tokens/s"
        if record.mfu is not None:
            figures += f", MFU {shown(record.mfu, 'share')}"
        if record.waiting is not None and record.waiting_most is not None:
            figures += f", waits {shown(record.waiting, 'share')} (most {shown(record.waiting_most, 'share')})"
        figures += self._peak
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

    def _scalar(self, name: str, value: float, step: int) -> None:
        if self._board is not None:
            self._on_board(self._board.add_scalar, name, value, step)

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
        with self._drawing(REPORT):
            write_page(self._folder, self._log.records)
        if importlib.util.find_spec("matplotlib") is None:
            self.say("loss.png is not drawn: pip install 'ringspun[plot]'")
            return
        with self._drawing("loss.png"):
            draw_loss(self._log.records, self._folder / "loss.png")

    @contextmanager
    def _drawing(self, name: str) -> Iterator[None]:
        try:
            yield
        except RingspunError as problem:
            self.say(f"{name} is not drawn: {problem}")


def draw_loss(records: list[dict[str, Any]], path: Path) -> None:
    """The loss curve as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = [r for r in records if "loss" in r]
    axes.plot([r["step"] for r in steps], [r["loss"] for r in steps], marker=".")
    for r in records:
        if r.get("begins", {}).get("first_step", 1) > 1:
            axes.axvline(r["begins"]["first_step"] - 0.5, color="grey", linestyle=":")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
    axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    write_whole(path, picture.getvalue())


def _reason(problem: Exception) -> str:
    return str(getattr(problem, "strerror", None) or problem)
