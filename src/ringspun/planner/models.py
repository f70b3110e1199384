"""Decoder models as data: by name (`models.toml`), or from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from os.path import isdir
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ringspun.errors import ConfigError
from ringspun.planner.reading import Entry, checked, read, squeezed, unknown

MOST = 1 << 32
"""Of any size: counts of parameters stay floats."""


class Model(Entry):
    """A decoder's sizes."""

    name: str = ""
    layers: int = Field(gt=0, le=MOST, description="Decoder layers.")
    hidden: int = Field(gt=0, le=MOST, description="Width of the residual stream.")
    intermediate: int = Field(gt=0, le=MOST, description="Width of the feed-forward layer.")
    heads: int = Field(gt=0, le=MOST, description="Query heads.")
    kv_heads: int = Field(default=0, ge=0, le=MOST, description="Key/value heads; divides `heads`. Default: as many.")
    head_size: int = Field(default=0, ge=0, le=MOST, description="Of one head. Default: hidden / heads.")
    vocab: int = Field(gt=0, le=MOST, description="Rows of the embedding.")
    tied: bool = Field(default=False, description="Whether the head is the embedding.")
    gated: bool = Field(default=True, description="Three matrices in the feed-forward layer; else two.")
    biases: Literal["none", "qkv", "all"] = Field(default="none", description="Which linear layers have one.")
    qk_norm: bool = Field(default=False, description="Norms of queries and keys per head.")
    norms: int = Field(default=2, gt=0, description="Norms of a layer.")
    positions: int = Field(default=0, ge=0, le=MOST, description="Rows of a table of positions.")
    window: int | None = Field(default=None, gt=0, description="Keys that a query of a sliding layer sees.")
    full_every: int = Field(default=0, ge=0, description="One layer of so many sees all keys; 0: all slide.")
    full: int | None = Field(default=None, ge=0, description="Or how many layers see all keys.")

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        heads, hidden = values.get("heads"), values.get("hidden")
        if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
            return values
        given = {key: value for key, value in values.items() if value is not None or key == "window"}
        if "head_size" not in given and hidden % heads:
            raise ValueError(f"heads must divide hidden, or head_size be given; got {heads} and hidden = {hidden}.")
        return {"kv_heads": heads, "head_size": hidden // heads, **given}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.kv_heads or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads; got {self.kv_heads} and heads = {self.heads}.")
        if not self.head_size:
            raise ValueError("head_size must be at least 1; got 0.")
        if self.full_every and self.window is None:
            raise ValueError(f"full_every must come with a window; got {self.full_every} and none.")
        if self.full is not None and (self.window is None or self.full > self.layers):
            raise ValueError(
                f"full must come with a window and be at most layers; got {self.full}, window = {self.window}, "
                f"layers = {self.layers}."
            )
        return self

    @property
    def q_width(self) -> int:
        """Elements of one token's queries."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Elements of one token's keys; values have as many."""
        return self.kv_heads * self.head_size

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward layer."""
        return 3 if self.gated else 2

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of a layer's matrices: what a token is multiplied by."""
        attention = 2 * self.hidden * (self.q_width + self.kv_width)
        return attention + self.ffn_matrices * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """All parameters of a layer."""
        full = self.biases == "all"
        qkv = (self.q_width + 2 * self.kv_width) if self.biases != "none" else 0
        rest = (2 * self.hidden + (self.ffn_matrices - 1) * self.intermediate) if full else 0
        norms = self.norms * self.hidden * (2 if full else 1) + (2 * self.head_size if self.qk_norm else 0)
        return self.layer_matrix_parameters + qkv + rest + norms

    @property
    def embedding_parameters(self) -> int:
        """Embedding, head and positions."""
        return ((1 if self.tied else 2) * self.vocab + self.positions) * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        last_norm = self.hidden * (2 if self.biases == "all" else 1)
        return self.layers * self.layer_parameters + self.embedding_parameters + last_norm

    @property
    def full_layers(self) -> int:
        """Layers that see all keys."""
        if self.window is None:
            return self.layers
        if self.full is not None:
            return self.full
        return self.layers // self.full_every if self.full_every else 0


@cache
def known_models() -> Mapping[str, Model]:
    """All models that are known by name."""
    tables = read(Path(str(files("ringspun.planner") / "models.toml")), "models")
    return {name: checked(Model, {**values, "name": name}, f"models.toml: {name}") for name, values in tables.items()}


def model(name: str) -> Model:
    """The model of that name, or the one that a `config.json` (or its folder) describes.

    Raises:
        ConfigError: no such name or file; with the nearest names.
    """
    path = Path(name)
    if path.suffix == ".json" or isdir(path):
        return from_config(path / "config.json" if isdir(path) else path)
    names = {squeezed(n): found for n, found in known_models().items()}
    if squeezed(name) not in names:
        raise ConfigError(unknown("model", name, known_models()) + " A Hugging Face config.json serves too.")
    return names[squeezed(name)]


_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "vocab": ("vocab_size",),
    "tied": ("tie_word_embeddings",),
}
"""A field, and what configurations call it."""
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"tied": True},
    "gpt_bigcode": {"tied": True},
    "opt": {"tied": True},
    "starcoder2": {"tied": True},
    "gpt_neox": {},
    "phi": {"norms": 1},
    "nemotron": {"biases": "none"},
}
"""Kinds of two matrices in the feed-forward layer, with biases everywhere, and what else they have."""


def from_config(path: Path) -> Model:
    """The model that a Hugging Face `config.json` describes.

    Raises:
        ConfigError: a file that is none, sizes that are missing or wrong, or a kind of layer that is not planned for.
    """
    return from_values(read(path, "config"), str(path), path.resolve().parent.name)


def from_values(values_read: Mapping[str, Any], source: str, name: str = "") -> Model:
    """The same of what a configuration holds, as `config.to_dict()` gives it.

    Args:
        source: for messages. name: where the configuration has none.
    Raises:
        ConfigError: see `from_config`.
    """
    config = values_read.get("text_config", values_read)
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: text_config must be a table; got {config!r}.")
    _refuse(config, source)
    kind = str(config.get("model_type", ""))
    values = {field: _first(config, names) for field, names in _NAMES.items()}
    if values["intermediate"] is None and kind == "gpt2" and isinstance(values["hidden"], int):
        values["intermediate"] = 4 * values["hidden"]
    values = {field: value for field, value in values.items() if value is not None}
    return checked(
        Model,
        {**values, "name": config.get("_name_or_path") or name, **_by_kind(config, kind)},
        source,
    )


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _refuse(config: Mapping[str, Any], source: str) -> None:
    experts = _first(config, _EXPERTS)
    if experts is not None:
        raise ConfigError(
            f"{source}: model must be dense; got a mixture of {experts} experts, which is not planned for."
        )
    if config.get("kv_lora_rank"):
        raise ConfigError(
            f"{source}: keys and values must be projected from the tokens; got kv_lora_rank = "
            f"{config['kv_lora_rank']}. Latent attention is not planned for."
        )
    types = config.get("layer_types") or []
    if not isinstance(types, list):
        raise ConfigError(f"{source}: layer_types must be a list; got {types!r}.")
    other = {str(t) for t in types} - {"full_attention", "sliding_attention"}
    if other:
        raise ConfigError(f"{source}: layers must be full or sliding attention; got {', '.join(sorted(other))}.")
    layers = _first(config, _NAMES["layers"])
    if types and len(types) != layers:
        raise ConfigError(f"{source}: layer_types must name each of {layers} layers; got {len(types)}.")


def _by_kind(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What a configuration says by its kind alone."""
    found: dict[str, Any] = {}
    if kind.startswith("gemma"):
        found |= {"tied": config.get("tie_word_embeddings", True), "norms": 2 if kind == "gemma" else 4}
    if kind in _PLAIN:
        found |= {"gated": False, "biases": "all", "positions": _positions(config, kind), **_PLAIN[kind]}
    elif kind == "qwen2" or config.get("attention_bias"):
        found["biases"] = "qkv"
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        found["kv_heads"] = 1
    found["qk_norm"] = kind in ("qwen3", "gemma3", "gemma3_text")
    return found | _window(config, kind)


def _positions(config: Mapping[str, Any], kind: str) -> Any:
    if kind == "opt":
        most = config.get("max_position_embeddings", 2048)
        return most + 2 if isinstance(most, int) else most  # its table begins two rows early
    return config.get("n_positions", 1024) if kind in ("gpt2", "gpt_bigcode") else 0


def _window(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    window, types = config.get("sliding_window"), config.get("layer_types")
    qwen = kind.startswith("qwen")
    if window is None or not config.get("use_sliding_window", not qwen):
        return {}
    if types:
        return {"window": window, "full": types.count("full_attention")} if "sliding_attention" in types else {}
    if qwen:  # the first layers see all keys
        most, layers = config.get("max_window_layers", 28), _first(config, _NAMES["layers"])
        return {
            "window": window,
            "full": min(most, layers) if isinstance(most, int) and isinstance(layers, int) else most,
        }
    every = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}.get(kind, 0)
    return {"window": window, "full_every": config.get("sliding_window_pattern", every)}
