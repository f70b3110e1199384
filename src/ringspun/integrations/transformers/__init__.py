"""Hugging Face Transformers on a ring: attention through `AttentionInterface`, with the plans as a keyword of
the call.

    model = prepare(LlamaForCausalLM(config))            # registers "ringspun" and selects it
    plan  = part.plan(Causal() & documents)              # every layer sees the same
    near  = plans(model, part, Causal() & documents)     # or: one plan per kind of layer (Gemma, gpt-oss, Mistral)
    model(input_ids=ids_local, position_ids=positions_local, ringspun_plan=near)

The plans' masks are the only masks. Whatever else a model or a caller asks of attention is either something the
ring does, or is refused: nothing is accepted and ignored. Importing this module changes nothing; `register`
and `prepare` do.

`layers` says which plan a layer gets, `refusals` what is refused, `probe` how a model is looked at before that.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from ringspun.errors import MissingExtra, UnsupportedByRing
from ringspun.integrations.transformers import refusals
from ringspun.integrations.transformers.layers import (
    COMPANION,
    PLAN_KEYWORD,
    Asked,
    Choice,
    asked,
    companion,
    plans,
    text_config,
)
from ringspun.integrations.transformers.probe import Probe, look
from ringspun.torch.plan import COMPANIONS

__all__ = ["NAME", "PLAN_KEYWORD", "attention", "no_mask", "plans", "prepare", "register"]

# Transformers takes special branches for names with `flash`, `sdpa`, `flex_attention` or `/` in them.
NAME = "ringspun"

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
    COMPANIONS[COMPANION] = companion


def prepare(model: M) -> M:
    """Puts `model` on the ring: registers, selects the attention, and checks the model and every later call.

    The model is run over a few tokens, to see what each layer asks of attention and that nothing else mixes
    tokens. A call without ``position_ids`` gets the plan's own (within documents, where the partition has them),
    since the model's default would rotate every shard as if it began at 0.

    Args:
        model: a Transformers model with its weights, changed in place: its attention is the ring's, its cache is off.

    Returns:
        `model`.

    Raises:
        UnsupportedByRing: it mixes tokens by something other than attention, asks for what the ring does not do, or
            its positions depend on what one rank holds. It is then as it was.
    """
    register()
    config: Any = text_config(model)
    refusals.model(model, config)
    before = model.config._attn_implementation, getattr(config, "use_cache", None)  # type: ignore[union-attr]
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    config.use_cache = False
    try:
        seen = look(model)
    except UnsupportedByRing:
        model.set_attn_implementation(before[0])  # type: ignore[operator]
        config.use_cache = before[1]
        raise
    model.register_forward_pre_hook(partial(_check_labels, seen.follows_shift_labels), with_kwargs=True)
    # On both: some models pass their base by (OPT), and some callers pass the head by.
    for part in {model, getattr(model, "base_model", model)}:
        part.register_forward_pre_hook(partial(_check_call, tuple(seen.layers)), with_kwargs=True)
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
        kwargs: `ringspun_plan`, `position_ids`, `sliding_window` (tokens; the layer's plan must have it), `softcap`
            (Gemma 2), `s_aux` (sinks, gpt-oss), and whatever else was given to the model.

    Returns:
        ``[B, T, H, D]``, and None for the weights, which no rank holds.

    Raises:
        UnsupportedByRing: anything is asked that the ring cannot honour.
    """
    given = kwargs.pop(PLAN_KEYWORD, None)
    window, softcap, sinks = (kwargs.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    refusals.layer(module, attention_mask, dropout, kwargs)
    if isinstance(given, Probe):
        return given.attention(module, query, key, value, window, kwargs.get("position_ids")), None
    choice = given if isinstance(given, Choice) else refusals.plan(given)
    plan = choice.plan_of(asked(module, window))
    refusals.shapes(choice.held, query, key)
    if choice is not given and getattr(module, "layer_idx", 0) in (0, None):  # else the model's call was checked
        refusals.positions(choice, kwargs.get("position_ids"))
    out = plan.attention(query, key, value, scale=scaling, softcap=softcap or None, sinks=sinks)
    return out.transpose(1, 2).contiguous(), None


def no_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """The mask function: makes no mask, for the plan has it; refuses a padding mask, which would be lost."""
    refusals.mask(attention_mask)


def _check_labels(follows: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks the labels of one call of the model before it runs."""
    refusals.labels(kwargs, follows, type(module).__name__)


def _check_call(
    layers: tuple[Asked, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Checks one call of the model before it runs, and fills in the positions."""
    if isinstance(kwargs.get(PLAN_KEYWORD), Choice | Probe):  # checked by the outer model; prepared a second time
        return args, kwargs
    choice = refusals.plan(kwargs.get(PLAN_KEYWORD))
    if len(args) > 1:
        raise UnsupportedByRing("model inputs after input_ids must be given by keyword on a ring.")
    refusals.mask(kwargs.get("attention_mask"))
    refusals.cache(kwargs)
    for layer in layers:
        choice.plan_of(layer)
    if kwargs.get("position_ids") is None:
        inputs = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        positions = choice.partition.positions(restart=choice.partition.documents is not None)
        kwargs["position_ids"] = positions[None].to(inputs.device if inputs is not None else positions.device)
    refusals.positions(choice, kwargs["position_ids"])
    kwargs[PLAN_KEYWORD] = choice
    return args, kwargs
