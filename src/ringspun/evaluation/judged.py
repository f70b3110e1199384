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
from torch.nn import functional as F

from ringspun.core.host import is_integer
from ringspun.errors import ConfigError, UnsupportedByRing
from ringspun.train.losses.causal_lm import CausalLMLoss
from ringspun.train.losses.loss import IGNORED, wide_rows

if TYPE_CHECKING:
    from ringspun.torch import Plan

Logits = Callable[[Tensor, "Plan", Tensor], Tensor]
_CHUNK = 1024
"""Tokens whose probabilities are alive at once."""


@dataclass(frozen=True)
class Judged:
    """A model as it is asked.

    Args:
        logits: of the rows ``[n]`` of this rank: ids ``[1, T]``, plan, positions ``[1, T]``, rows -> ``[1, n, V]``.
        reach: tokens before each that its layers besides attention look at, all such layers together; 0 where there are
            none. None: not known, or attention itself asks how far apart tokens lie in the batch (a sliding window); it
            can be asked one question at a time alone.
        chunked: `losses` without the logits of all rows at once.
        module: what it is made of, where that is a module: `asking` puts it in evaluation mode.
    """

    logits: Callable[[Tensor, Plan, Tensor, Tensor], Tensor]
    reach: int | None = None
    chunked: Callable[[Tensor, Plan, Tensor, Tensor], Tensor] | None = None
    module: nn.Module | None = None

    def losses(self, ids: Tensor, plan: Plan, position_ids: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy (nats) of each row of this rank ``[1, T]``, in float32 or float64; 0 where there is none.

        Args:
            targets: ``[1, T]``: what each row is to predict; -100: nothing.
        """
        if self.chunked is not None:
            return self.chunked(ids, plan, position_ids, targets)
        rows = (targets[0] != IGNORED).nonzero()[:, 0]
        logits, labels = self.logits(ids, plan, position_ids, rows)[0], targets[0, rows]
        parts = [
            F.cross_entropy(wide_rows(x), label.to(x.device), reduction="none")
            for x, label in zip(torch.split(logits, _CHUNK), torch.split(labels, _CHUNK), strict=True)
        ]
        found = torch.cat(parts)
        return found.new_zeros(targets.shape).index_put((torch.zeros_like(rows), rows), found)

    @classmethod
    def of(cls, model: nn.Module | Logits | Judged, *, reach: int | None = None) -> Judged:
        """A model in the form above.

        Args:
            model: a Transformers model, which is put on the ring (`prepare`) if it is not; or a function, or a module,
                of (ids, plan, position_ids).
            reach: of a function or module, where it has no attribute `reach`. That of a Transformers model is known.
        Raises:
            ConfigError: a `reach` below 0. UnsupportedByRing: as `prepare`.
        """
        if isinstance(model, Judged):
            return model
        reach = getattr(model, "reach", None) if reach is None else reach
        if reach is not None and (not is_integer(reach) or reach < 0):
            raise ConfigError(f"reach must be a number of tokens, at least 0, or None; got {reach!r}.")
        if isinstance(model, nn.Module) and hasattr(model, "set_attn_implementation"):
            return _of_transformers(model)

        def some(ids: Tensor, plan: Plan, position_ids: Tensor, rows: Tensor) -> Tensor:
            return model(ids, plan, position_ids)[:, rows]

        return cls(some, reach, module=model if isinstance(model, nn.Module) else None)


def _of_transformers(model: nn.Module) -> Judged:
    from ringspun.integrations import transformers as hf
    from ringspun.integrations.transformers.layers import FULL, layer_kinds, text_config

    config: Any = text_config(model)
    loss = None
    if config._attn_implementation != hf.NAME:
        loss = _loss_of(model)
        hf.prepare(model)
    windowed = getattr(config, "sliding_window", None) is not None or bool(set(layer_kinds(config)) - {FULL})
    by_length = any(getattr(module, "needs_length", False) for module in model.modules())
    picks = "logits_to_keep" in inspect.signature(model.forward).parameters

    def inputs(ids: Tensor, plan: Plan, position_ids: Tensor) -> dict[str, Any]:
        plans = hf.plans(model, plan.partition, plan.mask) if windowed else plan
        return {"input_ids": ids, "position_ids": position_ids, hf.PLAN_KEYWORD: plans}

    def some(ids: Tensor, plan: Plan, position_ids: Tensor, rows: Tensor) -> Tensor:
        asked = inputs(ids, plan, position_ids)
        logits: Tensor = model(**asked, logits_to_keep=rows).logits if picks else model(**asked).logits[:, rows]
        return logits

    def chunked(ids: Tensor, plan: Plan, position_ids: Tensor, targets: Tensor) -> Tensor:
        assert loss is not None
        return loss.token_losses(targets, **inputs(ids, plan, position_ids))

    return Judged(some, None if windowed or by_length else 0, None if loss is None else chunked, model)


def _loss_of(model: nn.Module) -> CausalLMLoss | None:
    """The chunked loss of a model that is not on the ring yet, where its head allows it."""
    try:
        return CausalLMLoss(model)
    except UnsupportedByRing:
        return None


@contextmanager
def asking(judged: Judged) -> Iterator[None]:
    """Without gradients, and a module in evaluation mode, as it was afterwards."""
    modules = [] if judged.module is None else list(judged.module.modules())
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
