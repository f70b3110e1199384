"""Models that are written down: they answer by rule from what the mask lets them see, so what they score is known."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ringspun.evaluation.exam import Exam, Question
from ringspun.evaluation.lines import lines
from ringspun.evaluation.perplexity import LossByPosition, perplexity
from ringspun.evaluation.retrieval import answers
from ringspun.torch import ContextParallel, Loopback, Plan

VOCAB = 128
SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": VOCAB}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
SAID = (16, 5, 16, 16, 7, 16, 9)
"""16 is what `llama` answers first to each of seven questions, and what it is asked for; the others are not."""
Rule = Callable[[str], str]
"""What a token sees, as text in the order of positions -> the next character."""


def reader(rule: Rule) -> Callable[[Tensor, Plan, Tensor], Tensor]:
    """A model over bytes whose logits follow `rule`."""

    def logits(ids: Tensor, plan: Plan, position_ids: Tensor) -> Tensor:
        part = plan.partition
        told = part.gather(torch.stack([ids[0], position_ids[0]]).double(), dim=1).long().numpy()  # [2, S]
        out = torch.zeros(1, ids.shape[1], VOCAB)
        sees = plan.mask.as_array(part.seq_len)
        for row, place in enumerate(part.positions().tolist()):
            keys = np.flatnonzero(sees[place])
            keys = keys[np.argsort(told[1, keys], kind="stable")]
            text = bytes(told[0, keys].astype(np.uint8)).decode()
            out[0, row, ord(rule(text) or "?")] = 1.0
        return out

    return logits


def looks_up(window: int | None = None) -> Rule:
    """Knows the value that a line has in the last `window` characters (default: all of them), if one has."""

    def rule(text: str) -> str:
        asked = re.search(r"what (\d+): (\d*)$", text)
        if asked is None:
            return ""
        seen = text if window is None else text[-window:]
        found = re.search(rf"line {asked[1]}: (\d+)\n", seen)
        return found[1][len(asked[2])] if found and len(asked[2]) < len(found[1]) else ""

    return rule


def always(character: str) -> Rule:
    """Says one character, whatever it reads."""
    return lambda text: character


class WithConvolutions(nn.Module):
    """Two layers, each a short causal convolution and attention, on a ring; float64, weights from a seed."""

    def __init__(self, width: int = 16, kernel: int = 4, layers: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.8)

        self.embed, self.head = drawn(VOCAB, width), drawn(width, VOCAB)
        self.kernels = nn.ParameterList(drawn(width, kernel) for _ in range(layers))
        self.mixes = nn.ParameterList(drawn(width, 3 * width) for _ in range(layers))

    @property
    def reach(self) -> int:
        """Tokens that its convolutions look back at, together."""
        return sum(kernel.shape[1] - 1 for kernel in self.kernels)

    def forward(self, ids: Tensor, plan: Plan, position_ids: Tensor) -> Tensor:
        x = self.embed[ids] + torch.sin(position_ids / 7.0)[..., None]
        for kernel, mix in zip(self.kernels, self.mixes, strict=True):
            wide = torch.tanh(plan.partition.causal_conv1d(x, kernel))
            q, k, v = (t[:, None] for t in (wide @ mix).chunk(3, dim=-1))
            x = x + plan.attention(q, k, v)[:, 0]
        return x @ self.head


def llama() -> nn.Module:
    """Two layers of width 32 over bytes, float64, scores far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double()


def judged_on_this_ring(ring: int | None = None) -> tuple[list[bool], list[bool], LossByPosition]:
    """What a ring says: this process's default group, or a loopback of so many."""
    context = ContextParallel(None if ring is None else Loopback(ring, seed=0))
    exam = lines(200, questions=7, depths=5, seed=3)
    right = answers(reader(looks_up(150)), context, exam, reach=0).tolist()
    # the first token of an answer depends on no other: some are made what the model says, found by one process
    made = [Question(np.append(q.ids[:-4], token), 1, q.depth) for q, token in zip(exam.questions, SAID, strict=True)]
    said = answers(llama(), context, Exam(exam.document, tuple(made))).tolist()
    texts = np.random.default_rng(0).integers(VOCAB, size=(2, 61))
    return right, said, perplexity(llama(), context, list(texts), buckets=6, windows=(8, 20))


def judged_on_ranks(ring_rank: int) -> tuple[list[bool], list[bool], LossByPosition]:
    """The same on a pool."""
    return judged_on_this_ring()
