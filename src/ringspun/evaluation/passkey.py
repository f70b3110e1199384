"""Pass keys: a number hidden in text that has nothing to do with it, and the question for it.

    The tide had gone out before anyone was awake.
    The pass key of the amber lighthouse is 48213.
    Somebody had left a bicycle against the fence.
    ...
    What is the pass key of the amber lighthouse? The pass key of the amber lighthouse is 48213

The task is that of Mohtashami and Jaggi 2023 (arXiv 2305.16300), its filler and wording our own; with several keys in
one document it is that of needles with names.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringspun.errors import ConfigError
from ringspun.evaluation.exam import (
    Exam,
    Tokenize,
    bytes_of,
    check_counts,
    joined,
    place_depth,
    question,
    spread,
)

DIGITS = 5
FILLER = (
    "The tide had gone out before anyone was awake.",
    "Somebody had left a bicycle against the fence.",
    "By noon the fog had lifted from the lower fields.",
    "The baker counted the loaves and began again.",
    "A train went by without stopping at the station.",
    "Nobody could say which of the two roads was older.",
    "The kettle sang while the letters were being read.",
    "Rain was expected, and for once it came on time.",
    "The dog slept through all of the conversation.",
    "In the orchard the last pears were still hanging.",
    "They spoke about the bridge until it grew dark.",
    "A window was open somewhere on the upper floor.",
    "The clock in the hall was, as always, a little slow.",
    "Two boys were fishing where the river bends.",
    "The market had closed and the square lay empty.",
    "On the hill the mill turned slowly in the wind.",
)
_COLOURS = ("amber", "blue", "copper", "crimson", "golden", "green", "grey", "ivory", "purple", "silver", "violet")
_PLACES = ("archive", "boathouse", "cellar", "chapel", "granary", "greenhouse", "library", "lighthouse", "observatory")


def statement(name: str, key: str) -> str:
    """What is hidden."""
    return f"The pass key of the {name} is {key}.\n"


def prompt(name: str) -> str:
    """What asks for it."""
    return f"What is the pass key of the {name}? The pass key of the {name} is "


def passkey(
    seq_len: int,
    *,
    questions: int = 1,
    depths: int = 10,
    seed: int | Sequence[int] = 0,
    first: int = 0,
    tokenize: Tokenize = bytes_of,
    start: Sequence[int] = (),
) -> Exam:
    """Filler that fills a context but for one question with its answer, keys hidden in it, and a question for each.

    Args:
        seq_len: tokens of the text and one question with its answer, at most.
        questions: keys; 1: the classic task. depths, seed, first, tokenize, start: as for `lines`. A depth is counted
            in sentences.
    Raises:
        ConfigError: no room for a sentence at each depth, or more keys than there are names.
    """
    check_counts(seq_len=seq_len, questions=questions, depths=depths)
    rng = np.random.default_rng(seed)
    names = rng.permutation([f"{colour} {place}" for colour in _COLOURS for place in _PLACES]).tolist()
    if questions > len(names):
        raise ConfigError(f"questions must be at most {len(names)}, the names that keys have; got {questions}.")
    keys = ["".join(map(str, row)) for row in rng.integers(10, size=(questions, DIGITS)).tolist()]
    hidden = [(name, key, tokenize(statement(name, key))) for name, key in zip(names, keys, strict=False)]
    longest = max(len(tokenize(prompt(name) + key)) for name, key, _ in hidden)
    room = seq_len - len(start) - longest - sum(len(ids) for *_, ids in hidden)
    filler = _filler(rng, room, tokenize)
    if room < 0 or len(filler) + 1 < depths:
        raise ConfigError(
            f"seq_len must have room for a sentence at each of {depths} depths; got {seq_len}, which has for "
            f"{len(filler)} beside {questions} key(s). Give a longer one, or fewer depths or keys."
        )
    places = spread(rng, len(filler) + 1, questions, depths, first)
    ahead: list[list[Sequence[int]]] = [[] for _ in range(len(filler) + 1)]
    for place, (*_, ids) in zip(places, hidden, strict=True):
        ahead[place].append(ids)
    text = [part for own, sentence in zip(ahead, [*filler, ()], strict=True) for part in (*own, sentence)]
    asked = [
        question(prompt(name), key, place_depth(place, len(filler) + 1), tokenize)
        for place, (name, key, _) in zip(places, hidden, strict=True)
    ]
    return Exam(joined([start, *text]), tuple(asked))


def _filler(rng: np.random.Generator, room: int, tokenize: Tokenize) -> list[Sequence[int]]:
    """Sentences at random, as many as fit; none twice in a row."""
    known = [tokenize(sentence + "\n") for sentence in FILLER]
    found: list[Sequence[int]] = []
    last = -1
    while True:
        last = int((last + 1 + rng.integers(len(known) - 1)) % len(known)) if found else int(rng.integers(len(known)))
        room -= len(known[last])
        if room < 0:
            return found
        found.append(known[last])
