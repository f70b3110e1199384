"""What a training run is, read from a TOML file. Every field says its unit, default and effect."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from ringspun.core.partition import Partition
from ringspun.core.text import parse_layout
from ringspun.errors import ConfigError, RingspunWarning
from ringspun.train.context_schedule import AnyRope
from ringspun.train.data.config import DataConfig
from ringspun.train.parallel.sharding import SHARDED, Sharding, check_sharding
from ringspun.train.sections import Section, validated
from ringspun.train.stages import MESH, Decay, Kept, Leg, TrainStage, check_decay, legs

_OF_STAGES = ("seq_len", "steps", "warmup_steps", "final_lr", "decay", "decay_steps")
"""Keys that each stage says for itself."""


class ModelConfig(Section):
    """The `[model]` table: a Llama."""

    layers: int = Field(gt=0, description="Decoder layers.")
    hidden_size: int = Field(gt=0, description="Width of the residual stream; a multiple of 2 * `heads`.")
    intermediate_size: int = Field(gt=0, description="Width of the feed-forward layer.")
    heads: int = Field(gt=0, description="Query heads.")
    kv_heads: int | None = Field(
        default=None, gt=0, description="Key/value heads; divides `heads`. Default: as many as `heads`."
    )
    rope_theta: float = Field(
        default=10_000.0, gt=0, allow_inf_nan=False, description="Base of the rotary frequencies."
    )
    vocab_size: int | None = Field(
        default=None, gt=0, description="Token numbers. Default: as many as the tokenizer has; of bytes 257."
    )

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.heads

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size must be a multiple of 2 * heads; got {self.hidden_size}, heads = {self.heads}. "
                "Rotary positions need an even head size."
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads must divide heads; got {self.kv_heads} and heads = {self.heads}.")
        return self


class EvaluateConfig(Section):
    """The `[evaluate]` table: the loss on sequences that are not trained on, where stages switch and at the end."""

    sequences: int = Field(default=4, gt=0, description="Held-out sequences at each length.")


def every_rank_holds_some(seq_len: int, ranks: int, layout: str) -> bool:
    """Whether each of `ranks` gets a token of a sequence."""
    return ranks <= seq_len and bool(Partition(seq_len, ranks, parse_layout(layout)).tokens.all())


class TrainConfig(Section):
    """A whole run."""

    model: ModelConfig | None = Field(default=None, description="A Llama with random weights; or give `init`.")
    data: DataConfig = Field(default_factory=DataConfig, description="What is read.")
    evaluate: EvaluateConfig | None = Field(default=None, description="Loss on held-out sequences.")
    stages: tuple[TrainStage, ...] = Field(
        default=(), strict=False, description="Stages, one after another, instead of `seq_len` and `steps`."
    )
    init: Path | None = Field(
        default=None,
        strict=False,
        description="Folder of a Hugging Face causal language model to start from: its weights, config and tokenizer; "
        "`[model]` is then not given. From the config's folder on.",
    )
    recipe: Path | None = Field(
        default=None,
        strict=False,
        description="Python file that says what a config cannot; see [a recipe](extending.md#a-recipe). From the "
        "config's folder on.",
    )
    rope: AnyRope | None = Field(
        default=None,
        description="Rotations: a theta, or a table of Hugging Face's rope_parameters. Default: the model's own.",
    )
    seq_len: int = Field(gt=1, description="Tokens of one sequence.")
    batch_size: int = Field(
        default=1, gt=0, description="Sequences of one optimizer step; a multiple of `dp_replicate` * `dp_shard`."
    )
    ranks: int = Field(
        default=1,
        gt=0,
        le=4096,
        description="Processes that share each sequence. Any number that leaves each of them a token.",
    )
    ulysses: int = Field(
        default=1, gt=0, description="Of `ranks`, how many split the heads of one share of the sequence; a divisor."
    )
    dp_replicate: int = Field(
        default=1, gt=0, description="Copies of these ranks that read other sequences; each holds the weights again."
    )
    dp_shard: int = Field(
        default=1, gt=0, description="Copies that read other sequences and share one set of weights; see `shard`."
    )
    shard: Sharding = Field(
        default="none",
        description="Who holds the weights: all ranks (none; ddp: PyTorch's DDP); fsdp cuts them over `dp_shard` * "
        "`ranks`, hsdp does so in each of `dp_replicate`.",
    )
    layout: str = Field(
        default="zigzag",
        description="Who holds which token: contiguous, zigzag, striped, striped(128), documentzigzag, balanced.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16",
        description="bfloat16: computed by autocast, or by FSDP2's policy; weights stay float32. float32: all.",
    )
    checkpointing: Kept = Field(
        default="none",
        description="What of each layer is kept for backward: everything; its input; that and what attention gave; "
        "that and the keys and values of `kept_hops` hops of the ring. The rest is computed again. See "
        "[training memory](training-memory.md#checkpointing).",
    )
    kept_hops: int = Field(
        default=0,
        ge=0,
        description='Hops of the ring whose keys and values are kept; at least 1 with `checkpointing = "ring_step"`, '
        "else 0. `ranks` - 1 are all.",
    )
    feed_forward_block: int | None = Field(
        default=None,
        gt=0,
        description="Tokens whose feed-forward activations are alive at once; backward computes them again. "
        "Default: all of a rank's, kept.",
    )
    loss_chunk: int = Field(default=1024, gt=0, description="Tokens whose logits are alive at once.")
    steps: int = Field(gt=0, description="Optimizer steps of the whole run; or give [[stages]].")
    lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False, description="Peak learning rate of AdamW.")
    final_lr: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Learning rate at the last step; at most `lr`.",
    )
    decay: Decay = Field(default="cosine", description="How the learning rate falls to `final_lr`; none: it stays.")
    decay_steps: int | None = Field(
        default=None, gt=0, description="Steps of the decay, the last ones. Default: all after the warm-up."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up from 0; less than `steps`.")
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False, description="AdamW's decay, of matrices only.")
    clip_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to this norm; inf never clips.")
    seed: int = Field(
        default=0, ge=0, lt=1 << 64, description="Of the initial weights and the order of the documents; 64 bits."
    )
    checkpoint_every: int = Field(
        default=0,
        ge=0,
        description="Steps between checkpoints; 0: only at the end, where there always is one.",
    )
    keep_checkpoints: int = Field(default=2, gt=0, description="Newest checkpoints that are kept.")
    checkpoints: Literal["whole", "sharded"] = Field(
        default="whole",
        description="whole: rank 0 gathers and writes. sharded: each rank its own part, by PyTorch's DCP. Either loads "
        "on any ranks.",
    )
    peak_flops: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="FLOP/s of one rank at its peak, for MFU. Default: measured on a CPU, by a large matrix product.",
    )
    output: Path = Field(
        default=Path("runs/train"),
        strict=False,
        description="Folder of checkpoints, logs and the loss curve.",
    )

    @property
    def legs(self) -> tuple[Leg, ...]:
        """The stages as they are trained; without stages one, of this config."""
        return legs(self)

    @property
    def data_size(self) -> int:
        """Groups of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def processes(self) -> int:
        """Ranks of the whole job."""
        return self.legs[0].config.processes if self.stages else self.data_size * self.ranks

    @property
    def needs_mesh(self) -> bool:
        """Whether the ranks are more than one ring with the weights whole on each, in some stage."""
        if self.stages:
            return any(leg.config.needs_mesh for leg in self.legs)
        return self.data_size > 1 or self.ulysses > 1 or self.shard != "none"

    @model_validator(mode="before")
    @classmethod
    def _length_is_of_stages(cls, values: Any) -> Any:
        """With stages, length and steps are theirs: the first one's length, all steps."""
        if not isinstance(values, Mapping) or not values.get("stages"):
            return values
        given = [name for name in _OF_STAGES if name in values]
        if given:
            raise ValueError(
                f"{given[0]} must be said in each of [[stages]], not at the top; got {values[given[0]]!r}. Move it."
            )
        try:
            stages = TypeAdapter(tuple[TrainStage, ...]).validate_python(values["stages"], strict=False)
        except ValidationError:
            return {**values, "seq_len": 2, "steps": 1}  # its own field says what is wrong
        steps = sum(stage.step_count for stage in stages)
        return {**values, "seq_len": stages[0].seq_len, "steps": steps, "decay": "none"}

    @field_validator("layout")
    @classmethod
    def _layout_parses(cls, text: str) -> str:
        parse_layout(text)
        return text

    @field_validator("output", mode="before")
    @classmethod
    def _output_is_named(cls, path: Any) -> Any:
        if isinstance(path, str) and not path.strip():
            raise ValueError(f"output must name a folder; got {path!r}. Write '.' for the current one.")
        if "\0" in str(path):
            raise ValueError(f"output must name a folder; got {path!r}, which holds a NUL.")
        return path

    @model_validator(mode="after")
    def _weights_come_from_one_place(self) -> Self:
        if self.model is not None and self.init is not None:
            raise ValueError("model must not be given with init, whose config says it. Remove [model], or init.")
        if self.model is None and self.init is None and self.recipe is None:
            raise ValueError("key 'model' must be given, or init, or a recipe that builds one. A Llama: [model].")
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        """Each stage is held to what a run without stages is held to."""
        if not self.stages:
            return self
        idle = [name for name in MESH if getattr(self, name) > 1]
        if idle and all(stage.mesh for stage in self.stages):
            name = idle[0]
            raise ValueError(f"{name} must not be given where each stage has a mesh; it would have no effect.")
        for one, two in pairwise(self.stages):
            if two.seq_len < one.seq_len:
                warnings.warn(
                    f"seq_len should grow from stage to stage; got {two.seq_len} after {one.seq_len}.",
                    RingspunWarning,
                    stacklevel=2,
                )
        legs(self)
        return self

    @model_validator(mode="after")
    def _every_rank_has_a_token(self) -> Self:
        if self.stages:
            return self
        if every_rank_holds_some(self.seq_len, self.ranks, self.layout):
            return self
        raise ValueError(
            f"every rank must hold a token; got seq_len = {self.seq_len}, ranks = {self.ranks}, "
            f"layout = {self.layout!r}. Give fewer ranks or a longer sequence."
        )

    @model_validator(mode="after")
    def _hops_are_kept(self) -> Self:
        if self.stages:
            return self
        if self.checkpointing == "ring_step" and self.ranks == self.ulysses:
            raise ValueError(
                "checkpointing must not be 'ring_step' in a ring of 1, which has no hops; got ranks = "
                f"{self.ranks}, ulysses = {self.ulysses}. Set 'attention'."
            )
        if (self.checkpointing == "ring_step") == (self.kept_hops > 0):
            return self
        raise ValueError(
            f"kept_hops must be at least 1 with checkpointing = 'ring_step', and 0 else; got {self.kept_hops} with "
            f"{self.checkpointing!r}."
        )

    @model_validator(mode="after")
    def _mesh_fits(self) -> Self:
        if self.stages:
            return self
        if self.ranks % self.ulysses:
            raise ValueError(f"ulysses must divide ranks; got {self.ulysses} and ranks = {self.ranks}.")
        if self.model is not None and self.ulysses > self.model.heads:
            raise ValueError(f"ulysses must be at most model.heads, {self.model.heads}; got {self.ulysses}.")
        if self.batch_size % self.data_size:
            more = -(-self.batch_size // self.data_size) * self.data_size
            raise ValueError(
                f"batch_size must be a multiple of dp_replicate * dp_shard, {self.data_size}; got {self.batch_size}. "
                f"Set {more}."
            )
        try:
            check_sharding(self.shard, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard)
        except ConfigError as problem:
            raise ValueError(str(problem)) from None
        if self.checkpoints == "sharded" and self.shard not in SHARDED:
            raise ValueError(
                "checkpoints must be 'whole' where all ranks hold all weights; got 'sharded' and shard = "
                f"{self.shard!r}."
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.warmup_steps >= self.steps and self.decay != "none":
            raise ValueError(f"warmup_steps must be less than steps; got {self.warmup_steps} and steps = {self.steps}.")
        if self.final_lr > self.lr:
            raise ValueError(f"final_lr must be at most lr; got {self.final_lr} and lr = {self.lr}.")
        check_decay(self.decay, self.decay_steps, self.final_lr, self.steps - self.warmup_steps)
        if self.checkpoint_every > self.steps:
            raise ValueError(
                f"checkpoint_every must be at most steps; got {self.checkpoint_every}, steps = {self.steps}."
            )
        return self


def load_config(path: Path, **overrides: Any) -> TrainConfig:
    """The run that the TOML file `path` describes.

    Args:
        path: the file.
        overrides: values that replace top-level keys of the file; None leaves the file's.

    Raises:
        ConfigError: naming the file, the dotted key, and for an unknown key the nearest known one.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: config must be a readable file; {_reason(problem)}.") from None
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{path}: config must be TOML; {problem}.") from None
    except RecursionError:
        raise ConfigError(f"{path}: config must be TOML; it is nested too deeply.") from None
    _from_folder(values, ("init", "recipe"), path.parent)
    _from_folder(values.get("data"), ("path", "tokenizer", "held_out"), path.parent)
    values |= {key: value for key, value in overrides.items() if value is not None}
    return validated(TrainConfig, values, source=str(path))


def _reason(problem: Exception) -> str:
    return str(getattr(problem, "strerror", None) or problem)


def _from_folder(table: Any, keys: tuple[str, ...], folder: Path) -> None:
    """Paths of a table as seen from here; whatever is no path is for the table's own words."""
    for key in keys if isinstance(table, dict) else ():
        given = table.get(key)
        if isinstance(given, str):
            table[key] = str(folder / given)
        elif isinstance(given, list) and all(isinstance(one, str) for one in given):
            table[key] = [str(folder / one) for one in given]
