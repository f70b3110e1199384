"""What recipe.toml trains, and on what: a small model with short convolutions, and lines with questions among text.

    line 0417: 8392
    import os
    what 0417: 8392

A question asks for any earlier line. The loss is that of answers, and of text as of any language model; lines
themselves cannot be known. A sequence is a pure function of (seed, stage, index) and of Python's own standard library.
"""

from __future__ import annotations

import math
import sysconfig
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ringspun import Documents
from ringspun.evaluation.judged import Judged
from ringspun.evaluation.lines import lines
from ringspun.evaluation.retrieval import retrieval
from ringspun.torch import ContextParallel, Plan
from ringspun.train.data.text import PackedSequence, Position
from ringspun.train.losses.chunked_loss import Head, linear_token_loss
from ringspun.train.model import Shard
from ringspun.train.rope import Default, Rope
from ringspun.train.rope.rotary import cos_sin, rotate

if TYPE_CHECKING:
    from ringspun.train.config import TrainConfig
    from ringspun.train.stages import Leg

VOCAB_SIZE = 128  # ASCII
WIDTH, LAYERS, HEADS = 128, 2, 2
TAPS = 10  # of a convolution: from an answer's digits back to the whole number asked for
SHORT = 512  # the length at which scores are as they are; longer contexts sharpen them

SLOT = 16  # bytes of a line, and of a question with its answer
DIGITS = 4
ANSWER = slice(11, 11 + DIGITS)  # within a slot
QUESTIONS = ((0.1, 0.95), (0.05, 0.6), (0.05, 0.5))  # least and largest share of slots that ask, by stage
CROWDED = 0.6  # share of sequences whose numbers are hard to tell apart; as many have such values
TEXT = 0.2  # share of all bytes that are text
TEXT_WEIGHT = 0.25  # what a byte of text counts in the loss; one of an answer counts 1
HELD_OUT = ("textwrap.py", "fnmatch.py", "shelve.py", "bisect.py", "sched.py", "queue.py", "string.py", "cmd.py")

Bytes = NDArray[np.uint8]


# The model -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A short convolution, attention, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Parameter(torch.randn(WIDTH, TAPS) * TAPS**-0.5)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, plan: Plan, rotation: tuple[Tensor, Tensor], sharpness: Tensor) -> Tensor:
        """
        Args:
            x: this rank's rows ``[B, T, C]``. rotation: cosine, sine. sharpness: of each query ``[B, 1, T, 1]``.
        """
        u = _norm(x)
        u = u + plan.partition.causal_conv1d(u, self.conv)
        q, k, v = self.qkv(u).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = (rotate(_norm(t), *rotation) for t in (q, k))
        attended = plan.attention((q * (self.gain * sharpness)).to(k.dtype), k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(_norm(x))).square())


class LineModel(nn.Module):
    """A language model over ASCII, of sequences that a ring shares.

    Args:
        rope: its rotations; another length may want others.
    """

    reach = LAYERS * (TAPS - 1)  # tokens that its convolutions look back, for `ringspun eval`

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)

    def hidden(self, ids: Tensor, plan: Plan, position_ids: Tensor) -> Tensor:
        """What the head reads, ``[B, T, C]``."""
        x = _norm(self.embedding(ids))
        rotation = cos_sin(position_ids, self.rope, head_size=WIDTH // HEADS, dtype=x.dtype)
        sharpness = (torch.log(position_ids + 2.0) / math.log(SHORT)).to(x.dtype)[:, None, :, None]
        for layer in self.layers:
            x = layer(x, plan, rotation, sharpness)
        return _norm(x)

    def forward(self, ids: Tensor, plan: Plan, position_ids: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` of this rank's rows, as `ringspun.evaluation` asks for them."""
        return self.head(self.hidden(ids, plan, position_ids))  # type: ignore[no-any-return]


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


# The data ------------------------------------------------------------------------------------------------------------


class LinesAndText:
    """The sequences of a stage.

    Args:
        seq_len: bytes of each. seed: of all of them. stage: its number, from 0.
    """

    def __init__(self, seq_len: int, *, seed: int, stage: int) -> None:
        self.seq_len, self.seed, self.stage = seq_len, seed, stage

    def at(self, position: Position) -> PackedSequence:
        """The sequence of an index; one that follows another stage's is the first."""
        index = int(position["index"]) if position.get("stage") == self.stage else 0
        rng = np.random.default_rng([self.seed, self.stage, index])
        share = QUESTIONS[min(self.stage, len(QUESTIONS) - 1)]
        ids, weights = document(rng, -(-self.seq_len // SLOT), asked=rng.uniform(*share))
        if rng.random() < 0.5:
            ids, weights = among_text(rng, ids, weights, share=2 * TEXT * rng.uniform(0.4, 1.6), text=library()[0])
        tokens, weights = ids[: self.seq_len].astype(np.int64), weights[: self.seq_len]
        labels = np.where(weights > 0, tokens, -100)
        after = {"stage": self.stage, "index": index + 1}
        return PackedSequence(tokens, Documents([self.seq_len]), after, labels=labels, loss_weights=weights)


def document(rng: np.random.Generator, slots: int, *, asked: float) -> tuple[Bytes, NDArray[np.float32]]:
    """Lines and questions about earlier ones, and what predicting each byte counts.

    Args:
        slots: lines and questions together. asked: chance of a question.
    """
    asks = rng.random(slots) < asked
    asks[0] = False
    seen = np.cumsum(~asks)
    which = np.where(asks, (rng.random(slots) * seen).astype(int), seen - 1)
    numbers = digits(rng, int(seen[-1]), distinct=True)
    values = digits(rng, int(seen[-1]), distinct=False)
    rows = np.tile(np.frombuffer(b"line 0000: 0000\n", np.uint8), (slots, 1))
    rows[asks, :4] = np.frombuffer(b"what", np.uint8)
    rows[:, 5 : 5 + DIGITS], rows[:, ANSWER] = numbers[which], values[which]
    weights = np.zeros(rows.shape, np.float32)
    weights[asks, ANSWER] = 1
    return rows.reshape(-1), weights.reshape(-1)


def digits(rng: np.random.Generator, count: int, *, distinct: bool) -> Bytes:
    """Numbers as ASCII ``[count, 4]``; in some sequences each digit is one of few symbols.

    Then most lines have others beside them that differ in a digit, or values that begin alike, at 512 bytes as at
    16,384: what a longer context makes hard is there to be learnt in a short one.
    """
    symbols = 10
    if rng.random() < CROWDED:
        fewest = max(2, math.ceil((1.5 * count) ** (1 / DIGITS))) if distinct else 2
        symbols = min(10, int(rng.integers(fewest, fewest + 2 if distinct else 6)))
    codes = rng.choice(symbols**DIGITS, count, replace=not distinct)
    alphabets = np.stack([rng.permutation(10) for _ in range(DIGITS)]).astype(np.uint8)
    return alphabets[np.arange(DIGITS), codes[:, None] // symbols ** np.arange(DIGITS) % symbols] + ord("0")


def among_text(
    rng: np.random.Generator, ids: Bytes, weights: NDArray[np.float32], *, share: float, text: Bytes
) -> tuple[Bytes, NDArray[np.float32]]:
    """Lines with up to four spans of text between them; as long as before, so the last lines are left out."""
    total, spans = int(len(ids) * share), int(rng.integers(1, 5))
    sizes = np.diff(np.sort([0, *rng.integers(0, total + 1, spans - 1), total]))
    places = np.sort(rng.integers(0, (len(ids) - total) // SLOT + 1, spans)) * SLOT
    made, counts, last = [], [], 0
    for place, size in zip(places.tolist(), sizes.tolist(), strict=True):
        begin = int(rng.integers(len(text) - size + 1))
        made += [ids[last:place], text[begin : begin + size]]
        counts += [weights[last:place], np.full(size, TEXT_WEIGHT, np.float32)]
        last = place
    return np.concatenate([*made, ids[last:]])[: len(ids)], np.concatenate([*counts, weights[last:]])[: len(ids)]


@cache
def library() -> tuple[Bytes, Bytes]:
    """The modules of this Python's standard library that are ASCII, joined: to train on, and those held out."""
    found: tuple[list[bytes], list[bytes]] = [], []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if (source := path.read_bytes()).isascii():
            found[path.name in HELD_OUT].append(source)
    train, held_out = (np.frombuffer(b"".join(sources), np.uint8) for sources in found)
    return train, held_out


# What `ringspun train` and `ringspun eval` ask for -------------------------------------------------------------------


def build_model(config: TrainConfig) -> LineModel:
    """The model, its rotations those of the stage."""
    return LineModel(config.rope or Default(partial_rotary_factor=0.25))


def loss(model: LineModel, shard: Shard) -> Tensor:
    """This rank's share of the mean over answers and text."""
    hidden = model.hidden(shard.input_ids, shard.plan, shard.position_ids)
    return linear_token_loss(
        hidden, Head(model.head.weight), shard.targets, total_targets=shard.total_targets, weights=shard.loss_weights
    )


def sequences(config: TrainConfig, stage: Leg) -> LinesAndText:
    """See `LinesAndText`."""
    return LinesAndText(config.seq_len, seed=config.seed, stage=stage.number)


def evaluate(
    model: LineModel, context: ContextParallel, config: TrainConfig, stage: Leg, step: int
) -> dict[str, float]:
    """Before and after each stage: exact answers at all lengths of the run, bits per byte of text at the stage's."""
    seq_lens = sorted(set(stage.lengths))
    with autocast(config):
        grid = retrieval(judged(model), context, lines, seq_lens=seq_lens, questions=50, seed=config.seed)
        bits = text_bits(model, context, seq_len=stage.seq_len, documents=seq_lens[-1] // stage.seq_len)
    return {f"lines@{seq_len}": grid.accuracy(seq_len) for seq_len in seq_lens} | {f"text@{stage.seq_len}": bits}


def judged(model: LineModel) -> Judged:
    """The model as evaluations ask it: logits of some tokens alone, and how far its convolutions look back."""

    def logits(ids: Tensor, plan: Plan, position_ids: Tensor, rows: Tensor) -> Tensor:
        return model.head(model.hidden(ids, plan, position_ids)[:, rows])  # type: ignore[no-any-return]

    return Judged(logits, model.reach)


@torch.no_grad()
def text_bits(model: LineModel, context: ContextParallel, *, seq_len: int, documents: int) -> float:
    """Bits per byte of the modules that were held out, cut into so many documents of that length. Collective."""
    ids = library()[1][: seq_len * documents].astype(np.int64)
    shard = Shard.of(PackedSequence(ids, Documents([seq_len] * documents), {}), context)
    return float(context.driver.all_reduce(loss(model, shard).double())) / math.log(2)


def autocast(config: TrainConfig) -> torch.autocast:
    """As in training."""
    return torch.autocast("cpu", torch.bfloat16, enabled=config.dtype == "bfloat16")
