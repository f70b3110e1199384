"""Gradients of a model that no wrapper reduces: summed over the ring once a step, and a watch on whether anybody does.

A rank's gradients are its share, of its own tokens; the gradient is the sum over the ring. Who forgets it trains R
models that drift apart, and nothing fails.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ringspun.errors import DtypeError, PlanError, RingspunWarning, UnsupportedByRing
from ringspun.torch.context import ContextParallel
from ringspun.torch.drivers import Driver, Loopback
from ringspun.torch.drivers.base import digest_of

if TYPE_CHECKING:
    Group = ContextParallel | dist.ProcessGroup | dist.device_mesh.DeviceMesh | Loopback | None

BUCKET_BYTES = 32 * 2**20
SHOWN = 3
"""Parameters that a warning names."""


@torch.no_grad()
def reduce_gradients(
    parameters: nn.Module | Iterable[Tensor], group: Group = None, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace each parameter's `.grad` by its sum over the ring. Collective: once a step, after the last backward.

        loss.backward(); reduce_gradients(model, cp); optimizer.step()

    A parameter that has a gradient on some rank has one on all afterwards; one that has none anywhere keeps none. Sums
    of bfloat16 and float16 are formed in float32 and rounded once. The same inputs give the same bits, on every rank.

    Args:
        parameters: a model, or parameters in the same order on every rank; frozen ones are left alone.
        group: a ring (`ContextParallel`), or what it is made from; a group of ring x data ranks sums over both.
        bucket_bytes: gradients that travel together (bytes); a bucket and its copy are the memory that this needs.
    Raises:
        UnsupportedByRing: gradients that are sparse or `DTensor`, or a model that DDP or FSDP reduces already.
        PlanMismatchError: ranks give other parameters. PeerError: another rank's gradients were refused, or it is late.
    """
    driver = driver_of(group)
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise PlanError(f"bucket_bytes must be a number of bytes, at least 1; got {bucket_bytes!r}.")
    named, failure = _named(parameters), None
    try:
        _check(parameters, named, driver)
    except (UnsupportedByRing, DtypeError) as problem:
        failure = problem
    text = repr([(name, tuple(p.shape), p.dtype) for name, p in named])
    words = {"parameters": str(len(named)), "names, shapes, dtypes": hashlib.blake2b(text.encode()).hexdigest()[:12]}
    driver.agree("a reduction of gradients", digest_of(words), words, failure)
    if driver.size == len(driver.ring_ranks) or not named:
        return
    found = driver.all_reduce(torch.tensor([p.grad is not None for _, p in named], dtype=torch.int64)).tolist()
    for bucket in _buckets([p for (_, p), ranks in zip(named, found, strict=True) if ranks], bucket_bytes):
        _reduce(bucket, driver)


def watch_gradients(optimizer: Optimizer, group: Group = None, *, every: int = 100) -> RemovableHandle:
    """Warn when `optimizer` steps with gradients that differ between ranks: nobody reduced them.

    It compares before the first step and every `every`-th after it, whoever reduces: `reduce_gradients`, DDP, or a loop
    of one's own. Sharded parameters (of FSDP1 and FSDP2) are passed over. A step that compares is collective: all
    ranks step alike. After one warning it ends; ``handle.remove()`` ends it too.

    Args:
        optimizer: give it ``model.named_parameters()``, and a warning has names. group: as in `reduce_gradients`.
        every: steps from one comparison to the next.
    """
    driver = driver_of(group)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise PlanError(f"every must be a number of steps, at least 1; got {every!r}.")
    steps = 0

    def before_step(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if (steps - 1) % every == 0 and (odd := _different(optimizer, driver)):
            handle.remove()
            shown = ", ".join(odd[:SHOWN]) + (f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else "")
            warnings.warn(
                f"gradients must be the same on all ranks before optimizer.step(); those of {shown} differ at step "
                f"{steps}: each rank takes its share for the whole. Call ringspun.torch.reduce_gradients(model, cp) "
                "after the last backward, or wrap the model in DDP or FSDP2.",
                RingspunWarning,
                stacklevel=2,
            )

    handle = optimizer.register_step_pre_hook(before_step)
    return handle


def driver_of(group: Group) -> Driver:
    """Who moves the messages of a ring, or of the ranks that one is made from."""
    return (group if isinstance(group, ContextParallel) else ContextParallel(group)).driver


def _named(parameters: nn.Module | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    """Each trainable parameter once, in the order that all ranks have."""
    if isinstance(parameters, nn.Module):
        return [(name, p) for name, p in parameters.named_parameters() if p.requires_grad]
    unique = dict.fromkeys(parameters)
    return [(f"parameter {i}", p) for i, p in enumerate(unique) if p.requires_grad]


def _check(parameters: object, named: list[tuple[str, Tensor]], driver: Driver) -> None:
    for module in parameters.modules() if isinstance(parameters, nn.Module) else ():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise UnsupportedByRing(
                f"model must not be reduced twice; got a {type(module).__name__}, which averages over its group. Leave "
                "reduce_gradients out, and multiply the loss by the number of ranks in the ring."
            )
    for name, p in named:
        grad = p if p.grad is None else p.grad
        if _is_dtensor(p) or _is_dtensor(grad):
            raise UnsupportedByRing(
                f"gradients must be plain tensors; that of {name} is a DTensor, which its wrapper reduces. Give FSDP a "
                "mesh that holds the ring, and leave reduce_gradients out."
            )
        if grad.layout != torch.strided:
            raise UnsupportedByRing(
                f"gradients must be dense; that of {name} is {grad.layout}. Build the embedding with sparse=False."
            )
        if driver.devices is not None and p.device.type not in driver.devices:
            raise DtypeError(
                f"parameters must be on {' or '.join(driver.devices)} for this group; {name} is on {p.device}."
            )


def _is_dtensor(x: Tensor) -> bool:
    return type(x).__name__ == "DTensor"


def _is_sharded(p: Tensor) -> bool:
    # FSDP1 marks a rank's piece of its flat parameter by this name alone
    return _is_dtensor(p) or getattr(p, "_fsdp_flattened", False)


def _sum_dtype(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def _buckets(parameters: list[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Neighbours that are summed in one dtype on one device, up to `bucket_bytes` (or one parameter)."""
    bucket: list[Tensor] = []
    held = 0
    for p in parameters:
        size = p.numel() * _sum_dtype(p).itemsize
        like = not bucket or (_sum_dtype(p), p.device) == (_sum_dtype(bucket[0]), bucket[0].device)
        if bucket and (held + size > bucket_bytes or not like):
            yield bucket
            bucket, held = [], 0
        bucket.append(p)
        held += size
    if bucket:
        yield bucket


def _reduce(bucket: list[Tensor], driver: Driver) -> None:
    for p in bucket:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    grads = [p.grad for p in bucket if p.grad is not None]
    total = driver.all_reduce(torch.cat([g.flatten().to(_sum_dtype(bucket[0])) for g in grads]))
    for grad, piece in zip(grads, torch.split(total, [g.numel() for g in grads]), strict=True):
        grad.copy_(piece.view(grad.shape))


@torch.no_grad()
def _different(optimizer: Optimizer, driver: Driver) -> list[str]:
    """Names of parameters whose gradients are not the same on all ranks: not even in norm and sum."""
    if driver.size == len(driver.ring_ranks):
        return []
    watched = [(name, p) for name, p in _optimized(optimizer) if not _is_sharded(p)]
    mine = torch.tensor([_signature(p.grad) for _, p in watched], dtype=torch.float64).reshape(1, len(watched), 2)
    rows = driver.all_gather_rows(mine, [1] * driver.size)
    same = ((rows == rows[:1]) | (rows.isnan() & rows[:1].isnan())).all(0).all(-1).tolist()
    return [name for (name, _), alike in zip(watched, same, strict=True) if not alike]


def _optimized(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        unnamed = [f"parameter {i} of group {number} {tuple(p.shape)}" for i, p in enumerate(group["params"])]
        yield from zip(group.get("param_names", unnamed), group["params"], strict=True)


def _signature(grad: Tensor | None) -> tuple[float, float]:
    if grad is None:
        return -1.0, 0.0
    values = (grad.coalesce().values() if grad.is_sparse else grad).double()
    return float(torch.linalg.vector_norm(values)), float(values.sum())
