"""Documents and questions: what is asked for stands in the document, at the depth that is said, within the length."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspun.errors import ConfigError
from ringspun.evaluation.exam import Question, bytes_of, depth_bin, question
from ringspun.evaluation.lines import lines
from ringspun.evaluation.passkey import FILLER, passkey


def text(ids) -> str:
    return bytes(np.asarray(ids, np.uint8)).decode()


def words(text: str) -> list[int]:
    """A tokenizer of another grain: words with what separates them, in two tokens if they are long."""
    parts = re.findall(r"\S+\s*|\s+", text)
    return [hash_of(piece) for part in parts for piece in ([part[:4], part[4:]] if len(part) > 4 else [part])]


def hash_of(piece: str) -> int:
    return int.from_bytes(piece.encode(), "little") % (1 << 40)


@settings(deadline=None, max_examples=20)
@given(
    seq_len=st.integers(200, 1200), questions=st.integers(1, 23), depths=st.integers(1, 10), seed=st.integers(0, 99),
    hard=st.booleans(),
)  # fmt: skip
def test_lines_hold_what_is_asked_for_at_its_depth(seq_len, questions, depths, seed, hard):
    exam = lines(seq_len, questions=questions, depths=depths, seed=seed, hard_negatives=hard)
    found = dict(re.findall(r"line (\d{4}): (\d{4})\n", text(exam.document)))
    assert len(exam.document) == 16 * len(found)  # no number twice, and nothing else
    assert seq_len - 16 < exam.seq_len <= seq_len
    order = list(found)
    for i, one in enumerate(exam.questions):
        number, value = re.fullmatch(r"what (\d{4}): (\d{4})", text(one.ids)).groups()
        assert found[number] == value and one.answer == 4
        assert one.depth == (order.index(number) + 0.5) / len(order)
        assert depth_bin(one.depth, depths) == i % depths
    per_depth = min(
        sum(depth_bin((i + 0.5) / len(order), depths) == d for i in range(len(order))) for d in range(depths)
    )
    asked = [text(one.ids) for one in exam.questions[: depths * per_depth]]
    assert len(set(asked)) == len(asked)  # none twice while there are others


@pytest.mark.parametrize("make", [lines, passkey])
def test_the_seed_says_it_all(make):
    one, same, other = (make(700, questions=3, depths=3, seed=seed) for seed in ([1, 700, 0], [1, 700, 0], [1, 700, 1]))
    assert text(one.document) == text(same.document) != text(other.document)
    assert [text(q.ids) for q in one.questions] == [text(q.ids) for q in same.questions]


def test_depths_go_on_from_one_document_to_the_next():
    for make in (lines, passkey):
        made = partial(make, 900, questions=3, depths=7)
        bins = [depth_bin(q.depth, 7) for i in range(5) for q in made(first=3 * i, seed=i).questions]
        assert bins == [i % 7 for i in range(15)]


def test_hard_negatives_differ_in_a_single_digit():
    def near(exam) -> float:
        numbers = np.array([[int(c) for c in n] for n in re.findall(r"line (\d{4})", text(exam.document))])
        differing = (numbers[:, None] != numbers[None]).sum(axis=2)
        return float((differing == 1).any(axis=1).mean())

    assert near(lines(512, seed=5, hard_negatives=True)) > 0.9
    assert near(lines(512, seed=5)) < 0.3


def test_more_lines_than_numbers_of_four_digits_get_longer_ones():
    exam = lines(165_000, questions=1, depths=1)
    numbers = re.findall(r"line (\d+):", text(exam.document))
    assert len(numbers) == len(set(numbers)) > 9_000 and {len(n) for n in numbers} == {5}


@settings(deadline=None, max_examples=15)
@given(
    seq_len=st.integers(900, 2000), questions=st.integers(1, 5), depths=st.integers(1, 6), seed=st.integers(0, 99),
)  # fmt: skip
def test_keys_are_hidden_once_at_their_depth_in_filler(seq_len, questions, depths, seed):
    exam = passkey(seq_len, questions=questions, depths=depths, seed=seed)
    sentences = text(exam.document).splitlines()
    longest = max(map(len, FILLER)) + 1
    assert seq_len - 2 * longest < exam.seq_len <= seq_len
    filler = [sentence for sentence in sentences if sentence in FILLER]
    assert all(a != b for a, b in pairwise(filler))
    assert len(sentences) == len(filler) + questions
    for i, one in enumerate(exam.questions):
        name, key = re.search(r"pass key of the (\w+ \w+) is (\d{5})$", text(one.ids)).groups()
        (place,) = [j for j, sentence in enumerate(sentences) if sentence == f"The pass key of the {name} is {key}."]
        ahead = sum(sentence in FILLER for sentence in sentences[:place])
        assert one.depth == (ahead + 0.5) / (len(filler) + 1)
        assert depth_bin(one.depth, depths) == i % depths and one.answer == 5


@pytest.mark.parametrize("make", [lines, passkey])
def test_any_tokenizer_and_a_beginning(make):
    exam = make(150, questions=2, depths=2, tokenize=words, start=(7, 8))
    assert exam.document[:2].tolist() == [7, 8] and 100 < exam.seq_len <= 150
    for one in exam.questions:
        tail = one.ids[-one.answer :].tolist()
        assert 0 < len(tail) < len(one.ids)
        # the value's own tokens, which also stand in the document
        assert any(exam.document[i : i + 1].tolist() == tail[:1] for i in range(len(exam.document))) or make is passkey


def test_a_token_over_the_edge_belongs_to_the_answer():
    merged = {"what 1: ": [1, 2], "what 1: 83": [1, 99, 3]}
    one = question("what 1: ", "83", 0.5, merged.__getitem__)
    assert (one.ids.tolist(), one.answer) == ([1, 99, 3], 2)
    split = question("what 1: ", "83", 0.5, bytes_of)
    assert (text(split.ids), split.answer) == ("what 1: 83", 2)


def test_what_cannot_be_is_refused():
    with pytest.raises(
        ConfigError, match="seq_len must have room for a line of each of 10 depths; got 64, which has fo"
    ):
        lines(64)
    with pytest.raises(ConfigError, match="seq_len must have room for a sentence at each of 10 depths; got 300"):
        passkey(300)
    assert passkey(150, depths=1).seq_len <= 150
    with pytest.raises(ConfigError, match="seq_len must have room for a sentence at each of 1 depths; got 100, which"):
        passkey(100, depths=1)  # the key and the question alone are longer
    with pytest.raises(ConfigError, match="questions must be at most 99, the names that keys have; got 100"):
        passkey(10_000, questions=100)
    with pytest.raises(ConfigError, match="depths must be at least 1; got 0"):
        lines(512, depths=0)
    for answer in (0, 2):
        with pytest.raises(ConfigError, match="answer must be some of a question's 2 tokens, but not the first; got"):
            Question(np.array([1, 2]), answer, 0.5)
