"""The optimizer of a run: AdamW, or a recipe's own; and its learning rate."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW, Optimizer

from ringspun.train.config import TrainConfig
from ringspun.train.recipe import Recipe

_SHARE = "lr_share"


def build_optimizer(model: nn.Module, config: TrainConfig, recipe: Recipe) -> Optimizer:
    """Of a bare model's parameters, cut over ranks if they are. AdamW decays matrices only.

    Args:
        config: what holds in the stage; a recipe's learning rates are those where the config's is `lr`.
    """
    if recipe.build_optimizer is not None:
        own = recipe.build_optimizer(model, config)
        for group in own.param_groups:
            group[_SHARE] = group["lr"] / config.lr
        return own
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=(0.9, 0.95))


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the learning rate of each group, in a recipe's own proportions."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(_SHARE, 1.0)
