"""Exact answers: models whose score is known get it, on every ring, asked together or one by one."""

from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_models import SIZES, WithConvolutions, always, llama, looks_up, reader
from transformers import MistralConfig, MistralForCausalLM

from ringspun import Striped, Zigzag
from ringspun.errors import ConfigError
from ringspun.evaluation.exam import Exam, Question, bytes_of
from ringspun.evaluation.judged import Judged, asking
from ringspun.evaluation.lines import lines
from ringspun.evaluation.passkey import passkey
from ringspun.evaluation.retrieval import Grid, answers, retrieval, wilson
from ringspun.torch import ContextParallel, Loopback

S, DEPTHS = 200, 5
ALONE = ContextParallel(Loopback(1, seed=0))


def ring(size: int, layout=None) -> ContextParallel:
    return ContextParallel(Loopback(size, seed=0), layout=layout or Zigzag())


def of(model, context=ALONE, *, make=lines, reach=0, **how) -> Grid:
    return retrieval(model, context, make, seq_lens=(S,), depths=DEPTHS, questions=10, reach=reach, **how)


@pytest.mark.parametrize("context", [ALONE, ring(2), ring(3, Striped()), ring(4)], ids=["1", "2", "3-striped", "4"])
def test_a_model_that_looks_up_is_always_right(context):
    grid = of(reader(looks_up()), context, documents=2)
    assert (grid.right, grid.asked) == ((((4,) * 5),), (((4,) * 5),))
    assert grid.accuracy(S) == 1.0 and grid.task == "lines"


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("reach", [0, 7, None], ids=["together", "with-a-lead", "one-by-one"])
def test_a_model_that_sees_the_last_tokens_knows_just_the_lines_in_them(size, reach):
    window = 100
    exam = lines(S, questions=10, depths=DEPTHS, seed=[0, S, 0])
    exact = answers(reader(looks_up(window)), ring(size), exam, reach=reach)
    document = bytes(exam.document.astype(np.uint8)).decode()
    for found, one in zip(exact, exam.questions, strict=True):
        number = bytes(one.ids[5:9].astype(np.uint8)).decode()
        behind = len(document) - document.index(f"line {number}")
        assert found == (behind + len(one.ids) - 1 <= window)  # still all there when the last digit is to come
    assert 0 < exact.sum() < 10


def test_a_model_that_says_one_digit_is_right_as_often_as_it_stands_there():
    values = ["7777", "7772", "2777", "7777", "1234"]
    document = np.array(bytes_of("".join(f"line {i:04}: {value}\n" for i, value in enumerate(values))))
    asked = [Question(np.array(bytes_of(f"what {i:04}: {v}")), 4, (i + 0.5) / 5) for i, v in enumerate(values)]
    exact = answers(reader(always("7")), ring(2), Exam(document, tuple(asked)), reach=0)
    assert exact.tolist() == [True, False, False, True, False]


def test_pass_keys_in_any_number():
    model = reader(key_in)
    for questions in (1, 3):
        grid = retrieval(model, ring(2), passkey, seq_lens=(600,), depths=3, questions=questions, documents=2, reach=0)
        assert sum(map(sum, grid.right)) == 2 * questions == sum(map(sum, grid.asked))


def key_in(text: str) -> str:
    """The next digit of the key that is asked for at the end."""
    asked = re.search(r"The pass key of the (\w+ \w+) is (\d*)$", text)
    hidden = asked and re.search(rf"The pass key of the {asked[1]} is (\d{{5}})\.", text)
    return hidden[1][len(asked[2])] if asked and hidden and len(asked[2]) < 5 else ""


def logits_of(judged: Judged, context: ContextParallel, exam: Exam) -> torch.Tensor:
    """Everything that a model is asked for, in the order of questions; of a loopback of one."""
    found = []

    def some(ids, plan, position_ids, rows):
        found.append(judged.logits(ids, plan, position_ids, rows)[0])
        return found[-1][None]

    with torch.no_grad():
        answers(Judged(some, judged.reach), context, exam)
    return torch.cat(found)


def test_convolutions_need_a_lead_of_their_reach_and_no_more():
    model, exam = WithConvolutions(), lines(S, questions=6, depths=3)
    one_by_one = logits_of(Judged.of(model.forward), ALONE, exam)
    assert Judged.of(model).reach == model.reach == 6
    together = logits_of(Judged.of(model), ALONE, exam)
    torch.testing.assert_close(together, one_by_one, rtol=0, atol=1e-11)
    short = logits_of(Judged.of(model.forward, reach=5), ALONE, exam)
    assert (short - one_by_one).abs().max() > 1e-3


def test_a_document_shorter_than_the_reach_is_asked_about_one_by_one():
    model = WithConvolutions(kernel=200)
    exam = lines(S, questions=2, depths=2)
    torch.testing.assert_close(
        logits_of(Judged.of(model), ALONE, exam), logits_of(Judged.of(model.forward), ALONE, exam), rtol=0, atol=0
    )


def test_a_transformers_model_is_asked_together_and_answers_as_in_one_process():
    plain, exam = llama(), lines(S, questions=5, depths=5)
    with torch.no_grad():
        alone = [
            plain(torch.from_numpy(np.append(exam.document, one.ids))[None]).logits[0, -1 - one.answer : -1]
            for one in exam.questions
        ]
    judged = Judged.of(llama())
    assert judged.reach == 0
    torch.testing.assert_close(logits_of(judged, ALONE, exam), torch.cat(alone), rtol=0, atol=1e-11)


def test_sliding_windows_are_asked_one_by_one_and_right():
    def mistral() -> torch.nn.Module:
        torch.manual_seed(4)
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=20)).double()

    plain, exam, judged = mistral(), lines(S, questions=2, depths=2), Judged.of(mistral())
    assert judged.reach is None
    with torch.no_grad():
        alone = [
            plain(torch.from_numpy(np.append(exam.document, q.ids))[None]).logits[0, -5:-1] for q in exam.questions
        ]
    torch.testing.assert_close(logits_of(judged, ALONE, exam), torch.cat(alone), rtol=0, atol=1e-11)


def test_a_model_is_left_in_the_mode_that_it_was_in():
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout().eval())
    with asking(Judged.of(model)):
        assert not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == [True, True, False] and torch.is_grad_enabled()


def test_a_module_in_training_is_asked_without_its_dropout_however_it_is_given():
    class Drops(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Dropout(0.9)

        def forward(self, ids, plan, position_ids):
            return self.drop(torch.nn.functional.one_hot(ids, 128).double())

    model = Drops()
    exam = Exam(np.arange(9), tuple(Question(np.full(9, 5), 8, 0.5) for _ in range(4)))  # fives follow fives
    for asked in (model, Judged.of(model)):
        assert answers(asked, ALONE, exam, reach=0).all() and model.training


def test_every_depth_is_asked_about_as_often_over_documents():
    make = partial(lines, hard_negatives=True)
    grid = retrieval(reader(always("1")), ALONE, make, seq_lens=(S, 250), depths=5, questions=3, documents=5, reach=0)
    assert grid.asked == ((3,) * 5,) * 2 and grid.task == "lines"
    assert grid.seq_lens == (S, 250) and grid.as_dict()["lengths"][1]["questions"] == 15


def test_grids_add_up_and_tell():
    grid = Grid("lines", (8,), ((3, 0),), ((4, 0),)) + Grid("lines", (16,), ((1, 2),), ((4, 4),))
    assert (grid.accuracy(8), grid.accuracy(16), grid.counts(16)) == (0.75, 0.375, (3, 8))
    assert grid.by_depth(16) == (0.25, 0.5) and math.isnan(grid.by_depth(8)[1])


@given(asked=st.integers(1, 300), share=st.floats(0, 1))
@settings(max_examples=40)
def test_wilson_solves_its_equation(asked, share):
    """The ends are the shares p from which what was seen lies 1.96 standard deviations away."""
    right = round(share * asked)
    for p in wilson(right, asked):
        assert abs(right / asked - p) == pytest.approx(1.959963984540054 * math.sqrt(p * (1 - p) / asked), abs=1e-7)


def test_wilson_of_known_cases():
    assert wilson(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert wilson(0, 0) == (0.0, 1.0)
    assert {(wilson(0, n)[0], wilson(n, n)[1]) for n in range(1, 300)} == {(0.0, 1.0)}  # no rounding
    assert wilson(249, 250) == pytest.approx((0.977694, 0.999293), abs=1e-6)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"reach must be a number of tokens, at least 0, or None; got -1"):
        Judged.of(reader(always("1")), reach=-1)
    with pytest.raises(ConfigError, match="seq_lens must hold at least one length; got none"):
        retrieval(reader(always("1")), ALONE, lines, seq_lens=())
    with pytest.raises(ConfigError, match="documents must be at least 1; got 0"):
        of(reader(always("1")), documents=0)
