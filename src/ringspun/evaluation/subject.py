"""A checkpoint, the newest one of a run, or a Hugging Face model's folder, ready to be asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from ringspun.errors import CheckpointError, ConfigError
from ringspun.evaluation.exam import Tokenize
from ringspun.evaluation.judged import Judged
from ringspun.evaluation.texts import ByteTokenizer
from ringspun.train.checkpoints.checkpointing import Checkpoint, latest, restore
from ringspun.train.checkpoints.export import model_of
from ringspun.train.checkpoints.manifests import MANIFEST, STATE, manifest_fault
from ringspun.train.checkpoints.saved_model import no_progress_bar
from ringspun.train.config import TrainConfig
from ringspun.train.init import TOKENIZER_FILES
from ringspun.train.model import build_model, is_transformers
from ringspun.train.output import CHECKPOINTS
from ringspun.train.recipe import Recipe
from ringspun.train.rope.fixed_rope import FixedRope, fix_rope
from ringspun.train.rope.reading import TYPES
from ringspun.train.sections import validated


@dataclass(frozen=True)
class Found:
    """What is asked, found but not loaded.

    Args:
        folder: with the model's files, for `from_pretrained` where it is Hugging Face's. words: what it is, in a few.
        checkpoint: of a run; None: a Hugging Face model's folder.
    """

    folder: Path
    words: str
    checkpoint: Checkpoint | None = None

    def tokenizer(self) -> Any:
        """The model's own, or bytes where it has none. Anything with ``encode(text, add_special_tokens=False)``."""
        if not any((self.folder / name).is_file() for name in TOKENIZER_FILES):
            return ByteTokenizer()
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder, local_files_only=True)


def find(place: Path, *, warn: Callable[[str], None] = print) -> Found:
    """The newest whole checkpoint of a run's folder, a checkpoint's folder, or a Hugging Face model's.

    Raises:
        ConfigError: it is none of them. CheckpointError: it is damaged, or a run without checkpoints.
    """
    if (place / CHECKPOINTS).is_dir():
        found = latest(place / CHECKPOINTS, warn=warn)
        if found is None:
            raise CheckpointError(f"a run must hold a checkpoint to be asked; {place} has none yet.")
        return Found(found.model_path, f"{place}, step {found.step}", found)
    if (place / STATE).is_file() or (place / MANIFEST).is_file():
        found = _checkpoint(place)
        return Found(found.model_path, f"{place}, step {found.step}", found)
    if (place / "config.json").is_file():
        return Found(place, str(place))
    raise ConfigError(
        f"model must be a run's folder, a checkpoint's (step-...), or a Hugging Face model's, with config.json; got "
        f"{place}."
    )


def _checkpoint(place: Path) -> Checkpoint:
    try:
        fault = manifest_fault(place, json.loads((place / MANIFEST).read_bytes()))
        state = json.loads((place / STATE).read_bytes())
        step = int(state["step"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(f"checkpoint {place} must be whole; {problem}.") from None
    if fault is not None:
        raise CheckpointError(f"checkpoint {place} must be whole; {fault}.")
    return Checkpoint(place, step, state)


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode, its weights float32 and whole on this process.

    Args:
        words: what it is.
    """

    model: nn.Module
    tokenizer: Any
    words: str

    @classmethod
    def load(cls, found: Found, recipe: Path | None = None) -> Self:
        """Loads a model.

        Args:
            recipe: the file whose `build_model` makes it; None: Hugging Face's, or what the run's config names.
        Raises:
            CheckpointError, ConfigError: it cannot be loaded.
        """
        is_theirs = (found.folder / "config.json").is_file() and recipe is None
        model = _of_transformers(found) if is_theirs else _of_recipe(found, recipe)
        return cls(model.eval(), found.tokenizer(), found.words)

    @property
    def tokens(self) -> str:
        """What its tokens are, in words."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return "tokens are bytes"
        return f"tokens are those of the model's {type(self.tokenizer).__name__}"

    def judged(self, seq_len: int) -> Judged:
        """The model as it is asked about texts of a length, for which its rotations are fixed if they depend on it.

        Raises:
            ConfigError: it has no positions that go so far. UnsupportedByRing: as `prepare`.
        """
        if is_transformers(self.model):
            _check_positions(self.model, seq_len)
        return self._judged

    @cached_property
    def _judged(self) -> Judged:
        return Judged.of(self.model)  # once: a model that is on the ring already is not looked at


def _of_transformers(found: Found) -> nn.Module:
    from transformers import AutoModelForCausalLM

    shards = None if found.checkpoint is None else found.checkpoint.shards
    try:
        with no_progress_bar():
            if found.checkpoint is not None and shards is not None:
                return model_of(found.checkpoint, shards).float()  # type: ignore[no-any-return]
            model: nn.Module = AutoModelForCausalLM.from_pretrained(
                found.folder, dtype=torch.float32, local_files_only=True
            )
            return model
    except (OSError, ValueError) as problem:
        raise ConfigError(f"model must be loadable by from_pretrained; {found.folder}: {problem}") from None


def _of_recipe(found: Found, recipe: Path | None) -> nn.Module:
    if found.checkpoint is None:
        raise ConfigError(f"recipe must come with a run or a checkpoint of it; got {found.folder}. Leave it out.")
    config = validated(TrainConfig, found.checkpoint.state["config"], source=str(found.checkpoint.path))
    path = config.recipe if recipe is None else recipe
    if path is None or not path.is_file():
        raise ConfigError(
            f"recipe must be the file whose build_model made {found.checkpoint.path}; got {path}. Give --recipe FILE."
        )
    model = build_model(config, on_ring=False, recipe=Recipe.read(path))
    restore(found.checkpoint, model=model, optimizer=None)
    return model


def tokenize_by(tokenizer: Any) -> Tokenize:
    """Text -> tokens, without special ones."""

    def tokenize(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return tokenize


def start_of(tokenizer: Any) -> tuple[int, ...]:
    """What a tokenizer puts ahead of every text: its BOS, if anything."""
    begin = getattr(tokenizer, "bos_token_id", None)
    return () if begin is None or begin not in tokenizer.encode("") else (int(begin),)


def _check_positions(model: Any, seq_len: int) -> None:
    """Fixes rotations that depend on the length; refuses a table of positions that ends before it."""
    fixed = [module.needs_length for module in model.modules() if isinstance(module, FixedRope)]
    kinds = [kind for module in model.modules() if (kind := getattr(module, "rope_type", None)) is not None]
    names = [name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else (kind,))]
    if any(fixed) or any(name in TYPES and TYPES[name].needs_length for name in names):
        fix_rope(model, seq_len=seq_len)
    if fixed or kinds:
        return
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and seq_len > most:
        raise ConfigError(f"seq-len must be at most the {most:,} positions that the model has; got {seq_len:,}.")
