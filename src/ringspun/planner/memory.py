"""Memory of one device, item by item, and the longest sequence that fits.

Formulas count what is alive; a recipe's constants say how much of it a framework keeps. Answers are good to a factor of
about `TRUST`: that is what published tables allow (`ringspun.planner.literature`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from ringspun.errors import ConfigError
from ringspun.planner.flops import Checkpointing
from ringspun.planner.hardware import GIB
from ringspun.planner.models import Model
from ringspun.planner.reading import Entry
from ringspun.planner.split import Split

TRUST = 1.6
"""A length is given with the range x / 1.6 to x * 1.6."""
LONGEST = 1 << 40
"""Tokens of a device beyond which nobody looks."""

Method = Literal["vanilla", "memory_efficient", "blockwise", "ring"]
"""How attention and feed-forward are computed. vanilla keeps scores. memory_efficient: no scores, the feed-forward
whole. blockwise: both in chunks. ring: blockwise, with keys and values that travel."""
METHODS: tuple[Method, ...] = ("vanilla", "memory_efficient", "blockwise", "ring")
Zero = Literal[0, 1, 2, 3]


class Recipe(Entry):
    """What a framework keeps per parameter and token. One of them serves a whole table, whatever its hardware."""

    usable: float = Field(gt=0, le=1, description="Part of the device's memory that tensors may take.")
    reserve_bytes: float = Field(default=0, ge=0, description="Context, kernels' workspace, fragments.")
    weight_bytes: float = Field(ge=0, description="Per parameter, sharded by ZeRO-3.")
    gradient_bytes: float = Field(ge=0, description="Per parameter, sharded by ZeRO-2 and 3.")
    optimizer_bytes: float = Field(ge=0, description="Per parameter, from the first step on; sharded by ZeRO-1 to 3.")
    gather_bytes: float = Field(ge=0, description="Per parameter of a layer that is gathered to be computed with.")
    gathered_layers: int = Field(default=2, ge=0, description="Layers gathered at once: one is fetched ahead.")
    whole_gradient_bytes: float = Field(default=4, ge=0, description="Per parameter of the one layer under way.")
    activation_bytes: int = Field(gt=0, description="Per element of activations.")
    live_tensors: float = Field(gt=0, description="Tensors of the queries' width alive at attention's peak.")
    score_copies: float = Field(default=5, ge=0, description="Of float32 scores, where they are kept whole.")
    chunk: int = Field(default=1024, gt=0, description="Tokens of a block of scores, and of a feed-forward chunk.")
    ffn_copies: float = Field(default=5, ge=0, description="Tensors of the feed-forward's width at its peak.")
    kept_hidden: float = Field(
        default=0, ge=0, description="Of each layer's feed-forward width, kept for backward where it is not chunked."
    )
    logit_copies: float = Field(default=2, ge=0, description="Of float32 logits: with their gradient, 2.")
    logit_chunk: int | None = Field(default=None, gt=0, description="Tokens of a chunk of the loss; None: whole.")
    kv_slots: int = Field(default=2, ge=0, description="Key/value blocks in flight.")
    dkv_slots: int = Field(default=1, ge=0, description="Their gradients in flight.")
    accumulator_bytes: int = Field(default=4, gt=0, description="Per element of travelling gradients.")
    offload_activations: bool = Field(default=False, description="Kept activations lie in host memory.")
    offload_optimizer: bool = Field(default=False, description="The optimizer's state lies in host memory.")
    offload_weights: bool = Field(default=False, description="Weights and gradients lie in host memory.")
    host_bytes_per_parameter: float = Field(default=0, ge=0, description="Host memory, where the optimizer lies.")


JAX_2023 = Recipe(
    usable=0.75,  # JAX's documented preallocation on GPUs
    weight_bytes=4,
    gradient_bytes=4,
    optimizer_bytes=8,
    gather_bytes=4,
    activation_bytes=4,  # TPUs' bfloat16 is of products alone
    live_tensors=8,  # q, k, v, out and their gradients
    kept_hidden=0.5,
)
"""For all of arXiv 2310.01889 table 3. `kept_hidden` and `score_copies` are effective numbers; the rest is a count."""

TORCH = Recipe(
    usable=0.95,
    reserve_bytes=3e9,
    weight_bytes=4,
    gradient_bytes=4,
    optimizer_bytes=8,
    gather_bytes=2,
    activation_bytes=2,
    live_tensors=20,
    ffn_copies=4,
    dkv_slots=3,
)
"""FSDP2 with float32 parameters and bfloat16 compute, AdamW. `live_tensors` is that of `ALST`; `usable` is assumed."""

ALST = Recipe(
    usable=79.65 / 80,
    reserve_bytes=3e9,
    weight_bytes=2,
    gradient_bytes=2,
    optimizer_bytes=12,
    gather_bytes=2,
    whole_gradient_bytes=0,
    activation_bytes=2,
    live_tensors=20,  # fitted on Llama 8B on 8 devices
    ffn_copies=4,
    logit_chunk=1024,
    offload_activations=True,
    offload_optimizer=True,
    host_bytes_per_parameter=30,  # fitted on Llama 70B on 64 devices; twice what its tensors take
)
"""DeepSpeed's long-sequence training, arXiv 2506.13996: ZeRO-3, optimizer and checkpoints in host memory, tiles."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one device at the peak of a step, itemised.

    Args:
        capacity: what tensors may take. standing: alive at every moment, by name. phases: what comes on top while
            attention, the feed-forward layer or the loss is computed, by name.
    """

    capacity: float
    standing: Mapping[str, float]
    phases: Mapping[str, Mapping[str, float]]

    @property
    def peak_phase(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def items(self) -> dict[str, float]:
        """What is alive at the peak, largest phase included."""
        return {**self.standing, **self.phases[self.peak_phase]}

    @property
    def total(self) -> float:
        """Bytes at the peak of a steady step."""
        return sum(self.items.values())

    @property
    def first_step(self) -> float:
        """Bytes at the peak of the very first step: optimizers make their state at its end."""
        return self.total - self.standing.get("optimizer", 0.0)

    @property
    def left_for_attention(self) -> float:
        """Bytes that attention may take beside what stands."""
        return self.capacity - sum(self.standing.values())

    @property
    def fits(self) -> bool:
        """Whether all of it does."""
        return self.total <= self.capacity


def memory(
    model: Model,
    tokens: float,
    split: Split,
    *,
    memory_bytes: float,
    recipe: Recipe = TORCH,
    method: Method = "ring",
    checkpointing: Checkpointing = "layer",
    zero: Zero = 3,
) -> Memory:
    """Memory of one device.

    Args:
        tokens: of this device between layers: batch * seq_len / split.slices. memory_bytes: of the device.
        zero: what is sharded over all devices but tp's: optimizer (1), gradients (2), parameters (3); 0: nothing.
    """
    standing = {
        **_state(model, split, recipe, zero),
        "kept activations": 0.0
        if recipe.offload_activations
        else kept_bytes(model, tokens, recipe, checkpointing, method=method),
        "reserve": recipe.reserve_bytes,
    }
    phases = {
        "attention": _attention(model, tokens, split, recipe, method),
        "feed-forward": _feed_forward(model, tokens, split, recipe, method),
        "loss": _loss(model, tokens, split, recipe),
    }
    return Memory(recipe.usable * memory_bytes, standing, phases)


def _state(model: Model, split: Split, recipe: Recipe, zero: Zero) -> dict[str, float]:
    shards = split.devices // split.tp
    each = model.parameters / split.tp
    here = 0.0 if recipe.offload_weights else each
    layer = model.layer_parameters / split.tp
    gathered = 0.0
    if zero == 3:
        gathered = layer * recipe.gathered_layers * recipe.gather_bytes + layer * recipe.whole_gradient_bytes
        gathered += model.embedding_parameters / split.tp * recipe.gather_bytes
    elif recipe.gather_bytes != recipe.weight_bytes:
        gathered = each * recipe.gather_bytes  # a copy in the dtype of compute
    optimizer = 0.0 if recipe.offload_optimizer else each * recipe.optimizer_bytes / (shards if zero >= 1 else 1)
    return {
        "parameters": here * recipe.weight_bytes / (shards if zero == 3 else 1),
        "gradients": here * recipe.gradient_bytes / (shards if zero >= 2 else 1),
        "optimizer": optimizer,
        "gathered parameters": gathered,
    }


def kept_bytes(
    model: Model,
    tokens: float,
    recipe: Recipe,
    checkpointing: Checkpointing = "layer",
    *,
    method: Method = "ring",
    kept_hops: int = 0,
) -> float:
    """Bytes that forward keeps for backward, all layers.

    Args:
        kept_hops: of the ring, whose blocks are kept too (`ringspun.core.route.Ring`).
    """
    element = recipe.activation_bytes
    per_token = (model.hidden + kept_hops * 2 * model.kv_width) * element
    if checkpointing != "layer":
        per_token += model.q_width * element + 4 * model.heads  # out and its lse
    if checkpointing == "none":  # both norms' outputs, the second residual, q, k, v, gate, up, their product
        widths = 3 * model.hidden + model.q_width + 2 * model.kv_width + model.ffn_matrices * model.intermediate
        per_token += widths * element
    elif method in ("vanilla", "memory_efficient"):
        per_token += recipe.kept_hidden * model.intermediate * element  # type: ignore[assignment]
    return float(model.layers * tokens * per_token)


def kv_block_bytes(tokens: float, width: int, element_bytes: int, *, slots: int = 2) -> float:
    """Bytes of key/value blocks in flight.

    Args:
        tokens: of a block. width: elements of a token's keys, values have as many. slots: 2 for a double buffer.
    """
    return float(slots * 2 * tokens * width * element_bytes)


def score_bytes(tokens: int, element_bytes: int) -> int:
    """Bytes of one head's scores, if all were held at once."""
    return tokens * tokens * element_bytes


def logit_bytes(tokens: float, vocab: int) -> float:
    """Bytes of float32 logits, once; their gradient takes as many again."""
    return 4.0 * tokens * vocab


def _attention(model: Model, tokens: float, split: Split, recipe: Recipe, method: Method) -> dict[str, float]:
    heads, element = model.heads / (split.tp * split.ulysses), recipe.activation_bytes
    rows = tokens * split.tp * split.ulysses  # of this device's heads
    width = model.kv_width / (split.tp * split.ulysses) * split.kv_copies(model)
    if method == "vanilla":
        scores = recipe.score_copies * heads * rows * rows * 4
    else:
        scores = 3 * heads * recipe.chunk * recipe.chunk * 4.0
    travels = method == "ring" and split.ring > 1
    return {
        "attention's tensors": recipe.live_tensors * rows * heads * model.head_size * element,
        "scores": scores,
        "key/value blocks in flight": recipe.kv_slots * 2 * rows * width * element if travels else 0.0,
        "their gradients in flight": recipe.dkv_slots * 2 * rows * width * recipe.accumulator_bytes if travels else 0.0,
    }


def _feed_forward(model: Model, tokens: float, split: Split, recipe: Recipe, method: Method) -> dict[str, float]:
    rows = tokens * split.tp
    chunked = min(rows, recipe.chunk) if method in ("blockwise", "ring") else rows
    width = recipe.ffn_copies * chunked * model.intermediate / split.tp
    return {"feed-forward's tensors": (width + 3 * tokens * model.hidden) * recipe.activation_bytes}


def _loss(model: Model, tokens: float, split: Split, recipe: Recipe) -> dict[str, float]:
    rows = tokens if recipe.logit_chunk is None else min(tokens, recipe.logit_chunk)
    return {
        "logits and their gradient": recipe.logit_copies * logit_bytes(rows, model.vocab),
        "loss's other tensors": 2 * tokens * model.hidden * recipe.activation_bytes,
    }


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, unrounded, with the range in which it is to be trusted.

    Args:
        tokens: of one sequence, 0 where not even its parameters fit. limit: what ends it, in words.
    """

    tokens: float
    limit: str

    @property
    def low(self) -> float:
        """Lower end of the range."""
        return self.tokens / TRUST

    @property
    def high(self) -> float:
        """Upper end of the range."""
        return self.tokens * TRUST


def longest(
    model: Model,
    split: Split,
    *,
    memory_bytes: float,
    recipe: Recipe = TORCH,
    method: Method = "ring",
    checkpointing: Checkpointing = "layer",
    zero: Zero = 3,
    batch: int = 1,
    host_bytes: float | None = None,
) -> Longest:
    """The longest sequence that fits.

    Args:
        batch: sequences of one replica at once. host_bytes: of all hosts together, where something is offloaded.
    """
    if batch < 1:
        raise ConfigError(f"batch must be at least 1 sequence; got {batch}.")

    def at(tokens: float) -> Memory:
        return memory(
            model, tokens, split, memory_bytes=memory_bytes, recipe=recipe, method=method, checkpointing=checkpointing,
            zero=zero,
        )  # fmt: skip

    per_sequence = split.slices / batch
    if not at(1).fits:
        return Longest(0.0, "parameters")
    best = _root(lambda tokens: _over(at(tokens)))
    found, limit = best * per_sequence, at(best).peak_phase
    host = _longest_on_host(model, recipe, checkpointing, split.dp * batch, host_bytes)
    return Longest(host, "host memory") if host < found else Longest(found, limit)


def _longest_on_host(
    model: Model, recipe: Recipe, checkpointing: Checkpointing, sequences: int, host_bytes: float | None
) -> float:
    if host_bytes is None or not recipe.offload_activations:
        return math.inf
    left = host_bytes - recipe.host_bytes_per_parameter * model.parameters
    return max(0.0, left / kept_bytes(model, sequences, recipe, checkpointing))


def _over(found: Memory) -> float:
    return found.total / found.capacity - 1


def _root(over: Callable[[float], float]) -> float:
    """Where `over`, which grows, is zero, to a part in 100,000: by false position, for it is nearly straight."""
    low, high = 1.0, 8.0
    while (above := over(high)) < 0 and high < LONGEST:
        low, high = high, 8 * high
    below = over(low)
    while high - low > 1e-5 * low and above > 0:
        middle = low - below * (high - low) / (above - below)
        found = over(middle)
        if abs(found) < 1e-6:
            return middle * (1 - 1e-6)
        if found < 0:
            low, below, above = middle, found, above / 2  # halved (Illinois), or that end might never move
        else:
            high, above, below = middle, found, below / 2
    return low


def advice(found: Memory, model: Model, tokens: float, recipe: Recipe) -> list[str]:
    """What the items say that a user should know."""
    lines = []
    logits = logit_bytes(tokens, model.vocab)
    attention = sum(found.phases["attention"].values())
    if recipe.logit_chunk is None and 2 * logits > max(attention, 0.05 * found.capacity):
        lines.append(
            f"the loss, not attention, takes most: {tokens:,.0f} tokens x {model.vocab:,} logits in float32 are "
            f"{logits / GIB:.1f} GiB, and as much again for their gradient. Compute the loss in chunks that are "
            "computed again in backward; chunks that are kept save nothing."
        )
    optimizer = found.standing["optimizer"]
    if optimizer > 0.02 * found.total:
        lines.append(
            f"the optimizer makes its state ({optimizer / GIB:.1f} GiB) at the end of the first step: a first step "
            f"that fits ({found.first_step / GIB:.1f} GiB) is not representative of the second "
            f"({found.total / GIB:.1f} GiB)."
        )
    return lines
