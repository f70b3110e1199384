"""A model as a folder: what `from_pretrained` loads, or, of a model of one's own, its weights alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

WEIGHTS = "model.safetensors"


def save_model(model: nn.Module, path: Path, state: dict[str, Tensor] | None = None) -> None:
    """`save_pretrained` without its progress bar, which would tear ours apart; where there is none, the weights.

    Args:
        state: the weights, where the model does not hold them whole.
    """
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    if save_pretrained is None:
        return _save_weights(path, model.state_dict(keep_vars=True) if state is None else state)
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        save_pretrained(path, **({} if state is None else {"state_dict": state}))
    finally:
        if shown:
            logging.enable_progress_bar()
    return None


def save_beside(path: Path, files: Iterable[Path]) -> None:
    """Copies files that belong to a model, such as its tokenizer's, into its folder."""
    path.mkdir(exist_ok=True)
    for file in files:
        shutil.copyfile(file, path / file.name)


def _save_weights(path: Path, state: dict[str, Tensor]) -> None:
    """Of tied ones the first name alone."""
    from safetensors.torch import save_file

    names: dict[int, str] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), name)
    path.mkdir()
    save_file({name: state[name].detach().contiguous() for name in names.values()}, path / WEIGHTS)
