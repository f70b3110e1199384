"""A document and questions about it, as tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspun.errors import ConfigError

Tokens = NDArray[np.int64]
Tokenize = Callable[[str], Sequence[int]]
"""Text -> tokens, without special ones."""


def bytes_of(text: str) -> Sequence[int]:
    """Bytes as tokens."""
    return list(text.encode())


@dataclass(frozen=True, eq=False)
class Question:
    """One question and its answer.

    Args:
        ids: tokens of both. answer: how many of them, the last ones, are the answer.
        depth: where in the document that is which it asks for: from 0, the beginning, to 1.
    Raises:
        ConfigError: no answer, or nothing ahead of it.
    """

    ids: Tokens
    answer: int
    depth: float

    def __post_init__(self) -> None:
        if not 0 < self.answer < len(self.ids):
            raise ConfigError(
                f"answer must be some of a question's {len(self.ids)} tokens, but not the first; got {self.answer}."
            )


@dataclass(frozen=True, eq=False)
class Exam:
    """A document and questions about it, each to be asked at its end.

    Args:
        document: its tokens ``[n]``.
    """

    document: Tokens
    questions: tuple[Question, ...]

    @property
    def seq_len(self) -> int:
        """Tokens of the document and the longest question with its answer."""
        return len(self.document) + max(len(question.ids) for question in self.questions)


def question(prompt: str, answer: str, depth: float, tokenize: Tokenize) -> Question:
    """A question of text. A token that holds the end of the prompt and the beginning of the answer is of the answer."""
    whole, head = tokenize(prompt + answer), tokenize(prompt)
    shared = next((i for i, (a, b) in enumerate(zip(whole, head, strict=False)) if a != b), min(len(whole), len(head)))
    return Question(np.array(whole, np.int64), len(whole) - shared, depth)


def depth_bin(depth: float, depths: int) -> int:
    """Which of so many equal parts of the document a depth lies in."""
    return min(int(depth * depths), depths - 1)


def place_depth(place: int, places: int) -> float:
    """The depth of one of so many places in a document: the middle of it."""
    return (place + 0.5) / places


def spread(rng: np.random.Generator, places: int, questions: int, depths: int, first: int = 0) -> list[int]:
    """Places to ask for, depth after depth; none twice while its depth has others.

    Args:
        first: how many questions other documents were asked before: the depths go on from there.
    """
    bins = np.array([depth_bin(place_depth(i, places), depths) for i in range(places)])
    orders = [rng.permutation(np.flatnonzero(bins == depth)) for depth in range(depths)]
    asked = [(orders[i % depths], i // depths - first // depths) for i in range(first, first + questions)]
    return [int(order[turn % len(order)]) for order, turn in asked]


def joined(parts: Iterable[Sequence[int]]) -> Tokens:
    """Tokens one behind the other."""
    return np.array([token for part in parts for token in part], np.int64)


def check_counts(**counts: int) -> None:
    """Refuses counts below 1.

    Raises:
        ConfigError: naming it.
    """
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} must be at least 1; got {count}.")
