"""FLOPs: of training, of masks, of recomputing; and what the literature makes of them.

A multiply-add is two. Attention costs 2 products forward and 5 backward, which recomputes the scores; a linear layer
one and two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ringspun.errors import ConfigError
from ringspun.planner.models import Model

Checkpointing = Literal["none", "attention", "layer"]
"""What is kept for backward. none: everything. layer: a layer's input. attention: that, with (out, lse), so that
attention does not run again."""
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "attention", "layer")


def linear_flops(model: Model, tokens: float) -> float:
    """Forward, of one layer's matrices."""
    return 2.0 * tokens * model.layer_matrix_parameters


def attention_flops(model: Model, pairs: float) -> float:
    """Forward, of one layer: two products over all query heads, for the pairs that a mask allows."""
    return 4.0 * pairs * model.q_width


def head_flops(model: Model, tokens: float) -> float:
    """Forward, of the logits."""
    return 2.0 * tokens * model.vocab * model.hidden


def causal_pairs(seq_len: float, window: int | None = None) -> float:
    """Pairs of a causal mask, of one sequence."""
    w = min(window or seq_len, seq_len)
    return w * (w + 1) / 2 + (seq_len - w) * w


def model_flops(model: Model, seq_len: float, *, causal: bool = True) -> float:
    """Of one sequence, forward and backward (three times forward, nothing recomputed): what MFU counts.

    Args:
        causal: counts allowed pairs only; the usual figure of papers counts all, twice as many.
    """
    return packed_flops(model, [seq_len]) if causal else _flops(model, seq_len, model.layers * seq_len * seq_len)


def packed_flops(model: Model, lengths: Sequence[float], tokens: float | None = None) -> float:
    """`model_flops` of one sequence of documents that do not see each other: the pairs of causal & documents.

    Args:
        lengths: of the documents (tokens). tokens: of the sequence, which may hold more; default: their sum.
    """
    full, slid = model.full_layers, model.layers - model.full_layers
    pairs = sum(full * causal_pairs(n) + slid * causal_pairs(n, model.window) for n in lengths)
    return _flops(model, sum(lengths) if tokens is None else tokens, pairs)


def _flops(model: Model, tokens: float, pairs: float) -> float:
    """Of all layers' pairs together."""
    linear = model.layers * linear_flops(model, tokens) + head_flops(model, tokens)
    return 3.0 * (linear + attention_flops(model, pairs))


def linear_factor(checkpointing: Checkpointing) -> float:
    """FLOPs of forward + backward of linear layers, in forwards: recomputing them adds a third."""
    return 3.0 if checkpointing == "none" else 4.0


def attention_factor(checkpointing: Checkpointing, *, scores_kept: bool = False) -> float:
    """FLOPs of forward + backward of attention, in forwards: 3 with scores kept, 3.5 (one sixth more) without, and two
    sevenths more where the whole layer is run again."""
    if scores_kept:
        return 3.0
    return 4.5 if checkpointing == "layer" else 3.5


def training_flops_ratio(hidden: int, seq_len: int, base: int = 4096) -> float:
    """FLOPs of training on the same tokens at a length, over those at another: (6h + s2) / (6h + s1).

    Source: arXiv 2310.01889 appendix D; every pair counts, masked or not.
    """
    return (6 * hidden + seq_len) / (6 * hidden + base)


def striped_speedup(
    model: Model, seq_len: int, ring: int, *, attention_weight: float = 1.0, ffn_matrices: int = 2, head: bool = True
) -> float:
    """Time of a contiguous causal ring over that of a striped one, if kernels and links cost nothing else.

    Args:
        attention_weight: cost of attention's FLOPs against the others' (2 where it runs in TF32 and they in bfloat16).
        ffn_matrices: what the paper counts is 2; a Llama has 3. head: whether logits count.
    Source: arXiv 2311.09431, TMS of its appendices. A contiguous ring waits at every step for a rank with a full block.
    """
    if seq_len < ring or ring < 1:
        raise ConfigError(f"ring must be at least 1 and at most seq_len; got {ring} and {seq_len}.")
    c = seq_len / ring
    h = model.hidden
    other = 2 * (4 * h * h + ffn_matrices * h * model.intermediate + (model.vocab * h / model.layers if head else 0))
    pair = 4 * h * attention_weight
    diagonal = (c + 1) / 2
    contiguous, striped = diagonal + (ring - 1) * c, diagonal + (ring - 1) * c / 2
    return (other + pair * contiguous) / (other + pair * striped)


def expected_mfu(mfu: float, hidden: int, short: int, long: int, *, rate_ratio: float = 1.018) -> float:
    """MFU at a length from that at a shorter one, linear layers and attention each at its own rate.

    Args:
        mfu: at `short`, in any unit. rate_ratio: rate of linear layers over attention's; 1.018 fits the five bars of
            arXiv 2310.01889 figure 4 (read off a picture, +-0.1 point), a weak target: no change is nearly as good.
    """

    def slower(length: int) -> float:
        return 1 + length / (6 * hidden + length) * (rate_ratio - 1)

    return mfu * slower(short) / slower(long)
