"""What a ring cannot honour, in the words of the model or call that asks for it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ringspun.errors import RingspunWarning, UnsupportedByRing
from ringspun.integrations.transformers.layers import KINDS, PLAN_KEYWORD, Choice, layer_kinds, name_of

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
_ROPE_OF_LENGTH = {"dynamic", "longrope"}
_CACHES = ("cache", "past_key_values", "use_cache")

_WEIGHTS_MESSAGE = "output_attentions must be False on a ring; no rank holds the weights."
_MASK_MESSAGE = (
    "attention_mask must be None on a ring; got {}. An all-ones mask: leave it out. Padding: say it in the plan, "
    "plan([Causal() & Documents.from_attention_mask(row) for row in attention_mask])."
)
_BALANCE_MESSAGE = (
    "output_router_logits must be False on a ring; got True. The model would add the balance loss of this shard's "
    "tokens alone, and the mean of those is not that of the whole sequence."
)


_POSITIONS_MESSAGE = (
    "position_ids must be this shard's global positions; got 0, 1, 2, ... "
    "Use plan.partition.positions(), or prepare(model), which fills them in."
)


def model(model: nn.Module, config: Any) -> None:
    """Refuses what would run without an error and be wrong, as far as config and modules tell."""
    name = type(model).__name__
    _config(config)
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedByRing(
            f"model must call attention through AttentionInterface; {name} does not, so its attention would stay "
            "inside each shard."
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UnsupportedByRing(
                f"model must not normalise over tokens; {name} has a {type(module).__name__} at {path}, which would "
                "see those of one shard."
            )
        kinds = getattr(module, "rope_type", None)
        found = _ROPE_OF_LENGTH & set(kinds.values() if isinstance(kinds, dict) else [kinds])
        if found:
            raise UnsupportedByRing(
                f"rope_type must not depend on the longest position of a call on a ring; got {found.pop()!r} at "
                f"{path}. Ranks would rotate by different frequencies. Before prepare, fix them for a length that all "
                "ranks know: ringspun.train.rope.fixed_rope.fix_rope(model, seq_len=...)."
            )
        _frequencies(path, module)


def _frequencies(path: str, module: nn.Module) -> None:
    """Warns of rotary frequencies that a cast of the model has rounded: the model is another, in one process too."""
    for name, x in module.named_buffers(prefix=path, recurse=False):
        if name.endswith("inv_freq") and x.dtype in (torch.bfloat16, torch.float16):
            warnings.warn(
                f"{name} should be float32; got {x.dtype}. A cast of the model rounded its rotary frequencies: angles "
                "are off by radians from some hundred tokens on. Load it with dtype=..., or write "
                "ringspun.train.rope.fixed_rope.fix_rope(model, seq_len=...) before prepare.",
                RingspunWarning,
                stacklevel=4,
            )
            return


def _config(config: Any) -> None:
    for index, kind in enumerate(layer_kinds(config)):
        if kind not in KINDS:
            raise UnsupportedByRing(
                f"layer_types must be {', '.join(KINDS)} on a ring; got {kind} for layer {index}. "
                "Its state would begin anew at every shard."
            )
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedByRing(
            f"use_bidirectional_attention must be off on a ring; got {config.use_bidirectional_attention!r}."
        )
    if getattr(config, "attn_temperature_tuning", None):
        raise UnsupportedByRing(
            "attn_temperature_tuning must be off on a ring; the model would count the positions that it scales by "
            "from 0 in every shard."
        )
    if getattr(config, "output_attentions", False):
        raise UnsupportedByRing(_WEIGHTS_MESSAGE)
    if getattr(config, "output_router_logits", False):
        raise UnsupportedByRing(_BALANCE_MESSAGE)


def labels(kwargs: dict[str, Any], follows_shift_labels: bool, name: str) -> None:
    """Refuses labels that a model would shift inside the shard, or average over the shard's targets alone."""
    if kwargs.get("output_router_logits"):
        raise UnsupportedByRing(_BALANCE_MESSAGE)
    if kwargs.get("labels") is None:
        return
    for needed in ("shift_labels", "num_items_in_batch"):
        if kwargs.get(needed) is None:
            raise UnsupportedByRing(
                f"labels must come with {needed} on a ring; got none. The model would shift or average them inside "
                f"the shard. Write model(**part.shard_batch(batch), {PLAN_KEYWORD}=plan)."
            )
    if not follows_shift_labels:
        raise UnsupportedByRing(
            f"labels must be None on a ring; {name} shifts them itself, whatever shift_labels says. "
            "Compute the loss from its logits: ringspun.train.losses.loss.token_loss."
        )


def mask(attention_mask: Any) -> None:
    """Refuses a mask of the model's or the caller's: the plan has it."""
    if attention_mask is not None:
        raise UnsupportedByRing(_MASK_MESSAGE.format(brief(attention_mask)))


def layer(module: nn.Module, attention_mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuses what one layer asks for."""
    mask(attention_mask)
    if dropout and module.training:
        raise UnsupportedByRing(
            f"dropout must be 0 in training; got {dropout} in {name_of(module)}. "
            "Set attention_dropout = 0 in the model's config (GPT-2 calls it attn_pdrop)."
        )
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise UnsupportedByRing(_WEIGHTS_MESSAGE)
    cache(kwargs)
    for name, value in kwargs.items():
        if name in _HARMLESS or value is None or value is False:
            continue
        raise UnsupportedByRing(
            f"{name} must be None on a ring; got {brief(value)} in {name_of(module)}. The ring would ignore it. "
            "Documents belong in the plan's mask."
        )


def cache(kwargs: dict[str, Any]) -> None:
    """Refuses keys and values of earlier calls."""
    for name in _CACHES:
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise UnsupportedByRing(f"{name} must be None on a ring; got {brief(value)}. Pass use_cache=False.")


def plan(given: Any) -> Choice:
    """The plans of a call; refuses none at all."""
    if given is None:
        raise UnsupportedByRing(
            f"{PLAN_KEYWORD} must be given to every call of the model; got none. "
            f"Write model(..., {PLAN_KEYWORD}=plan) with the plan of this batch."
        )
    return Choice.of(given)


def shapes(held: int, query: Tensor, key: Tensor) -> None:
    """Refuses rows that are not the `held` tokens of this rank's shard."""
    rows = query.shape[2]
    if rows != held:
        raise UnsupportedByRing(
            f"input must be this rank's shard of {held} tokens; got {rows}. Use plan.partition.shard_batch."
        )
    if key.shape[2] != rows:
        raise UnsupportedByRing(
            f"keys must be those of the same {rows} tokens as the queries; got {key.shape[2]}. "
            "A cache, or cross-attention, cannot be used on a ring."
        )


def positions(choice: Choice, given: Tensor | None) -> None:
    """Refuses the 0, 1, 2, ... that a model makes up when given none, unless they are the shard's own."""
    if given is None:
        raise UnsupportedByRing("position_ids must be given on a ring; got none. Use plan.partition.positions().")
    if given.device.type != "cpu" or given.shape[-1] == 0:
        return  # comparing on a device would synchronise; `prepare` has filled them in there
    row = given.reshape(-1, given.shape[-1])[0]
    if torch.compiler.is_compiling():  # a traced call cannot branch on numbers: it asserts, on the last of them
        right = row[-1] == choice.last[0]
        for last in choice.last[1:]:
            right = right | (row[-1] == last)
        torch._assert_async(right, _POSITIONS_MESSAGE)
    elif torch.equal(row, torch.arange(len(row))) and not any(
        torch.equal(row, own.to(row.dtype)) for own in choice.own_positions()
    ):
        raise UnsupportedByRing(_POSITIONS_MESSAGE)


def brief(value: Any) -> str:
    """What an error shows of a value."""
    return f"a {type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
