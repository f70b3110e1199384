"""A run that starts from a Hugging Face checkpoint: its weights, its config, its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringspun.errors import ConfigError
from ringspun.train.checkpoints.saved_model import no_progress_bar

if TYPE_CHECKING:
    from torch import nn

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "chat_template.json"),
)
"""What a tokenizer may consist of, by Transformers' names."""


def check_init(folder: Path) -> dict[str, Any]:
    """Looks at a checkpoint without loading it; its config.

    Raises:
        ConfigError: it is no folder of a causal language model with safetensors weights.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ConfigError(
            f"init must be a folder with a Hugging Face checkpoint; got {folder} ({path.name}: {reason})."
        ) from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ConfigError(f"init must have a config.json with a model_type; {path} has none.")
    kinds = config.get("architectures") or []
    if kinds and not any("CausalLM" in kind or kind == "GPT2LMHeadModel" for kind in kinds):
        raise ConfigError(f"init must be a causal language model; {folder} is {', '.join(kinds)}.")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"init must have its weights in safetensors files; {folder} has none.")
    return config


def init_shapes(folder: Path) -> nn.Module:
    """The model of a checkpoint without any numbers, on the meta device: nothing is allocated.

    Raises:
        ConfigError: as `check_init`, or Transformers knows no such model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    check_init(folder)
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, RuntimeError) as problem:
        raise _not_loadable(folder, problem) from None
    return model


def load_init(folder: Path) -> nn.Module:
    """The model of a checkpoint, in float32, ready to be trained.

    Raises:
        ConfigError: as `check_init`; it cannot be loaded, or lacks weights, which would then be random.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    check_init(folder)
    try:
        with no_progress_bar():
            model, told = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as problem:
        raise _not_loadable(folder, problem) from None
    if told["missing_keys"] or told["mismatched_keys"]:
        odd = sorted(map(str, [*told["missing_keys"], *told["mismatched_keys"]]))
        raise ConfigError(f"init must have all weights of its config; {folder} lacks {odd[0]} ({len(odd)} in all).")
    loaded: nn.Module = model
    return loaded.train()


def _not_loadable(folder: Path, problem: Exception) -> ConfigError:
    return ConfigError(f"init must be loadable by from_pretrained; {folder}: {problem}")


def tokenizer_files(folder: Path | None) -> list[Path]:
    """The files of a checkpoint's tokenizer, as far as there are any."""
    return [] if folder is None else [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
