"""Reading rotations from a Hugging Face config, as Transformers reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

from ringspun.errors import ConfigError
from ringspun.train.rope.base import ORIGINAL, OURS, THEIRS, Rope
from ringspun.train.rope.scalings import Default, Dynamic, Linear, Llama3, LongRope, Ntk, Proportional, Yarn

TYPES: dict[str, type[Rope]] = {
    kind.rope_type: kind for kind in (Default, Linear, Ntk, Dynamic, Yarn, LongRope, Llama3, Proportional)
}
"""The scaling types by Hugging Face's name; `ntk` is ours."""


def from_parameters(parameters: Mapping[str, Any], *, max_position_embeddings: int | None = None) -> Rope:
    """The value that Hugging Face's `rope_parameters` (or the older `rope_scaling`) describe.

    Args:
        parameters: of one kind of layer; without `rope_theta` it is 10,000.
        max_position_embeddings: the config's, where the parameters leave the original length, or the factor, to it.
    Raises:
        ConfigError: an unknown type, a missing or unknown field, a value out of range.
    """
    given = {OURS.get(k, k): v for k, v in parameters.items() if v is not None and k not in ("rope_type", "type")}
    kind = _type_of(parameters)
    known = {f.name: f for f in fields(kind)}
    _fill(kind, known, given, max_position_embeddings)
    for name in sorted(given.keys() - known.keys()):
        raise ConfigError(
            f"rope_parameters must hold what {kind.rope_type} knows; got {name}. It knows "
            f"{', '.join(THEIRS.get(k, k) for k in known)}."
        )
    missing = [k for k, f in known.items() if f.default is MISSING and k not in given]
    if missing:
        raise ConfigError(f"rope_parameters must hold {missing[0]} for {kind.rope_type}; got none.")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return kind(**values)


def from_config(config: Any, layer_type: str | None = None) -> Rope:
    """The value of a Hugging Face config.

    Args:
        config: a `PreTrainedConfig`, or the mapping in its `config.json`. layer_type: whose, where each kind of
            layer has its own (Gemma 3).
    Raises:
        ConfigError: as `from_parameters`; no `layer_type` where there are several, or an unknown one.
    """
    config = SimpleNamespace(**config) if isinstance(config, Mapping) else config
    parameters: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [k for k, v in parameters.items() if isinstance(v, Mapping)]
    if nested:
        if layer_type not in nested:
            raise ConfigError(f"layer_type must be one of {', '.join(nested)}; got {layer_type!r}.")
        parameters = parameters[layer_type]
    own = {k: getattr(config, k, None) for k in ("rope_theta", "partial_rotary_factor")}
    parameters = {k: v for k, v in own.items() if v is not None} | dict(parameters)
    original = getattr(config, ORIGINAL, None)
    if original is not None and not nested and ORIGINAL in {f.name for f in fields(_type_of(parameters))}:
        parameters[ORIGINAL] = original  # Phi-3 keeps it beside the parameters, and it wins
    return from_parameters(parameters, max_position_embeddings=getattr(config, "max_position_embeddings", None))


def head_size_of(config: Any) -> int:
    """Dims of one head, as Transformers takes them from a config."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _type_of(parameters: Mapping[str, Any]) -> type[Rope]:
    name = parameters.get("rope_type", parameters.get("type")) or "default"
    if name not in TYPES:
        raise ConfigError(f"rope_type must be one of {', '.join(TYPES)}; got {name!r}.")
    return TYPES[name]


def _fill(kind: type[Rope], known: Mapping[str, Any], given: dict[str, Any], longest: int | None) -> None:
    """Puts into `given` what Transformers takes from the config's `max_position_embeddings`."""
    if longest is None or ORIGINAL not in known:
        return
    if kind is Dynamic and given.get(ORIGINAL, longest) != longest:
        raise ConfigError(
            f"{ORIGINAL} must be the config's max_position_embeddings, {longest}, for dynamic; got "
            f"{given[ORIGINAL]}. Transformers goes by the latter; take the former out."
        )
    original = given.setdefault(ORIGINAL, longest)
    if kind in (Yarn, LongRope):
        given.setdefault("factor", longest / original)
