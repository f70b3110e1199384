"""What is asked of a model: the logits of some tokens of this rank's shard.

A Hugging Face model is asked as it is; anything else is a function of three arguments:

    def logits(ids, plan, position_ids):    # [1, T], a `ringspun.torch.Plan`, [1, T] -> [1, T, V]

It takes positions from `position_ids`, for its tokens need not stand one behind the other, and attends by the plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ringspun.errors import ConfigError

if TYPE_CHECKING:
    from ringspun.torch import Plan

Logits = Callable[[Tensor, "Plan", Tensor], Tensor]


@dataclass(frozen=True)
class Judged:
    """A model as it is asked.

    Args:
        logits: of the rows ``[n]`` of this rank: ids ``[1, T]``, plan, positions ``[1, T]``, rows -> ``[1, n, V]``.
        reach: tokens before each that its layers besides attention look at, all such layers together; 0 where there are
            none. None: not known, or attention itself asks how far apart tokens lie in the batch (a sliding window); it
            can be asked one question at a time alone.
    """

    logits: Callable[[Tensor, Plan, Tensor, Tensor], Tensor]
    reach: int | None = None

    @classmethod
    def of(cls, model: nn.Module | Logits | Judged, *, reach: int | None = None) -> Judged:
        """A model in the form above.

        Args:
            model: a Transformers model, which is put on the ring (`prepare`) if it is not; or a function, or a module,
                of (ids, plan, position_ids).
            reach: of a function. That of a Transformers model is known.
        Raises:
            ConfigError: a `reach` below 0. UnsupportedByRing: as `prepare`.
        """
        if reach is not None and reach < 0:
            raise ConfigError(f"reach must be a number of tokens, at least 0, or None; got {reach}.")
        if isinstance(model, Judged):
            return model
        if isinstance(model, nn.Module) and hasattr(model, "set_attn_implementation"):
            return _of_transformers(model)

        def some(ids: Tensor, plan: Plan, position_ids: Tensor, rows: Tensor) -> Tensor:
            return model(ids, plan, position_ids)[:, rows]

        return cls(some, reach)


def _of_transformers(model: nn.Module) -> Judged:
    from ringspun.integrations import transformers as hf
    from ringspun.integrations.transformers.layers import FULL, layer_kinds, text_config

    config: Any = text_config(model)
    if config._attn_implementation != hf.NAME:
        hf.prepare(model)
    windowed = getattr(config, "sliding_window", None) is not None or set(layer_kinds(config)) - {FULL}
    by_length = any(getattr(module, "needs_length", False) for module in model.modules())
    picks = "logits_to_keep" in inspect.signature(model.forward).parameters

    def some(ids: Tensor, plan: Plan, position_ids: Tensor, rows: Tensor) -> Tensor:
        plans = hf.plans(model, plan.partition, plan.mask) if windowed else plan
        asked = {"input_ids": ids, "position_ids": position_ids, hf.PLAN_KEYWORD: plans}
        if picks:
            return model(**asked, logits_to_keep=rows).logits  # type: ignore[no-any-return]
        return model(**asked).logits[:, rows]  # type: ignore[no-any-return]

    return Judged(some, None if windowed or by_length else 0)


@contextmanager
def asking(model: object) -> Iterator[None]:
    """Without gradients, and a module in evaluation mode, as it was afterwards."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
