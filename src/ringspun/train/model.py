"""The Llama that a config describes, and its loss on one rank's shard of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from ringspun import Causal
from ringspun.core.route import Ring, Route
from ringspun.integrations import transformers as hf
from ringspun.train.chunked_loss import Head, Terms, linear_token_loss
from ringspun.train.config import TrainConfig
from ringspun.train.data import PackedSequence
from ringspun.train.decoder_blocks import apply_blockwise
from ringspun.train.recompute import apply_checkpointing
from ringspun.train.vocabulary import model_vocabulary, vocabulary_of

if TYPE_CHECKING:
    from ringspun.torch import ContextParallel, Plan


def build_model(config: TrainConfig, *, on_ring: bool = True) -> nn.Module:
    """A float32 `LlamaForCausalLM`, its weights drawn from the config's seed: the same on every rank.

    Args:
        config: the run.
        on_ring: False leaves it an ordinary model, without blocks.
    """
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = cast(nn.Module, LlamaForCausalLM(_llama_config(config))).float()
    if not on_ring:
        return model
    if config.feed_forward_block is not None:
        apply_blockwise(model, config.feed_forward_block)
    return _checkpointed(hf.prepare(model), config)


def route_of(config: TrainConfig) -> Route:
    """The ring's route: whose forward leaves to backward what the config says."""
    return Ring(kept_hops=config.kept_hops or None)


def _checkpointed(model: nn.Module, config: TrainConfig) -> nn.Module:
    """Its layers as the config says; how many blocks a ring keeps is said by its route."""
    apply_checkpointing(model, "attention" if config.checkpointing == "ring_step" else config.checkpointing)
    return model


def _llama_config(config: TrainConfig) -> Any:
    from transformers import LlamaConfig

    shape = config.model
    return LlamaConfig(
        vocab_size=model_vocabulary(config),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads,
        max_position_embeddings=config.seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        bos_token_id=None,
        eos_token_id=vocabulary_of(config).end,
        use_cache=False,
    )


@dataclass(frozen=True)
class Shard:
    """What one rank needs of one sequence."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T], within documents
    targets: Tensor  # [1, T], already shifted; -100 where there is none
    total_targets: float  # of the whole sequence, over all ranks: how many, or the sum of their weights
    plan: Plan
    loss_weights: Tensor | None = None  # [1, T], of `targets`

    @classmethod
    def of(cls, packed: PackedSequence, context: ContextParallel) -> Self:
        """This rank's shard of a sequence, causal within its documents. Collective, for it makes a plan."""
        part = context.partition(seq_len=len(packed.ids), documents=packed.documents)
        local = part.shard_batch({name: torch.from_numpy(values)[None] for name, values in packed.arrays.items()})
        return cls(
            local["input_ids"],
            local["position_ids"],
            local["shift_labels"],
            local.get("total_loss_weight", local["num_items_in_batch"]),
            part.plan(Causal() & packed.documents),
            local.get("shift_loss_weights"),
        )


def shard_loss(model: nn.Module, shard: Shard, *, chunk_tokens: int = 1024) -> Tensor:
    """This rank's share of the mean loss; the sum over the ranks is the mean.

    Args:
        model: of `build_model`. shard: this rank's. chunk_tokens: tokens whose logits are alive at once.
    """
    llama = cast(Any, model)
    hidden = llama.model(
        input_ids=shard.input_ids, position_ids=shard.position_ids, **{hf.PLAN_KEYWORD: shard.plan}
    ).last_hidden_state
    head, terms = Head(llama.lm_head.weight), Terms(chunk_tokens=chunk_tokens)
    return linear_token_loss(
        hidden, head, shard.targets, total_targets=shard.total_targets, weights=shard.loss_weights, terms=terms
    )


class SharedLoss(nn.Module):
    """`shard_loss` of a model as a module: what DDP and FSDP2 wrap, for they act where the whole is called.

    Args:
        model: of `build_model`. chunk_tokens: tokens whose logits are alive at once.
    """

    def __init__(self, model: nn.Module, *, chunk_tokens: int) -> None:
        super().__init__()
        self.model, self.chunk_tokens = model, chunk_tokens

    def forward(self, shard: Shard) -> Tensor:
        """This rank's share of the mean loss."""
        return shard_loss(self.model, shard, chunk_tokens=self.chunk_tokens)
