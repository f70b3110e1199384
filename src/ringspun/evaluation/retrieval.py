"""Exact answers to questions about long documents, over lengths and depths.

    grid = retrieval(model, context, lines, seq_lens=(2048, 16384), questions=50, documents=5)
    grid.accuracy(16384), grid.interval(16384), grid.rows()

The questions about a document are asked in one pass, as branches that go on from its end without seeing each other
(`branches.py`): 50 questions cost little more than one. A model that does not allow it is asked them one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ringspun.core.mask import Causal, Mask
from ringspun.errors import ConfigError
from ringspun.evaluation.branches import Branches
from ringspun.evaluation.exam import Exam, Question, Tokens, check_counts, depth_bin
from ringspun.evaluation.judged import Judged, Logits, asking

if TYPE_CHECKING:
    from ringspun.torch import ContextParallel

Z_95 = 1.959963984540054
"""Standard deviations within which 95 % of a normal distribution lie."""


MakeExam = Callable[..., Exam]
"""What `lines` and `passkey` are: of a length, and by keyword `questions`, `depths` and `seed` (numbers). Where the
questions are no multiple of the depths, also `first`: those about documents before, from which the depths go on."""


@dataclass(frozen=True)
class Grid:
    """How many answers were exact, by length and depth.

    Args:
        task: its name. seq_lens: the rows. right, asked: ``[lengths][depths]``, from the beginning of the document on.
    """

    task: str
    seq_lens: tuple[int, ...]
    right: tuple[tuple[int, ...], ...]
    asked: tuple[tuple[int, ...], ...]

    def counts(self, seq_len: int) -> tuple[int, int]:
        """Exact answers and questions at one length."""
        row = self.seq_lens.index(seq_len)
        return sum(self.right[row]), sum(self.asked[row])

    def accuracy(self, seq_len: int) -> float:
        """Share of exact answers at one length."""
        right, asked = self.counts(seq_len)
        return right / asked

    def interval(self, seq_len: int) -> tuple[float, float]:
        """Wilson's 95 % interval of it."""
        return wilson(*self.counts(seq_len))

    def by_depth(self, seq_len: int) -> tuple[float, ...]:
        """Share of exact answers of each depth at one length; NaN where nothing was asked."""
        row = self.seq_lens.index(seq_len)
        return tuple(r / n if n else math.nan for r, n in zip(self.right[row], self.asked[row], strict=True))

    def __add__(self, other: Grid) -> Grid:
        """The same task at more lengths."""
        return Grid(self.task, self.seq_lens + other.seq_lens, self.right + other.right, self.asked + other.asked)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "task": self.task,
            "lengths": [
                {
                    "seq_len": seq_len,
                    "accuracy": self.accuracy(seq_len),
                    "interval_95": list(self.interval(seq_len)),
                    "questions": self.counts(seq_len)[1],
                    "right_by_depth": list(self.right[row]),
                    "asked_by_depth": list(self.asked[row]),
                }
                for row, seq_len in enumerate(self.seq_lens)
            ],
        }


def wilson(right: int, asked: int) -> tuple[float, float]:
    """The 95 % interval of a share. Source: Wilson 1927, JASA 22(158)."""
    if asked == 0:
        return 0.0, 1.0
    share, z2 = right / asked, Z_95**2
    middle = (share + z2 / (2 * asked)) / (1 + z2 / asked)
    half = Z_95 / (1 + z2 / asked) * math.sqrt(share * (1 - share) / asked + z2 / (4 * asked**2))
    return max(0.0, middle - half) if right else 0.0, min(1.0, middle + half) if right < asked else 1.0


def retrieval(
    model: nn.Module | Logits | Judged,
    context: ContextParallel,
    make: MakeExam,
    *,
    seq_lens: Sequence[int],
    depths: int = 10,
    questions: int = 50,
    documents: int = 1,
    seed: int = 0,
    reach: int | None = None,
    task: str = "",
) -> Grid:
    """Asks a model questions about documents of several lengths. Collective; the same result on every rank.

    Args:
        model: a Transformers model, or a function of (ids, plan, position_ids); see `ringspun.evaluation.judged`.
        context: the ring that holds each document. make: `lines`, `passkey` (by `functools.partial` with a tokenizer).
        seq_lens: tokens of a document and a question, at most. depths: equal parts of a document that are told apart.
        questions: about each document. documents: of each length.
        seed: the documents' own; one of another length is another one.
        reach: see `Judged`; of a function, None asks its questions one by one.
        task: its name; default that of `make`.
    Raises:
        ConfigError: counts below 1, or a length that has no room.
    """
    check_counts(depths=depths, questions=questions, documents=documents)
    if not seq_lens:
        raise ConfigError("seq_lens must hold at least one length; got none.")
    judged = Judged.of(model, reach=reach)
    right, asked = np.zeros((2, len(seq_lens), depths), np.int64)
    for row, seq_len in enumerate(seq_lens):
        for number in range(documents):
            asked_before = number * questions
            exam = make(seq_len, questions=questions, depths=depths, seed=[seed, seq_len, number], first=asked_before)
            exact = answers(judged, context, exam)
            bins = [depth_bin(question.depth, depths) for question in exam.questions]
            np.add.at(asked[row], bins, 1)
            np.add.at(right[row], bins, exact)
    name = task or getattr(getattr(make, "func", make), "__name__", "retrieval")
    return Grid(name, tuple(seq_lens), *(tuple(map(tuple, table.tolist())) for table in (right, asked)))


def answers(
    model: nn.Module | Logits | Judged, context: ContextParallel, exam: Exam, *, reach: int | None = None
) -> NDArray[np.bool_]:
    """Which of an exam's questions are answered exactly: every token of the answer has the largest logit where those
    before it are given. Collective; the same result on every rank.

    Args:
        model, context, reach: as for `retrieval`.
    """
    judged = Judged.of(model, reach=reach)
    wrong = np.zeros(len(exam.questions), np.int64)
    with asking(judged):
        for passed in _passes(exam, judged.reach):
            passed.count_wrong(judged, context, wrong)
    total = context.driver.all_reduce(torch.from_numpy(wrong))
    return np.asarray(total.numpy() == 0)


def _passes(exam: Exam, reach: int | None) -> Iterator[_Pass]:
    """All questions at once where none sees another, else each by itself."""
    numbered = list(enumerate(exam.questions))
    if reach is not None and reach <= len(exam.document):
        yield _Pass.of(exam.document, numbered, reach)
        return
    for one in numbered:
        yield _Pass.of(exam.document, [one], 0)


@dataclass(frozen=True, eq=False)
class _Pass:
    """One pass of a model.

    Args:
        ids, positions: of each token ``[S]``. mask: what each sees.
        number: of the question whose answer goes on behind a token ``[S]``; -1: of none.
    """

    ids: Tokens
    positions: Tokens
    mask: Mask
    number: Tokens

    @classmethod
    def of(cls, document: Tokens, questions: Sequence[tuple[int, Question]], lead: int) -> _Pass:
        """A document and some questions, each behind the document's last tokens once more if there is a `lead`."""
        again = document[len(document) - lead :]
        ids, number = [document], [np.full(len(document), -1)]
        for i, question in questions:
            ids += [again, question.ids]
            behind = np.full(lead + len(question.ids), -1)
            behind[-1 - question.answer : -1] = i
            number.append(behind)
        mask = Branches(len(document), tuple(len(question.ids) for _, question in questions), lead)
        alone = len(questions) == 1 and lead == 0
        return cls(np.concatenate(ids), mask.positions(), Causal() if alone else mask, np.concatenate(number))

    def count_wrong(self, judged: Judged, context: ContextParallel, wrong: Tokens) -> None:
        """Adds to each question's count the answer's tokens that this process's rows get wrong."""
        part = context.partition(seq_len=len(self.ids))
        plan = part.plan(self.mask)
        ids, positions, number, target = (
            part.shard(torch.from_numpy(np.ascontiguousarray(x))[None], dim=1)
            for x in (self.ids, self.positions, self.number, np.append(self.ids[1:], 0))
        )
        rows = (number[0] >= 0).nonzero()[:, 0]
        logits = judged.logits(ids, plan, positions, rows)
        missed = (logits[0].argmax(dim=-1).cpu() != target[0, rows]).numpy()
        np.add.at(wrong, number[0, rows].numpy(), missed)
