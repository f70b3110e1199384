"""`Plan`: one mask over one partition, ready to be called. Checks the tensors, agrees on the wire, runs the ring."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ringspun.core import partition as core_partition
from ringspun.core.mask import Mask
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format
from ringspun.errors import DtypeError, PlanError, RingspunError, ShapeError
from ringspun.torch import ring, sharding
from ringspun.torch.kernels import Call, Kernel, choose
from ringspun.torch.kernels.base import Rows, Saved, StepTiles, accumulator_dtype
from ringspun.torch.ops import REGISTRY, attention_op
from ringspun.torch.partition import Partition

if TYPE_CHECKING:
    from ringspun.torch.context import ContextParallel


class Plan:
    """What a ring computes for one mask: made by `Partition.plan` or `ContextParallel.plan`, never directly.

    Keep it as long as the mask and length stay the same; every layer of a model may call the same plan. All ranks call
    `attention` equally often, and all call backward equally often (with ``0 * out.sum()`` where a rank has no loss).
    """

    def __init__(
        self,
        context: ContextParallel,
        part: core_partition.Partition,
        mask: Mask,
        schedules: tuple[Schedule, ...],
    ) -> None:
        self._context, self._core, self.mask, self.schedules = context, part, mask, schedules
        self._rows = sum(int(part.tokens[r]) for r in context.driver.ring_ranks)  # an int: traced calls guard on it
        self._agreed: dict[str, str] = {}
        self._handles: dict[str | Kernel | None, int] = {}
        self._handle(None)  # here, not in a traced call, whose change to the registry would come after its op runs

    @property
    def partition(self) -> Partition:
        """Who holds which token."""
        return Partition(self._context, self._core)

    @property
    def schedule(self) -> Schedule:
        """This rank's schedule (a loopback's first; see `schedules`)."""
        return self.schedules[0]

    def with_mask(self, mask: Mask) -> Plan:
        """Another mask over the same partition (a model with several attention patterns). Collective, like `plan`."""
        return self.partition.plan(mask)

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None,
        return_lse: Literal[False] = False, kernel: str | Kernel | None = None,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None,
        return_lse: Literal[True], kernel: str | Kernel | None = None,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def attention(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B K T D"],
        v: Float[Tensor, "B K T Dv"],
        *,
        scale: float | None = None,
        return_lse: bool = False,
        kernel: str | Kernel | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's queries over the whole sequence's keys, exact. Differentiable.

        Args:
            q, k, v: this rank's rows, any strides, one dtype and device; H a multiple of K. Only K heads travel.
            scale: of the scores; default ``D ** -0.5``.
            return_lse: also return the natural-log normaliser ``[B, H, T]`` in fp32 (fp64 for fp64), differentiable;
                -inf for a row that sees no key, whose output is 0.
            kernel: a kernel, its name, or None for the first that does not refuse.
        Returns:
            ``out [B, H, T, Dv]`` in q's dtype, or ``(out, lse)``.
        Raises:
            ShapeError, DtypeError: tensors that do not fit the plan or each other.
            KernelRefused: no kernel can do it. PlanMismatchError: ranks call with different shapes, dtype or scale.
            TransferError: a foreign or stale message arrived. PeerError: another rank is dead, late or failed.
        """
        try:
            q, k, v = self._check(*_autocast(q, k, v))
            handle = self._handle(kernel)
            choose(_call(q, k, v), kernel)
            scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
        except (RingspunError, TypeError, ValueError) as failure:
            self._fail(failure)
            raise
        out, lse = attention_op(q, k, v, handle, scale)
        return (out, lse) if return_lse else out

    # -- checks ------------------------------------------------------------------------------------------------------

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        where = f"(ring rank {self._context.ring_rank} of {self._context.ring_size})"
        for name, x in (("q", q), ("k", k), ("v", v)):
            if type(x).__name__ == "DTensor":
                raise DtypeError(f"{name} must be a plain tensor {where}; got a DTensor. Pass its `.to_local()`.")
            if not isinstance(x, Tensor):
                raise DtypeError(f"{name} must be a tensor {where}; got {type(x).__name__}.")
            if x.ndim != 4:
                raise ShapeError(f"{name} must be [B, H, T, D] {where}; got shape {tuple(x.shape)}.")
            if not x.dtype.is_floating_point:
                raise DtypeError(f"{name} must be floating point {where}; got {x.dtype}.")
        if not (q.dtype == k.dtype == v.dtype):
            raise DtypeError(f"q, k and v must have one dtype {where}; got {q.dtype}, {k.dtype}, {v.dtype}.")
        if not (q.device == k.device == v.device):
            raise DtypeError(f"q, k and v must be on one device {where}; got {q.device}, {k.device}, {v.device}.")
        movable = self._context.driver.devices
        if movable is not None and q.device.type not in movable:
            raise DtypeError(f"q, k and v must be on {' or '.join(movable)} for this group {where}; got {q.device}.")
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} {where}"
        rows = self._rows
        if not (q.shape[2] == k.shape[2] == v.shape[2] == rows):
            raise ShapeError(
                f"q, k and v must hold {rows} tokens in dim 2; got {shapes}. Shard them by plan.partition."
            )
        if not (q.shape[0] == k.shape[0] == v.shape[0]) or k.shape[1] != v.shape[1]:
            raise ShapeError(f"q, k and v must share B, and k and v their heads; got {shapes}.")
        if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise ShapeError(f"query heads must be a multiple of key heads; got {shapes}.")
        if q.shape[3] != k.shape[3] or q.shape[3] == 0 or v.shape[3] == 0:
            raise ShapeError(f"q and k must have one head size, at least 1; got {shapes}.")
        return q, k, v

    def _fail(self, failure: Exception) -> None:
        """Tell the other ranks: by the first call's agreement where they wait in it, else by a note."""
        if not self._agreed:
            self._context.driver.agree(_TOPIC, bytes(32), {}, failure)
        self._context.driver.report(failure)

    def _agree(self, topic: str, wire: Format, fields: dict[str, str]) -> None:
        """Agree with all ranks on the facts of a call: at a plan's first call, and whenever facts or sizes change.

        To remember all facts ever agreed on is not enough: ranks that then call with two different known ones, of one
        plan or of two, send each other messages of two lengths, and gloo aborts a process for that.
        """
        text, sizes = repr(sorted(fields.items())), repr((wire, self._core.tokens.tobytes()))
        if self._agreed.get(topic) == text and self._context.agreed_sizes == sizes:
            return
        digest = hashlib.blake2b(repr((topic, text, sizes)).encode(), digest_size=32).digest()
        self._context.driver.agree(topic, digest, {**fields, "seq_len": str(self._core.seq_len)})
        self._agreed[topic] = text
        self._context.agreed_sizes = sizes

    # -- execution ---------------------------------------------------------------------------------------------------

    def _handle(self, kernel: str | Kernel | None) -> int:
        if kernel not in self._handles:
            self._handles[kernel] = REGISTRY.add(id(self._context), _Executable(self, kernel))
        return self._handles[kernel]

    @cached_property
    def _tiles(self) -> list[tuple[list[StepTiles], list[StepTiles]]]:
        """Per rank, the tiles of forward's steps and of backward's; one list where they are the same, lowered once."""
        return [_step_tiles(s) for s in self.schedules]

    def _jobs(self, wire: Format, kernel: Kernel, scale: float, phase: Literal[0, 1]) -> list[ring.Job]:
        """One job per rank; `phase` 0 is forward, 1 backward."""
        call, self._context.calls = self._context.calls, self._context.calls + 1
        return [
            ring.Job(schedule, tiles[phase], kernel, wire, self._context.pool, call, scale)
            for schedule, tiles in zip(self.schedules, self._tiles, strict=True)
        ]

    def __repr__(self) -> str:
        return f"Plan(mask={str(self.mask)[:60]}, {self.partition!r})"


_TOPIC = "an attention call"
_BACKWARD_TOPIC = "a backward call"


@dataclass(frozen=True)
class _Executable:
    """A plan with a call's options fixed: what an op's handle stands for."""

    plan: Plan
    kernel: str | Kernel | None

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        plan, wire, kernel = self.plan, _wire(q, k, v), choose(_call(q, k, v), self.kernel)
        plan._agree(_TOPIC, wire, _facts(wire, kernel, scale))
        if q.shape[0] == 0:
            return q.new_zeros((*q.shape[:-1], v.shape[-1])), q.new_zeros(
                q.shape[:-1], dtype=accumulator_dtype(q.dtype)
            )
        jobs = plan._jobs(wire, kernel, scale, 0)
        rows = sharding.slices(plan._core, plan._context.driver.ring_ranks)
        programs = [ring.forward(job, q[:, :, r], k[:, :, r], v[:, :, r]) for job, r in zip(jobs, rows, strict=True)]
        with torch.autocast(q.device.type, enabled=False):
            results = plan._context.driver.run(programs)
        return _joined([r[0] for r in results], q), _joined([r[1] for r in results], q)

    def run_backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        plan, wire = self.plan, _wire(q, k, v)
        kernel = choose(_call(q, k, v), self.kernel)
        facts = _facts(wire, kernel, scale) | {"gradients of q, k, v": str(needs)}
        plan._agree(_BACKWARD_TOPIC, wire, facts)
        if q.shape[0] == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dtype = accumulator_dtype(q.dtype)
        delta = (out.to(dtype) * dout.to(dtype)).sum(-1)
        if dlse is not None:
            delta -= dlse
        jobs = plan._jobs(wire, kernel, scale, 1)
        rows = sharding.slices(plan._core, plan._context.driver.ring_ranks)
        saved = Saved(out, lse, dout, dlse, delta)
        programs = [
            ring.backward(job, q[:, :, r], k[:, :, r], v[:, :, r], saved.rows(Rows(slice(None), r)))
            for job, r in zip(jobs, rows, strict=True)
        ]
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv = zip(*plan._context.driver.run(programs), strict=True)
        return _joined(dq, q), _joined(dk, k), _joined(dv, v)


def _step_tiles(schedule: Schedule) -> tuple[list[StepTiles], list[StepTiles]]:
    one, two = schedule.forward, schedule.backward
    backward = [StepTiles(two.tiles_of(step)) for step in range(len(two))]
    offsets = two.tile_offsets[: len(one.tile_offsets)]  # backward's extra last steps have none
    if np.array_equal(one.tiles, two.tiles) and np.array_equal(one.tile_offsets, offsets):
        return backward, backward
    return [StepTiles(one.tiles_of(step)) for step in range(len(one))], backward


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Ranks' rows joined; a fresh contiguous tensor in any case, because an op's results must not alias its inputs."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), 2)


def _call(q: Tensor, k: Tensor, v: Tensor) -> Call:
    return Call(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, q.device.type)


def _wire(q: Tensor, k: Tensor, v: Tensor) -> Format:
    size = accumulator_dtype(q.dtype).itemsize
    dtype = str(q.dtype).removeprefix("torch.")
    return Format(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], dtype, q.dtype.itemsize, size)


def _facts(wire: Format, kernel: Kernel, scale: float) -> dict[str, str]:
    return {**{k: str(v) for k, v in asdict(wire).items()}, "scale": repr(scale), "kernel": kernel.name}


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast does to scaled_dot_product_attention: float tensors to the device's autocast dtype, but not
    float64."""
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:
        eligible = isinstance(x, Tensor) and x.dtype.is_floating_point and x.dtype != torch.float64
        return x.to(dtype) if eligible else x

    return cast(q), cast(k), cast(v)


def check_schedules(
    schedules: Schedule | tuple[Schedule, ...], ring_ranks: tuple[int, ...], inputs: bytes
) -> tuple[Schedule, ...]:
    """Schedules made elsewhere (a loader's worker), as this process needs them.

    Raises:
        PlanError: made for other ranks, or from another length, layout, route or documents.
    """
    many = schedules if isinstance(schedules, tuple) else (schedules,)
    ranks = tuple(s.ring_rank for s in many)
    if ranks != ring_ranks:
        raise PlanError(f"schedules must be those of ring ranks {ring_ranks}; got {ranks}.")
    if any(s.inputs != inputs for s in many):
        raise PlanError("schedule must be made from this partition's length, layout, route and documents; it was not.")
    return many
