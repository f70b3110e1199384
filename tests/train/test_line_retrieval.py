"""The recipe of examples/line_retrieval: what its sequences ask, its model on a ring."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import line_runs
import numpy as np
import pytest
import recipe  # line_runs says where it is
import torch
from line_runs import judge
from torch import Tensor

from ringspun import Balanced, Contiguous, DocumentZigzag, Layout, Striped, Zigzag
from ringspun.evaluation.heatmap import heatmap
from ringspun.evaluation.retrieval import Grid
from ringspun.pictures.page import page
from ringspun.torch import ContextParallel, Loopback
from ringspun.train.data.text import PackedSequence
from ringspun.train.model import Shard
from ringspun.train.reporting.log import records
from ringspun.train.rope import Default

LAYOUTS = (Contiguous(), Zigzag(), Striped(), DocumentZigzag(), Balanced())
SLOT = re.compile(rb"(line|what) (\d{4}): (\d{4})\n")
LENGTH = 171  # no multiple of a slot, nor of any number of ranks


def drawn(seq_len: int = 2048, *, stage: int = 0, count: int = 24, seed: int = 3) -> list[PackedSequence]:
    stream = recipe.LinesAndText(seq_len, seed=seed, stage=stage)
    made = [stream.at({})]
    while len(made) < count:
        made.append(stream.at(made[-1].after))
    return made


def test_every_answer_is_that_of_the_earlier_line():
    """Questions about a later line, about another's value, or two lines of one number."""
    asked = 0
    for packed in drawn():
        values: dict[bytes, bytes] = {}
        for kind, number, value in SLOT.findall(packed.ids.astype(np.uint8).tobytes()):
            if kind == b"what":
                asked += 1
                assert values[number] == value
            else:
                assert values.setdefault(number, value) == value
    assert asked > 500


def test_answers_count_one_and_text_a_quarter_and_lines_nothing():
    """Weights that do not lie on the bytes that they are meant for."""
    shares = []
    for packed in drawn():
        text, weights = packed.ids.astype(np.uint8).tobytes(), packed.loss_weights
        assert weights is not None and packed.labels is not None
        expected = np.full(len(weights), recipe.TEXT_WEIGHT)
        for match in SLOT.finditer(text):
            expected[match.start() : match.end()] = 0
            if match[1] == b"what":
                expected[slice(*match.span(3))] = 1
        tail = len(text) - 16  # a last line, cut in two, is no text
        assert np.array_equal(weights[:tail], expected[:tail])
        assert np.array_equal(packed.labels, np.where(weights > 0, packed.ids, -100))
        shares.append(float((weights == recipe.TEXT_WEIGHT).mean()))
    assert min(shares) == 0 and 0.1 < np.mean(shares) < 0.3


def test_hard_negatives_are_as_common_in_a_short_context():
    """Documents in which no line has another beside it whose number differs in one digit."""
    rng = np.random.default_rng(0)
    near = []
    for _ in range(40):
        numbers = recipe.digits(rng, 20, distinct=True)
        assert len({number.tobytes() for number in numbers}) == 20
        differing = (numbers[:, None] != numbers[None]).sum(axis=2)
        near.append(bool((differing == 1).any(axis=1).mean() > 0.5))
    assert 0.4 < np.mean(near) < 0.85


def test_a_sequence_is_its_seed_stage_and_index_alone():
    """A stream that remembers, or that goes on in a stage with another stage's index."""
    first = drawn(count=5)
    again = recipe.LinesAndText(2048, seed=3, stage=0).at(first[3].after)
    assert np.array_equal(again.ids, first[4].ids) and again.after == {"stage": 0, "index": 5}
    later = recipe.LinesAndText(2048, seed=3, stage=1).at(first[3].after)
    assert later.after == {"stage": 1, "index": 1} and not np.array_equal(later.ids, first[0].ids)
    assert not np.array_equal(first[0].ids, drawn(count=1, seed=4)[0].ids)


def model() -> Any:
    torch.manual_seed(0)
    made = recipe.LineModel(Default(theta=100.0, partial_rotary_factor=0.25)).double()
    for layer in made.layers:  # else nothing of attention would be seen
        torch.nn.init.normal_(layer.out.weight, std=0.1)
        torch.nn.init.normal_(layer.down.weight, std=0.1)
    return made


def loss_and_gradients(ring_size: int, layout: Layout) -> tuple[float, dict[str, Tensor]]:
    made, (packed,) = model(), drawn(LENGTH, count=1, seed=6)
    loss = recipe.loss(made, Shard.of(packed, ContextParallel(Loopback(ring_size), layout=layout)))
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in made.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("ring_size", [1, 2, 3, 4])
def test_loss_and_every_gradient_are_those_of_one_process(ring_size, layout):
    """Convolutions or rotations that begin anew on each rank, sharpness of local positions, a share scaled twice."""
    expected, theirs = alone()
    found, gradients = loss_and_gradients(ring_size, layout)
    assert found == pytest.approx(expected, rel=1e-12)
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-10, atol=1e-12, msg=name)


@cache
def alone() -> tuple[float, dict[str, Tensor]]:
    """The same in plain PyTorch: no ring, no partition, the mean written out."""
    made, (packed,) = model(), drawn(LENGTH, count=1, seed=6)
    ids, positions = torch.from_numpy(packed.ids)[None], torch.arange(LENGTH)[None]
    logits = made(ids, Plain(), positions)[0, :-1]
    labels, weights = torch.from_numpy(packed.labels)[1:], torch.from_numpy(packed.loss_weights)[1:].double()
    each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")  # 0 where there is no label
    loss = (each * weights).sum() / weights.sum()
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in made.named_parameters()}


class Plain:
    """A plan's two operations over a whole sequence."""

    @property
    def partition(self) -> Plain:
        return self

    def causal_conv1d(self, x: Tensor, weight: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x.mT, (weight.shape[1] - 1, 0))
        return torch.nn.functional.conv1d(padded, weight[:, None], groups=weight.shape[0]).mT

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_questions_about_lines_among_text_are_where_they_say():
    """A depth that is the line's among lines, not in the document, or text that was trained on."""
    exam = judge.lines_among_text(4096, questions=40, depths=10, seed=[5])
    text = exam.document.astype(np.uint8).tobytes()
    assert 4096 - 64 < exam.seq_len <= 4096 and len(exam.questions) == 40
    for question in exam.questions:
        asked = b"line" + question.ids.astype(np.uint8).tobytes()[4:]
        assert text.index(asked) == round(question.depth * len(text))
    spans = [span for span in SLOT.split(text)[::4] if len(span) > 20]
    trained, held_out = (part.tobytes() for part in recipe.library())
    assert sum(map(len, spans)) > 1900 and all(span in held_out and span not in trained for span in spans)


def grids(first: int, last: list[int]) -> Any:
    def grid(right: list[int]) -> Grid:
        return Grid("lines", (16384,), (tuple(right),), ((25,) * 10,))

    return {judge.FIRST: {judge.LINES: grid([first] * 10)}, judge.LAST: {judge.LINES: grid(last)}}


@pytest.mark.parametrize(
    ("first", "last", "minutes", "missed"),
    [
        (19, [25] * 10, 29.0, []),
        (22, [25] * 10, 29.0, ["first stage"]),
        (12, [25] * 9 + [21], 29.0, ["every depth"]),
        (12, [23] * 10, 31.0, ["exact", "minutes"]),
    ],
)
def test_bars_are_held_or_missed_as_set(first, last, minutes, missed):
    """A bar that cannot be missed."""
    found = judge.Bars(16384).judge(grids(first, last), minutes)
    assert len(found) == 5
    words = [words for words, (_, held) in found.items() if not held]
    assert len(words) == len(missed) and all(part in one for part, one in zip(missed, words, strict=True))


@pytest.mark.processes
def test_the_example_in_small(tmp_path, pools):
    """A config that no longer trains, ends of stages that are gone, a model that cannot be judged; its meshes."""
    one, two = pools(2).run(line_runs.trained_and_judged, tmp_path / "run", timeout_s=60)
    assert one == two and list(one) == [judge.FIRST, judge.TURNED, judge.LAST]
    assert all(grid.counts(480)[1] == 10 for kinds in one.values() for grid in kinds.values())
    found = records(tmp_path / "run" / "log.jsonl")
    steps, evaluations = ([r for r in found if name in r] for name in ("loss", "evaluation"))
    assert [record["seq_len"] for record in steps] == [384, 384, 480, 480]
    assert len(evaluations) == 3 and {"lines@384", "lines@480"} < set(evaluations[0]["evaluation"])
    figures = [heatmap(grid) for grid in one[judge.LAST].values()]
    assert "lines" in page(figures)
