"""Line retrieval: numbered lines with values, and questions for the values of some.

    line 0417: 8392
    line 7730: 0061
    ...
    what 0417: 8392

Numbers and values are uniform; the lines asked for are spread evenly over the depths. As in LongChat's LongEval (Li et
al. 2023), whose lines Ring Attention reports (arXiv 2310.01889, figure 3), but with lines of one length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ringspun.errors import ConfigError
from ringspun.evaluation.exam import (
    Exam,
    Tokenize,
    Tokens,
    bytes_of,
    check_counts,
    joined,
    place_depth,
    question,
    spread,
)

DIGITS = 4
"""Of a line's number, and of its value."""
_CROWDED = 1.5
"""Hard negatives: possible numbers for each line that there is, at least."""


def statement(number: str, value: str) -> str:
    """One line."""
    return f"line {number}: {value}\n"


def prompt(number: str) -> str:
    """What asks for a line's value, which follows."""
    return f"what {number}: "


def lines(
    seq_len: int,
    *,
    questions: int = 50,
    depths: int = 10,
    seed: int | Sequence[int] = 0,
    first: int = 0,
    hard_negatives: bool = False,
    tokenize: Tokenize = bytes_of,
    start: Sequence[int] = (),
) -> Exam:
    """Lines that fill a context but for one question with its answer, and questions about them.

    Args:
        seq_len: tokens of the lines and one question with its answer, at most; as many lines as fit.
        questions: how many; of each depth as many, up to one. depths: equal parts of the document.
        seed: of numbers, values and what is asked for; the same seed, the same document.
        first: how many questions other documents were asked before: the depths go on from there.
        hard_negatives: draw each digit from as few symbols as there are lines for, so that many lines differ from the
            one asked for in a single digit, and many values begin alike.
        tokenize: text -> tokens; bytes by default. Each line is tokenized by itself, and so is each question.
        start: tokens ahead of the first line (a model's BOS, say).
    Raises:
        ConfigError: no room for a line of each depth.
    """
    check_counts(seq_len=seq_len, questions=questions, depths=depths)
    rng = np.random.default_rng(seed)
    fitting = (seq_len - len(start)) // max(len(tokenize(statement("0" * DIGITS, "0" * DIGITS))), 1)
    for digits, symbols in _codes(fitting, hard_negatives):
        count = symbols**digits
        numbers = _draw(rng, rng.permutation(count), digits, symbols)
        values = _draw(rng, rng.integers(symbols**DIGITS, size=count), DIGITS, symbols)
        found = _filled(list(zip(numbers, values, strict=True)), seq_len - len(start), tokenize)
        if len(found) < count:
            break
    if len(found) < depths:
        raise ConfigError(
            f"seq_len must have room for a line of each of {depths} depths; got {seq_len}, which has for {len(found)}. "
            "Give a longer one, or fewer depths."
        )
    asked = spread(rng, len(found), questions, depths, first)
    return Exam(
        joined([start, *(tokenize(statement(*line)) for line in found)]),
        tuple(question(prompt(found[i][0]), found[i][1], place_depth(i, len(found)), tokenize) for i in asked),
    )


def _codes(fitting: int, hard_negatives: bool) -> Iterator[tuple[int, int]]:
    """Digits of the numbers and symbols of each digit: the fewest that are meant, then more while lines run out."""
    few = next((m for m in range(2, 10) if m**DIGITS >= _CROWDED * fitting), 10)
    yield from ((DIGITS, symbols) for symbols in range(few if hard_negatives else 10, 11))
    digits = DIGITS
    while True:
        digits += 1
        yield digits, 10


def _draw(rng: np.random.Generator, codes: Tokens, digits: int, symbols: int) -> list[str]:
    """Codes in so many digits, each of which has some symbols of its own."""
    alphabets = [rng.permutation(10)[:symbols] for _ in range(digits)]
    written = np.stack([alphabet[codes // symbols**i % symbols] for i, alphabet in enumerate(alphabets)], axis=1)
    return ["".join(map(str, row)) for row in written.tolist()]


def _filled(candidates: list[tuple[str, str]], room: int, tokenize: Tokenize) -> list[tuple[str, str]]:
    """As many lines as fit into `room` tokens together with any one question about them."""
    found, used, longest = [], 0, 0
    for number, value in candidates:
        used += len(tokenize(statement(number, value)))
        longest = max(longest, len(tokenize(prompt(number) + value)))
        if used + longest > room:
            break
        found.append((number, value))
    return found
