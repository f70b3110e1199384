"""The loss by position is that of the plain model, and truncated contexts hold what they should."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from stub_models import VOCAB, WithConvolutions, llama
from torch import nn

from ringspun.errors import ConfigError, DataError
from ringspun.evaluation.heatmap import curves
from ringspun.evaluation.judged import Judged
from ringspun.evaluation.perplexity import LossByPosition, perplexity
from ringspun.evaluation.texts import ByteTokenizer, held_out
from ringspun.integrations.transformers import prepare
from ringspun.pictures.page import page
from ringspun.pictures.terminal.evaluation import of_loss
from ringspun.torch import ContextParallel, Loopback

S, BUCKETS = 41, 5
TEXTS = list(np.random.default_rng(1).integers(VOCAB, size=(2, S)))
RING = ContextParallel(Loopback(3, seed=0))


def plain_losses(window: int) -> np.ndarray:
    """Of each token of each text ``[texts, S - 1]``, from the last context that begins at a multiple of half a window,
    holds at least half a window before it, and not more than a window with it; each computed by itself."""
    model, half = llama(), window // 2
    found = np.zeros((len(TEXTS), S - 1))
    with torch.no_grad():
        for row, ids in enumerate(TEXTS):
            for place in range(1, S):
                start = max(0, place // half - 1) * half
                logits = model(torch.from_numpy(ids[start:place])[None]).logits[0, -1]
                found[row, place - 1] = nn.functional.cross_entropy(logits, torch.tensor(ids[place]))
    return found


def test_each_bucket_is_the_mean_of_its_tokens_with_whole_and_with_truncated_contexts():
    curve = perplexity(llama(), RING, TEXTS, buckets=BUCKETS, windows=(10,))
    assert curve.edges == (0, 8, 16, 25, 33, 41) and curve.tokens == (14, 16, 18, 16, 16)
    places = np.arange(1, S)
    for row, window in enumerate((2 * S, 10)):
        each = plain_losses(window)
        for i in range(BUCKETS):
            inside = (curve.edges[i] <= places) & (places < curve.edges[i + 1])
            assert curve.losses[row][i] == pytest.approx(each[:, inside].mean(), rel=1e-10)
        assert curve.means[row] == pytest.approx(each.mean(), rel=1e-10)


def test_with_and_without_chunks_of_logits():
    """A model that was put on the ring before is not looked at: its logits are taken whole."""
    judged, whole = Judged.of(llama()), Judged.of(prepare(llama()))
    assert judged.chunked is not None and whole.chunked is None
    one, other = (perplexity(model, RING, TEXTS, buckets=BUCKETS, windows=(4,)) for model in (judged, whole))
    for row, same in zip(one.losses, other.losses, strict=True):
        assert row == pytest.approx(same, rel=1e-12)


def test_a_model_with_convolutions_begins_anew_in_each_truncated_context():
    model, texts = WithConvolutions(), [ids[:12] for ids in TEXTS]
    whole, halves = perplexity(model, RING, texts, buckets=1, windows=(10,)).losses
    assert whole != halves
    pairs = perplexity(model, RING, texts, buckets=1, windows=(2,))
    each = perplexity(model, RING, [ids[i : i + 2] for ids in texts for i in range(11)], buckets=1)
    assert pairs.means[1] == pytest.approx(each.means[0], rel=1e-10)  # every token after one alone


def test_numbers_for_json():
    curve = LossByPosition((0, 4, 8), (3, 0), (4,), ((2.0, math.nan), (3.0, math.nan)))
    told = curve.as_dict()
    assert told["loss"] == [2.0, None] and told["perplexity"] == pytest.approx(math.exp(2.0))
    assert told["windows"] == [{"tokens": 4, "loss": [3.0, None], "mean_loss": 3.0}]


@pytest.mark.parametrize("value", [math.nan, -math.inf], ids=["nan", "inf"])
def test_a_loss_that_is_not_finite_is_not_left_out_of_the_mean(value):
    """A model that breaks far out must not look better for it; and JSON and pictures know no such numbers."""

    def breaks(ids, plan, position_ids):
        broken = (position_ids[..., None] >= 20) & (torch.arange(VOCAB) > 0)
        return torch.where(broken, value, torch.zeros(*ids.shape, VOCAB))

    curve = perplexity(breaks, RING, TEXTS, buckets=4, windows=(10,))
    assert not math.isfinite(curve.means[0]) and curve.means[1] == pytest.approx(math.log(VOCAB))
    told = json.loads(json.dumps(curve.as_dict(), allow_nan=False))
    assert told["mean_loss"] is told["perplexity"] is told["loss"][3] is None and told["loss"][0] > 0
    figure = curves(curve)
    assert figure.means[0] is None and figure.notes and figure.losses[0][3] is None
    assert "none" in str(of_loss(figure)[5]) and "null" in page([figure])


def test_what_cannot_be_is_refused():
    for sequences, words in (([], "got 0 of"), ([TEXTS[0], TEXTS[1][:5]], r"got 2 of \[5, 41\] tokens")):
        with pytest.raises(ConfigError, match=f"sequences must be some of one length; {words}"):
            perplexity(llama(), RING, sequences)
    for window in (0, 7, 42):
        with pytest.raises(ConfigError, match=f"windows must be even, from 2 to the 41 tokens .*; got {window}"):
            perplexity(llama(), RING, TEXTS, windows=(window,))
    with pytest.raises(ConfigError, match="buckets must be from 1 to less than the 41 tokens of a sequence; got 41"):
        perplexity(llama(), RING, TEXTS, buckets=41)


def test_long_documents_come_first_and_short_ones_are_joined(tmp_path):
    for letter, count in (("a", 30), ("b", 8), ("c", 40), ("d", 19), ("e", 13)):
        (tmp_path / f"{letter}.txt").write_text(letter * count)
    found, whole = held_out(tmp_path, ByteTokenizer(), seq_len=20, sequences=4, seed=0)
    assert whole == 3 and [len(ids) for ids in found] == [20] * 4
    assert sorted(chr(ids[0]) for ids in found[:3]) == ["a", "c", "d"]
    assert [set(ids.tolist()) - {256} for ids in found[:3]] == [{ids[0]} for ids in found[:3]]
    b, e = [98] * 8 + [256], [101] * 13 + [256]
    assert found[3].tolist() in ((b + e)[:20], (e + b)[:20])
    with pytest.raises(
        DataError, match=r"data must hold 5 sequences of 20 tokens; .* has 3 of that length and 23 toke"
    ):
        held_out(tmp_path, ByteTokenizer(), seq_len=20, sequences=5, seed=0)
