"""A model as a folder: what `from_pretrained` loads, or, of a model of one's own, its weights alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS = "model.safetensors"


def save_model(model: nn.Module, path: Path, state: dict[str, Tensor] | None = None) -> None:
    """`save_pretrained` without its progress bar; where there is no such method, the weights.

    Args:
        state: the weights, where the model does not hold them whole.
    """
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    if save_pretrained is None:
        return _save_weights(path, model.state_dict(keep_vars=True) if state is None else state)
    with no_progress_bar():
        save_pretrained(path, **({} if state is None else {"state_dict": state}))
    return None


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keeps Transformers from drawing bars over ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_beside(path: Path, files: Iterable[Path]) -> None:
    """Copies files that belong to a model, such as its tokenizer's, into its folder."""
    if not path.is_dir():  # not exist_ok, which takes any error for a folder that is there
        path.mkdir()
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
