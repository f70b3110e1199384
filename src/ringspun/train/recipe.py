"""A recipe: what a run does that its config cannot say, as functions of a Python file beside the config.

    def build_model(config) -> nn.Module                                   # bare, float32, the same on every rank
    def loss(model, shard) -> Tensor                                       # this rank's share of the mean loss
    def sequences(config, stage) -> Sequences                              # instead of --data
    def build_optimizer(model, config) -> Optimizer
    def evaluate(model, context, config, stage, step) -> dict[str, float]  # at each switch of stages, and at the end

Any of them may be left out. `config` is what holds in the stage that is trained, flat; `stage` is its `Leg`.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ringspun.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ringspun.torch import ContextParallel
    from ringspun.train.config import TrainConfig
    from ringspun.train.data.contents import Contents
    from ringspun.train.data.text import Sequences
    from ringspun.train.model import Shard
    from ringspun.train.stages import Leg


@dataclass(frozen=True)
class Recipe:
    """Functions that take the place of a run's own; None leaves those.

    Args:
        build_model: the model, with float32 weights that are the same on every rank. A Transformers model is put on the
            ring; any other one is called with ``(input_ids [1, T], plan, position_ids [1, T])`` of this rank, and gives
            logits ``[1, T, V]``, unless there is a `loss`.
        loss: this rank's share: the sum over its targets, divided by ``shard.total_targets``, which is of all ranks.
        sequences: what is trained on in a stage; a pure function of a position, the same on every rank.
        build_optimizer: made anew in each stage, of the wrapped model's parameters; its tensors are carried over. Its
            learning rates are those where the config's is `lr`: warm-up and decay scale them.
        evaluate: collective; values by name. Weights and random numbers are as before afterwards.
        digest: of the file, where it was read from one.
    """

    build_model: Callable[[TrainConfig], nn.Module] | None = None
    loss: Callable[[nn.Module, Shard], Tensor] | None = None
    sequences: Callable[[TrainConfig, Leg], Sequences] | None = None
    build_optimizer: Callable[[nn.Module, TrainConfig], Optimizer] | None = None
    evaluate: Callable[[nn.Module, ContextParallel, TrainConfig, Leg, int], dict[str, float]] | None = None
    digest: str = ""

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        """The recipe that a config names; an empty one where it names none.

        Raises:
            ConfigError: as `read`, or nothing says what the model is.
        """
        recipe = cls() if config.recipe is None else cls.read(config.recipe)
        if config.model is None and config.init is None and recipe.build_model is None:
            raise ConfigError(f"{config.recipe}: recipe must define build_model where there is no [model] and no init.")
        if recipe.build_model is not None and config.init is not None:
            raise ConfigError(f"{config.recipe}: build_model must not be defined with init. Remove one of them.")
        return recipe

    @classmethod
    def read(cls, path: Path) -> Self:
        """The functions of a Python file. It may import what lies beside it.

        Raises:
            ConfigError: there is no such file, it defines none of the functions, or one whose name is nearly theirs.
                What the file itself raises.
        """
        if not path.is_file():
            raise ConfigError(f"recipe must be a Python file; got {path}.")
        code = path.read_bytes()
        module = _run(path)
        known = [one.name for one in fields(cls) if one.name != "digest"]
        found = {name: getattr(module, name) for name in known if callable(getattr(module, name, None))}
        for name, value in vars(module).items():
            near = difflib.get_close_matches(name, known, 1, cutoff=0.8)
            if inspect.isfunction(value) and value.__module__ == module.__name__ and near and name not in known:
                raise ConfigError(
                    f"{path}: function {name!r} is nearly {near[0]!r}, which a recipe may define. Rename it."
                )
        if not found:
            raise ConfigError(f"{path}: recipe must define one of {', '.join(known)}; it defines none.")
        return cls(**found, digest=hashlib.sha256(code).hexdigest()[:16])


def _run(path: Path) -> Any:
    """The module of a file, run once more, with its folder to import from meanwhile."""
    name = f"ringspun_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"recipe must be a Python file, whose name ends in .py; got {path}.")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    sys.modules[name] = module  # dataclasses and pickles look for it there
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as problem:
        raise ConfigError(f"{path}: recipe must be Python; line {problem.lineno}: {problem.msg}.") from None
    finally:
        sys.path.remove(folder)
    return module


@dataclass(frozen=True)
class OwnData:
    """The data of a run whose recipe makes its sequences: no files."""

    digest: str = "recipe"
    files: Mapping[str, Contents] = field(default_factory=dict)
    summary: str = "sequences of the recipe"

    def sequences(self, *, seq_len: int, seed: int) -> Sequences:
        """None.

        Raises:
            DataError: always.
        """
        raise DataError("data must be given where a recipe defines no sequences. Write --data PATH.")

    def held_out(self, *, seq_len: int, seed: int) -> Sequences | None:
        """None."""
        return None
