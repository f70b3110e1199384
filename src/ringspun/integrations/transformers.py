"""Hugging Face Transformers on a ring: attention through `AttentionInterface`, with the plan as a keyword of
the call.

    model = prepare(LlamaForCausalLM(config))            # registers "ringspun" and selects it
    plan  = part.plan(Causal() & documents)
    model(input_ids=ids_local, position_ids=positions_local, ringspun_plan=plan)

The plan's mask is the only mask. Whatever else a model or a caller asks of attention is either something the
ring does, or is refused: nothing is accepted and ignored. Importing this module changes nothing; `register`
and `prepare` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ringspun.errors import MissingExtra, UnsupportedByRing

if TYPE_CHECKING:
    from ringspun.torch import Plan

# Transformers takes special branches for names with `flash`, `sdpa`, `flex_attention` or `/` in them.
NAME = "ringspun"
PLAN_KEYWORD = "ringspun_plan"

# Keywords that reach attention and mean nothing to it; any other that is set is refused.
_HARMLESS = {
    "cache_position",
    "ignore_index",
    "is_causal",  # what may be seen is the plan's business
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "shift_labels",
}
_ATTENDING_LAYERS = {"full_attention", "attention"}
_ROPE_OF_LENGTH = {"dynamic", "longrope"}

M = TypeVar("M", bound=nn.Module)


def register() -> None:
    """Makes ``attn_implementation="ringspun"`` known to Transformers, with a mask function that refuses
    padding masks.

    Raises:
        MissingExtra: Transformers is not installed.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as problem:
        raise MissingExtra(
            "the transformers integration must find transformers; install it: pip install 'ringspun[train]'."
        ) from problem
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, no_mask)


def prepare(model: M) -> M:
    """Puts `model` on the ring: registers, selects the attention, and checks the model and every later call.

    A call without ``position_ids`` gets the plan's own (within documents, where the plan has them), since the
    model's default would rotate every shard as if it began at 0.

    Args:
        model: a Transformers model, changed in place: its attention is the ring's, its cache is off.

    Returns:
        `model`.

    Raises:
        UnsupportedByRing: its layers mix tokens by something other than full attention, or its positions depend
            on what one rank holds.
    """
    register()
    config = _text_config(model)
    _refuse_config(config)
    _refuse_model(model)
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    config.use_cache = False
    model.register_forward_pre_hook(_check_labels, with_kwargs=True)
    getattr(model, "base_model", model).register_forward_pre_hook(_check_call, with_kwargs=True)
    return model


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of this rank's queries over the whole sequence, in the form that Transformers calls.

    Args:
        module: the attention layer.
        query: ``[B, H, T, D]``, rotated.
        key: ``[B, K, T, D]``, rotated, heads not repeated.
        value: ``[B, K, T, D]``.
        attention_mask: must be None.
        dropout: must be 0 in training; ignored, as everywhere, otherwise.
        scaling: factor of the scores; None is ``D ** -0.5``.
        kwargs: `ringspun_plan`, `position_ids`, `softcap` (Gemma 2), `s_aux` (sinks, gpt-oss), and whatever else was
            given to the model.

    Returns:
        ``[B, T, H, D]``, and None for the weights, which no rank holds.

    Raises:
        UnsupportedByRing: anything is asked that the ring cannot honour.
    """
    plan = _plan(kwargs.pop(PLAN_KEYWORD, None))
    config = getattr(module, "config", None)
    if config is not None:
        _refuse_config(config)
    if dropout and module.training:
        raise UnsupportedByRing(
            f"dropout must be 0 in training; got {dropout}. "
            "Set attention_dropout = 0 in the model's config (GPT-2 calls it attn_pdrop)."
        )
    if attention_mask is not None:
        raise UnsupportedByRing(_MASK_MESSAGE.format(tuple(attention_mask.shape)))
    softcap, sinks = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    _refuse_keywords(kwargs)
    _check_shapes(plan, query, key)
    if getattr(module, "layer_idx", 0) in (0, None):
        _check_positions(plan, kwargs.get("position_ids"))
    out = plan.attention(query, key, value, scale=scaling, softcap=softcap, sinks=sinks)
    return out.transpose(1, 2).contiguous(), None


def no_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """The mask function: makes no mask, for the plan has it; refuses a padding mask, which would be lost."""
    if attention_mask is not None:
        raise UnsupportedByRing(_MASK_MESSAGE.format(tuple(attention_mask.shape)))


_MASK_MESSAGE = (
    "attention_mask must be None on a ring; got one of shape {}. "
    "An all-ones mask: leave it out. Padding: say it in the plan, "
    "plan(Causal() & Documents.from_segment_ids(mask_row, padding=0))."
)


def _check_labels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses labels that the model would shift inside the shard, or average over the shard's targets alone."""
    if kwargs.get("labels") is None:
        return
    for name in ("shift_labels", "num_items_in_batch"):
        if kwargs.get(name) is None:
            raise UnsupportedByRing(
                f"labels must come with {name} on a ring; got none. The model would shift or average them inside the "
                f"shard. Write model(**part.shard_batch(batch), {PLAN_KEYWORD}=plan)."
            )


def _check_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Checks one call of the model before it runs, and fills in the positions."""
    plan = _plan(kwargs.get(PLAN_KEYWORD))
    if len(args) > 1:
        raise UnsupportedByRing("model inputs after input_ids must be given by keyword on a ring.")
    if kwargs.get("attention_mask") is not None:
        raise UnsupportedByRing(_MASK_MESSAGE.format(tuple(kwargs["attention_mask"].shape)))
    _refuse_cache(kwargs)
    if kwargs.get("position_ids") is None:
        inputs = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        positions = plan.partition.positions(restart=_has_documents(plan))
        kwargs["position_ids"] = positions[None].to(inputs.device if inputs is not None else positions.device)
    return args, kwargs


def _plan(plan: Plan | None) -> Plan:
    if plan is None:
        raise UnsupportedByRing(
            f"{PLAN_KEYWORD} must be given to every call of the model; got none. "
            f"Write model(..., {PLAN_KEYWORD}=plan) with the plan of this batch."
        )
    empty = np.flatnonzero(plan.partition.core.tokens == 0)
    if len(empty):  # the same on all ranks, so that they refuse alike; models cannot run over no tokens
        raise UnsupportedByRing(
            f"plan must give every rank a token; it gives none to ring rank {empty[0]} of {plan.partition.seq_len} "
            "tokens. Use a smaller ring, a longer sequence or another layout."
        )
    return plan


def _has_documents(plan: Plan) -> bool:
    return plan.partition.documents is not None


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config


def _refuse_config(config: Any) -> None:
    for name in ("layer_types", "layers_block_type"):
        kinds = set(getattr(config, name, None) or ()) - _ATTENDING_LAYERS
        if kinds:
            raise UnsupportedByRing(
                f"{name} must all be full_attention on a ring; got {', '.join(sorted(kinds))}. "
                "Their state or window would restart at every shard."
            )
    if getattr(config, "output_attentions", False):
        raise UnsupportedByRing(_WEIGHTS_MESSAGE)


def _refuse_model(model: nn.Module) -> None:
    """Refuses what would run without an error and be wrong."""
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedByRing(
            f"model must call attention through AttentionInterface; {name} does not, so its attention would stay "
            "inside each shard."
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.RNNBase):
            raise UnsupportedByRing(
                f"model must mix tokens by attention alone; {name} has a {type(module).__name__} at {path}, whose "
                "state would restart at every shard."
            )
        kind = getattr(module, "rope_type", None)
        if kind in _ROPE_OF_LENGTH:
            raise UnsupportedByRing(
                f"rope_type must not depend on the longest position of a call on a ring; got {kind!r}. "
                "Ranks would rotate by different frequencies."
            )


_WEIGHTS_MESSAGE = "output_attentions must be False on a ring; no rank holds the weights."


def _refuse_keywords(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise UnsupportedByRing(_WEIGHTS_MESSAGE)
    _refuse_cache(kwargs)
    for name, value in kwargs.items():
        if name in _HARMLESS or value is None or value is False:
            continue
        raise UnsupportedByRing(
            f"{name} must be None on a ring; got {_brief(value)}. The ring would ignore it. "
            + _INSTEAD.get(name, "Windows and documents belong in the plan's mask.")
        )


_INSTEAD = {"sliding_window": "Set the config's sliding_window to None, and plan with Window(sliding_window)."}


def _refuse_cache(kwargs: dict[str, Any]) -> None:
    for name in ("cache", "past_key_values", "use_cache"):
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise UnsupportedByRing(f"{name} must be None on a ring; got {_brief(value)}. Pass use_cache=False.")


def _check_shapes(plan: Plan, query: Tensor, key: Tensor) -> None:
    rows, held = query.shape[2], plan.partition.local_tokens
    if rows != held:
        raise UnsupportedByRing(
            f"input must be this rank's shard of {held} tokens; got {rows}. Use plan.partition.shard_batch."
        )
    if key.shape[2] != rows:
        raise UnsupportedByRing(
            f"keys must be those of the same {rows} tokens as the queries; got {key.shape[2]}. "
            "A cache, or cross-attention, cannot be used on a ring."
        )


def _check_positions(plan: Plan, positions: Tensor | None) -> None:
    """Refuses the 0, 1, 2, ... that a model makes up when given none, unless they are the shard's own."""
    if positions is None:
        raise UnsupportedByRing("position_ids must be given on a ring; got none. Use plan.partition.positions().")
    if positions.device.type != "cpu" or positions.shape[-1] == 0:
        return  # comparing on a device would synchronise; `prepare` has filled them in there
    row = positions.reshape(-1, positions.shape[-1])[0]
    if not torch.equal(row, torch.arange(len(row))):
        return
    own = [plan.partition.positions(restart=restart) for restart in {False, _has_documents(plan)}]
    if not any(torch.equal(row, candidate.to(row.dtype)) for candidate in own):
        raise UnsupportedByRing(
            "position_ids must be this shard's global positions; got 0, 1, 2, ... "
            "Use plan.partition.positions(), or prepare(model), which fills them in."
        )


def _brief(value: Any) -> str:
    return f"a {type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
