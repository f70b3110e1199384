"""A model on a mesh: PyTorch's own DDP and FSDP2, told which ranks, which precision, and to sum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringspun.errors import ConfigError
from ringspun.train.parallel.meshes import JobMesh
from ringspun.train.parallel.sharding import SHARDED, Sharding, check_sharding


def wrap(
    model: nn.Module,
    mesh: JobMesh,
    *,
    shard: Sharding,
    bfloat16: bool = False,
    layers: Iterable[nn.Module] | None = None,
) -> nn.Module:
    """`model` as its ranks shall hold it; call what is returned, and make the optimizer afterwards. Collective.

    | shard | who holds the weights | who sums gradients |
    |---|---|---|
    | "none" | every rank, whole | nobody: `reduce_gradients(model, group)` over all ranks |
    | "ddp" | every rank, whole | DistributedDataParallel, over all ranks |
    | "fsdp" | cut over dp_shard x ring x ulysses | `fully_shard`, of each layer and of the model |
    | "hsdp" | the same, a copy for each of dp_replicate | the same, and over the copies |

    Each rank's loss is its share times `gradient_scale(model, mean)`: FSDP is told to sum (1), DDP averages.

    Args:
        model: with the same float32 weights on every rank; FSDP cuts it in place.
        bfloat16: "fsdp" and "hsdp" only: gather and compute in bfloat16, sum gradients in float32; each rank's piece of
            the weights stays float32, and the optimizer's. DDP: use autocast instead.
        layers: what FSDP gathers at a time; default: a Transformers model's decoder layers.
    Raises:
        ConfigError: sizes or settings that would have no effect, or no layers to be found.
    """
    _check(mesh, shard, bfloat16)
    if shard == "none":
        return model
    if shard == "ddp":
        # Else DDP deals parameters to other buckets after its first step: sums come out otherwise by rounding, and a
        # run that was interrupted differs from one that was not.
        return DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if bfloat16
        else MixedPrecisionPolicy()
    )
    found: list[nn.Module] = decoder_layers(model) if layers is None else list(layers)
    for module in (*found, model):
        sharded: Any = fully_shard(module, mesh=mesh.fsdp if shard == "fsdp" else mesh.hsdp, mp_policy=policy)
        # a share of the loss has a share of the gradient; without the second line gloo lacks what the first asks for
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a Transformers model, or of one inside of `model`, that it says must not be split.

    Raises:
        ConfigError: there are none.
    """
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    # by any base, for a layer that computes block by block is of a class of its own
    found = [module for module in model.modules() if names & {base.__name__ for base in type(module).__mro__}]
    if not found:
        raise ConfigError(
            f"layers must be given for a model that does not say which they are; {type(model).__name__} does not. "
            "Write wrap(..., layers=model.layers)."
        )
    return found


def split_layers(model: nn.Module) -> list[nn.Module]:
    """`decoder_layers`, or none for a model that does not name any (`_no_split_modules`): it is gathered as a whole."""
    named = any(getattr(module, "_no_split_modules", None) for module in model.modules())
    return decoder_layers(model) if named else []


def _check(mesh: JobMesh, shard: str, bfloat16: bool) -> None:
    check_sharding(shard, dp_replicate=mesh.whole.size(0), dp_shard=mesh.whole.size(1))
    if bfloat16 and shard not in SHARDED:
        raise ConfigError(
            f"bfloat16 must be False for shard={shard!r}, which has no precision of its own. Use autocast."
        )
