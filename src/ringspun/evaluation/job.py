"""Everything that `ringspun eval` asks of a model, on one process or on the ranks of a ring."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import distributed as dist

from ringspun.core.host import cores
from ringspun.core.text import parse_layout
from ringspun.errors import ConfigError
from ringspun.evaluation.lines import lines
from ringspun.evaluation.passkey import passkey
from ringspun.evaluation.perplexity import LossByPosition, perplexity
from ringspun.evaluation.retrieval import Grid, MakeExam, retrieval
from ringspun.evaluation.subject import Subject, find, start_of, tokenize_by
from ringspun.evaluation.texts import held_out
from ringspun.train.launch import joined, process_group, start_ranks

if TYPE_CHECKING:
    from ringspun.torch import ContextParallel

LINES, PASSKEY, PERPLEXITY = "lines", "passkey", "perplexity"
TASKS = (LINES, PASSKEY, PERPLEXITY)
_TIMEOUT_S = 600


@dataclass(frozen=True)
class EvalJob:
    """What is asked of which model; plain data, for it travels to other processes.

    Args:
        place: a run's folder, a checkpoint's, or a Hugging Face model's. recipe: the file that builds the model.
        tasks: some of `TASKS`. seq_lens: lengths (tokens). ranks: of the ring. loopback: play them in one process.
        depths: equal parts of a document. questions: at each length, at least. per_document: of them, about one
            document, at most: lines asked for, keys hidden. seed: of documents. hard_negatives: see `lines`.
        data: held-out documents, for perplexity. sequences: of each length. buckets: of positions. windows: truncated
            contexts (tokens).
    Raises:
        ConfigError: what does not go together.
    """

    place: Path
    recipe: Path | None = None
    tasks: tuple[str, ...] = (LINES,)
    seq_lens: tuple[int, ...] = (512,)
    ranks: int = 1
    loopback: bool = False
    layout: str = "zigzag"
    dtype: Literal["float32", "bfloat16"] = "float32"
    depths: int = 10
    questions: int = 50
    per_document: tuple[int, int] = (50, 1)
    seed: int = 0
    hard_negatives: bool = False
    data: Path | None = None
    sequences: int = 4
    buckets: int = 8
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for count in ("ranks", "depths", "questions", "sequences", "buckets"):
            if getattr(self, count) < 1:
                raise ConfigError(f"{count} must be at least 1; got {getattr(self, count)}.")
        if (PERPLEXITY in self.tasks) != (self.data is not None):
            raise ConfigError("data must be given for perplexity, and for it alone. Give held-out documents.")
        if self.windows and PERPLEXITY not in self.tasks:
            raise ConfigError(f"window must be given for perplexity alone; got {self.windows[0]} for {self.tasks[0]}.")
        most = max(self.seq_lens)
        for window in self.windows:
            if window % 2 or window > most:
                raise ConfigError(f"window must be even, and not longer than {most} tokens; got {window}.")
        if self.hard_negatives and LINES not in self.tasks:
            raise ConfigError(f"hard-negatives must be given for lines alone; got {self.tasks[0]}.")
        short = [n for n in self.seq_lens if n < max(self.ranks, 2)]
        if short:
            raise ConfigError(f"seq-len must leave every rank a token; got {short[0]} and {self.ranks} ranks.")

    def exams(self, task: str, tokenizer: Any) -> tuple[MakeExam, int, int]:
        """What makes the documents of a task, the questions about each, and how many documents."""
        documents = -(-self.questions // self.per_document[task == PASSKEY])
        more: dict[str, Any] = {"tokenize": tokenize_by(tokenizer), "start": start_of(tokenizer)}
        if task == LINES:
            more["hard_negatives"] = self.hard_negatives
        return partial(lines if task == LINES else passkey, **more), -(-self.questions // documents), documents

    def check(self) -> None:
        """Finds what is wrong before any rank starts and any weight is loaded.

        Raises:
            ConfigError, CheckpointError, DataError: what that is.
        """
        tokenizer = find(self.place, warn=_silent).tokenizer()
        for task in self.tasks:
            if task == PERPLEXITY:
                _texts(self, tokenizer, max(self.seq_lens))
                continue
            make, about_one, _ = self.exams(task, tokenizer)
            make(min(self.seq_lens), questions=about_one, depths=self.depths, seed=[self.seed])


@dataclass(frozen=True)
class Results:
    """What came out.

    Args:
        words: what was asked. tokens: what its tokens are. grids: of lines and pass keys. losses: by length.
        whole: of the sequences of each of these, how many were the beginning of one document.
    """

    words: str
    tokens: str
    grids: tuple[Grid, ...] = ()
    losses: tuple[LossByPosition, ...] = ()
    whole: tuple[int, ...] = ()


def run(job: EvalJob) -> Results:
    """Asks everything: on ranks that are started here, on those that `torchrun` started, or in this process.

    Progress is told on the standard error.

    Raises:
        RingspunError: what is wrong. LaunchError: a rank failed; the message is its own.
    """
    job.check()
    if joined():
        world = int(os.environ["WORLD_SIZE"])
        if world != job.ranks or job.loopback:
            raise ConfigError(f"ranks must be the {world} processes that torchrun started; got {job.ranks}.")
        return work(job)
    if job.ranks == 1 or job.loopback:
        return work(job)
    with tempfile.TemporaryDirectory() as logs:
        return start_ranks(job.ranks, work, job, logs=Path(logs))[0]


def work(job: EvalJob) -> Results:
    """One rank of it, in a process group where the environment describes one."""
    with process_group():
        torch.set_num_threads(max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        context = _context(job)
        return ask(job, context, say=_told if context.rank == 0 else _silent)


def ask(job: EvalJob, context: ContextParallel, *, say: Callable[[str], None]) -> Results:
    """Everything, on a ring that is there. Collective.

    Args:
        say: told of each result as it comes.
    """
    subject = Subject.load(find(job.place, warn=say), job.recipe)
    grids, losses, whole = [], [], []
    with _autocast(job):
        for task in [task for task in job.tasks if task != PERPLEXITY]:
            found = list(_grids(job, task, subject, context, say))
            grids.append(sum(found[1:], start=found[0]))
        for seq_len in job.seq_lens if PERPLEXITY in job.tasks else ():
            sequences, count = _texts(job, subject.tokenizer, seq_len)
            windows = tuple(window for window in job.windows if window <= seq_len)
            loss = perplexity(
                subject.judged(seq_len), context, sequences, buckets=min(job.buckets, seq_len - 1), windows=windows
            )
            say(f"{PERPLEXITY} at {seq_len:,} tokens: {loss.means[0]:.4f} nats")
            losses.append(loss)
            whole.append(count)
    return Results(subject.words, subject.tokens, tuple(grids), tuple(losses), tuple(whole))


def _grids(
    job: EvalJob, task: str, subject: Subject, context: ContextParallel, say: Callable[[str], None]
) -> Iterator[Grid]:
    make, about_one, documents = job.exams(task, subject.tokenizer)
    for seq_len in job.seq_lens:
        grid = retrieval(
            subject.judged(seq_len), context, make, seq_lens=(seq_len,), depths=job.depths, questions=about_one,
            documents=documents, seed=job.seed, task=task,
        )  # fmt: skip
        right, asked = grid.counts(seq_len)
        say(f"{task} at {seq_len:,} tokens: {right} of {asked} exact")
        yield grid


def _texts(job: EvalJob, tokenizer: Any, seq_len: int) -> tuple[Sequence[Any], int]:
    assert job.data is not None  # checked with the tasks
    return held_out(job.data, tokenizer, seq_len=seq_len, sequences=job.sequences, seed=job.seed)


def _context(job: EvalJob) -> ContextParallel:
    from ringspun.torch import ContextParallel, Loopback

    group: Any = Loopback(job.ranks, seed=0) if job.loopback else dist.group.WORLD if joined() else None
    return ContextParallel(group, layout=parse_layout(job.layout), timeout_s=_TIMEOUT_S)


def _autocast(job: EvalJob) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if job.dtype == "bfloat16" else nullcontext()


def _told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(_: str) -> None:
    pass
