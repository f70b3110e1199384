"""From shares to the gradient: what each data-parallel wrapper needs, and the gradient's norm over a mesh.

A rank's loss is its share, so the gradient is the SUM over ring and data ranks. Wrappers average over their ranks: the
factor that makes up for it has to be applied exactly once. Adam hides a wrong one; the norm, and so clipping, does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringspun.errors import NonFiniteError, UnsupportedByRing
from ringspun.train.losses.mean import TokenMean

_ENGINES = ("DeepSpeedEngine",)


@dataclass(frozen=True)
class _Reducer:
    """Who reduces gradients: over which world ranks, and what the sum is divided by."""

    name: str
    ranks: tuple[int, ...]
    divisor: float


def gradient_scale(model: nn.Module, mean: TokenMean) -> float:
    """What each rank multiplies its share of the loss by before `backward`, so that gradients are those of one process.

    | the model is | factor | and then |
    |---|---|---|
    | bare | 1 | `reduce_gradients(model, group)`, over ring x data ranks |
    | `DistributedDataParallel` over ring x data ranks | their number | |
    | `fully_shard` (FSDP2) over a mesh of them, of one dimension or two (HSDP) | their number | |
    | the same after `set_gradient_divide_factor(x)` | x | |
    | `FullyShardedDataParallel` (FSDP1) over them | their number | |

    Args:
        model: as it is called; compiled ones too. mean: the ring and its replicas.
    Raises:
        UnsupportedByRing: the wrapper reduces over other ranks (over the data ranks alone, say: then nobody sums over
            the ring), or in a way that is not known (a communication hook, an engine).
    """
    found = {*_reducers(model)}
    if not found:
        return 1.0
    if len(found) > 1:
        raise UnsupportedByRing(
            "model must be reduced in one way; got "
            + ", ".join(sorted(f"{r.name} over ranks {list(r.ranks)} by {r.divisor:g}" for r in found))
            + ". Give all wrappers one mesh."
        )
    (reducer,) = found
    _check_ranks(reducer, mean)
    _check_left_out(model, reducer)
    return reducer.divisor


def _reducers(model: nn.Module) -> Iterator[_Reducer]:
    for path, module in model.named_modules():
        name = type(module).__name__
        if isinstance(module, DistributedDataParallel):
            if module._comm_hooks:
                raise UnsupportedByRing(
                    f"{name} must have no communication hook for its factor to be known; got one. Use 1 if the hook "
                    "sums, and the number of its ranks if it averages."
                )
            yield _averages(name, module.process_group)
        elif isinstance(module, FullyShardedDataParallel):
            yield _averages(name, module.process_group)
        elif isinstance(module, FSDPModule):
            yield from _fully_sharded(module)
        elif name in _ENGINES:
            raise UnsupportedByRing(
                f"model must be bare, or of DDP or FSDP, for its factor to be known; got {name} at "
                f"{path or 'the top'}. Use the number of ranks that it averages over."
            )


def _averages(name: str, group: dist.ProcessGroup | None) -> _Reducer:
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    return _Reducer(name, ranks, float(len(ranks)))


def _fully_sharded(module: Any) -> Iterator[_Reducer]:
    # nothing public tells the factor that `set_gradient_divide_factor` has set
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            mesh = parameter.sharded_param.device_mesh
            ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
            yield _Reducer("FSDP2", ranks, float(group.gradient_divide_factor or len(ranks)))


def _check_ranks(reducer: _Reducer, mean: TokenMean) -> None:
    missing = [line for line in mean.own_lines if not set(line) <= set(reducer.ranks)]
    if missing or len(reducer.ranks) != mean.processes:
        lines = " and ".join(str(list(line)) for line in mean.own_lines)
        raise UnsupportedByRing(
            f"{reducer.name} must reduce over the {mean.processes} ranks of ring x data; got "
            f"{list(reducer.ranks)}, where this rank's ring and data ranks are {lines}. Gradients would be sums of "
            "some shares only, or of others' too. Wrap over the whole mesh, and give TokenMean its data dimension."
        )


def _check_left_out(model: nn.Module, reducer: _Reducer) -> None:
    """Parameters that FSDP2 was told to ignore have gradients that are scaled, and that nobody reduces."""
    if reducer.divisor == 1:
        return
    if reducer.name == DistributedDataParallel.__name__:
        _check_in_ddp(model)
    if reducer.name != "FSDP2":
        return
    plain = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if plain:
        raise UnsupportedByRing(
            f"parameters must all be sharded for one factor to fit; {plain[0]} is not ({len(plain)} in all). Let FSDP2 "
            "sum (set_gradient_divide_factor(1.0), set_force_sum_reduction_for_comms(True)), and call reduce_gradients "
            "on these."
        )


def _check_in_ddp(model: nn.Module) -> None:
    """Parameters outside of every DDP, or that it was told to ignore, are scaled too, and nobody reduces them."""
    inside = {
        parameter
        for ddp in model.modules()
        if isinstance(ddp, DistributedDataParallel)
        for name, parameter in ddp.module.named_parameters()
        if name not in ddp.parameters_to_ignore
    }
    out = [name for name, p in model.named_parameters() if p.requires_grad and p not in inside]
    if out:
        raise UnsupportedByRing(
            f"parameters must all be in DistributedDataParallel for one factor to fit; {out[0]} is not ({len(out)} in "
            "all). Wrap the whole model, or scale by 1, divide what DDP averages yourself, and reduce the others."
        )


def gradient_norm(parameters: nn.Module | Iterable[Tensor]) -> float:
    """The norm of the gradient, the same on all ranks. Collective where parameters are sharded.

    Args:
        parameters: a model, or parameters: plain ones, whose gradients are reduced, sharded ones (`DTensor`), or both.
    """
    return float(_norm([grads for _, grads in _by_mesh(parameters)]))


@torch.no_grad()
def clip_gradients(parameters: nn.Module | Iterable[Tensor], max_norm: float) -> float:
    """Scale the gradient down to a norm of `max_norm`, as `torch.nn.utils.clip_grad_norm_` does in one process; that
    takes no mixture of plain and sharded parameters. Collective where parameters are sharded: after the last
    backward, and after `reduce_gradients`.

    Args:
        parameters: as for `gradient_norm`. max_norm: largest norm, above 0.
    Returns:
        The norm before, the same on all ranks.
    Raises:
        NonFiniteError: on all ranks, when the norm is; gradients are then as they were. ValueError: `max_norm`.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0; got {max_norm}.")
    groups = _by_mesh(parameters)
    total = _norm([grads for _, grads in groups])
    if not bool(total.isfinite()):
        raise NonFiniteError(f"gradient norm must be finite; got {float(total)}. Leave this step out, or end the run.")
    for members, _ in groups:
        nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return float(total)


def _by_mesh(parameters: nn.Module | Iterable[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Parameters with gradients, and those, apart by the mesh that they are sharded over: PyTorch adds up no others."""
    if isinstance(parameters, FullyShardedDataParallel):
        raise UnsupportedByRing("parameters of FSDP1 must be clipped by it; use model.clip_grad_norm_(max_norm).")
    one = [parameters] if isinstance(parameters, Tensor) else parameters  # a tensor iterates over rows, without .grad
    given = one.parameters() if isinstance(one, nn.Module) else one
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for parameter in dict.fromkeys(given):
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            members, grads = groups.setdefault(mesh, ([], []))
            members.append(parameter)
            grads.append(parameter.grad)
    return list(groups.values())


def _norm(groups: list[list[Tensor]]) -> Tensor:
    norms = [nn.utils.get_total_norm(grads) for grads in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack([norm.double().cpu() for norm in whole])) if whole else torch.zeros(())
