"""The model of a run, from a config, a checkpoint or a recipe, and its loss on one rank's shard of one sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from ringspun import Causal
from ringspun.core.route import Ring, Route
from ringspun.errors import ConfigError
from ringspun.integrations import transformers as hf
from ringspun.integrations.transformers.layers import text_config
from ringspun.train.config import TrainConfig
from ringspun.train.data.text import PackedSequence
from ringspun.train.data.vocabulary import model_vocabulary, vocabulary_of
from ringspun.train.init import init_shapes, load_init
from ringspun.train.losses.causal_lm import CausalLMLoss
from ringspun.train.losses.chunked_loss import Head, Terms, linear_token_loss
from ringspun.train.losses.loss import token_loss
from ringspun.train.memory.decoder_blocks import apply_blockwise
from ringspun.train.memory.recompute import apply_checkpointing
from ringspun.train.recipe import Recipe
from ringspun.train.rope import head_size_of
from ringspun.train.rope.fixed_rope import fix_rope

if TYPE_CHECKING:
    from ringspun.torch import ContextParallel, Plan

NOTHING = Recipe()
"""A recipe that leaves everything to the config."""


def build_model(config: TrainConfig, *, on_ring: bool = True, recipe: Recipe = NOTHING) -> nn.Module:
    """The model of a run, in float32, the same on every rank: a recipe's own, that of `init`, or a `LlamaForCausalLM`
    with weights drawn from the config's seed. A Transformers model has the config's rotations.

    Args:
        config: what holds in the stage. on_ring: False leaves a Transformers model an ordinary one, without blocks.
    Raises:
        ConfigError: a checkpoint that cannot be used, or settings that a model of one's own does not know.
    """
    model = _bare(config, recipe)
    return put_on_ring(model, config) if on_ring else model


def _bare(config: TrainConfig, recipe: Recipe) -> nn.Module:
    if recipe.build_model is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = recipe.build_model(config)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"build_model must return an nn.Module; got {type(model).__name__}.")
    elif config.init is not None:
        model = load_init(config.init)
    else:
        model = _llama(config)
    turns = is_transformers(model) and (config.rope is not None or config.init is not None)
    return _turned(model, config) if turns else model


def _llama(config: TrainConfig) -> nn.Module:
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return cast(nn.Module, LlamaForCausalLM(_llama_config(config))).float()


def _turned(model: nn.Module, config: TrainConfig) -> nn.Module:
    """Its rotations fixed for the stage; a model without any keeps its table of positions, if that is long enough."""
    settings: Any = model.config
    if config.rope is None and not any(getattr(one, "rope_type", None) for one in model.modules()):
        most = getattr(settings, "max_position_embeddings", None)
        if most is not None and config.seq_len > most:
            raise ConfigError(
                f"seq_len must be at most the {most} positions that the model has a table of; got {config.seq_len}."
            )
        return model
    return fix_rope(model, seq_len=config.seq_len, rope=config.rope)


def is_transformers(model: nn.Module) -> bool:
    """Whether it is one of Hugging Face's, which `prepare` puts on a ring."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def put_on_ring(model: nn.Module, config: TrainConfig) -> nn.Module:
    """A bare Transformers model with the ring's attention, in blocks, with layers that run again, as the config says; a
    model of one's own is on the ring by itself.

    Raises:
        ConfigError: settings that a model of one's own would not heed.
    """
    if not is_transformers(model):
        for name, off in (("feed_forward_block", None), ("checkpointing", "none")):
            if getattr(config, name) != off:
                raise ConfigError(
                    f"{name} must not be given for a recipe's own model; got {getattr(config, name)!r}. Do it in "
                    "build_model (ringspun.train.memory.blockwise, ringspun.train.memory.recompute)."
                )
        return model
    if config.feed_forward_block is not None:
        apply_blockwise(model, config.feed_forward_block)
    return _checkpointed(hf.prepare(model), config)


def build_loss(config: TrainConfig, recipe: Recipe = NOTHING) -> tuple[nn.Module, nn.Module]:
    """The bare model of a run, on the ring, and its loss: a module that takes a `Shard`."""
    model, chunk = _bare(config, recipe), config.loss_chunk
    if recipe.loss is not None:
        return put_on_ring(model, config), SharedLoss(model, recipe.loss)
    if recipe.build_model is None and config.init is None:
        return put_on_ring(model, config), SharedLoss(model, partial(shard_loss, chunk_tokens=chunk))
    if is_transformers(model):
        loss = CausalLMLoss(model, terms=Terms(chunk_tokens=chunk))  # looks at the model before it is on the ring
        return put_on_ring(model, config), SharedCausalLMLoss(loss)
    return put_on_ring(model, config), SharedLoss(model, logits_loss)


def build_shapes(config: TrainConfig, recipe: Recipe = NOTHING) -> nn.Module:
    """The bare model without any numbers, on the meta device: nothing is allocated."""
    if recipe.build_model is None and config.init is not None:
        return init_shapes(config.init)
    with torch.device("meta"):
        return _llama(config) if recipe.build_model is None else recipe.build_model(config)


def check_rotations(config: TrainConfig, recipe: Recipe = NOTHING) -> None:
    """Looks at what each stage makes of the model's positions, so that a late one does not end a run of days.

    Raises:
        ConfigError: no such model, or its table of positions is too short. UnsupportedByRing: rotations that do not
            fit.
    """
    if recipe.build_model is not None:
        return  # what it does there is its own
    for leg in config.legs:
        if leg.config.init is not None or leg.config.rope is not None:
            _turned(build_shapes(leg.config, recipe), leg.config)


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
    assert shape is not None  # validated: there is no init, and no recipe's own
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


class AttentionShape(NamedTuple):
    """Heads of a model's attention, and the size of one."""

    heads: int
    kv_heads: int
    head_size: int


def attention_shape(model: nn.Module) -> AttentionShape:
    """As a Transformers model's config says; of one's own, whose heads nobody tells, one head."""
    if not is_transformers(model):
        return AttentionShape(1, 1, 64)
    config = text_config(model)
    heads = config.num_attention_heads
    return AttentionShape(heads, getattr(config, "num_key_value_heads", None) or heads, head_size_of(config))


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


def logits_loss(model: nn.Module, shard: Shard) -> Tensor:
    """This rank's share of the mean loss of a model that gives logits.

    Args:
        model: called with ``(input_ids [1, T], plan, position_ids [1, T])``. shard: this rank's.
    """
    logits = model(shard.input_ids, shard.plan, shard.position_ids)
    return token_loss(logits, shard.targets, total_targets=shard.total_targets, weights=shard.loss_weights)


class SharedLoss(nn.Module):
    """A loss of a model as a module: what DDP and FSDP2 wrap, for they act where the whole is called.

    Args:
        model: on the ring. loss: this rank's share, of the model and a `Shard`.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Shard], Tensor] = shard_loss) -> None:
        super().__init__()
        self.model, self.share = model, loss

    def forward(self, shard: Shard) -> Tensor:
        """This rank's share of the mean loss."""
        return self.share(self.model, shard)


class SharedCausalLMLoss(nn.Module):
    """`CausalLMLoss` of a `Shard`, each layer with the plan of its kind.

    Args:
        loss: of a model that is on the ring now.
    """

    def __init__(self, loss: CausalLMLoss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, shard: Shard) -> Tensor:
        """This rank's share of the mean loss."""
        plans = hf.plans(self.loss.model, shard.plan.partition, shard.plan.mask)
        return self.loss(  # type: ignore[no-any-return]
            shard.targets,
            total_targets=shard.total_targets,
            weights=shard.loss_weights,
            input_ids=shard.input_ids,
            position_ids=shard.position_ids,
            **{hf.PLAN_KEYWORD: plans},
        )
