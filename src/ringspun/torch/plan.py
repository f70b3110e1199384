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
from ringspun.errors import PlanError, RingspunError
from ringspun.torch import inputs, ring, sharding
from ringspun.torch.drivers.base import digest_of
from ringspun.torch.kernels import Call, Kernel, choose
from ringspun.torch.kernels.base import Rows, Saved, StepTiles, accumulator_dtype
from ringspun.torch.ops import REGISTRY, Grads, attention_op
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
        self._rows = part.rows_of(context.driver.ring_ranks)  # an int: traced calls guard on it
        self._agreed: dict[str, str] = {}
        self._handles: dict[str | Kernel | None, tuple[int, _Executable]] = {}
        number = context.number.to_bytes(8, "little")
        self._id = int.from_bytes(hashlib.blake2b(schedules[0].inputs + number, digest_size=7).digest(), "little")
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
        **refused: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's queries over the whole sequence's keys, exact. Differentiable.

        Args:
            q, k, v: this rank's rows, any strides, one dtype and device; H a multiple of K. Only K heads travel.
            scale: of the scores; default ``D ** -0.5``.
            return_lse: also return the natural-log normaliser ``[B, H, T]`` in fp32 (fp64 for fp64), differentiable;
                -inf for a row that sees no key, whose output is 0.
            kernel: a kernel, its name, or None for the first that does not refuse.
            refused: nothing else is taken; what other attentions call an argument is refused with what to do instead.
        Returns:
            ``out [B, H, T, Dv]`` in q's dtype, or ``(out, lse)``.
        Raises:
            ShapeError, DtypeError: tensors that do not fit the plan or each other.
            KernelRefused: no kernel can do it. PlanMismatchError: ranks call with different shapes, dtype or scale.
            TransferError: a foreign or stale message arrived. PeerError: another rank is dead, late or failed.
        """
        try:
            inputs.refuse(refused)
            q, k, v = inputs.autocast(q, k, v)
            inputs.check_tensors(self._context.driver, self._rows, q, k, v)
            scale = inputs.checked_scale(scale, q.shape[-1])
            choose(_call(q, k, v, scale), kernel)
            handle = self._handle(kernel)
        except (RingspunError, TypeError, ValueError) as failure:
            self._fail(failure)
            raise
        out, lse, _ = attention_op(q, k, v, handle, scale)
        return (out, lse) if return_lse else out

    # -- agreement ----------------------------------------------------------------------------------------------------

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
        if self._agreed.get(topic) == text and self._context.driver.state.agreed_sizes == sizes:
            return
        self._context.driver.agree(
            topic, digest_of((topic, text, sizes)), {**fields, "seq_len": str(self._core.seq_len)}
        )
        self._agreed[topic] = text
        self._context.driver.state.agreed_sizes = sizes

    # -- execution ---------------------------------------------------------------------------------------------------

    def _handle(self, kernel: str | Kernel | None) -> int:
        if kernel not in self._handles:
            executable = _Executable(self, kernel)
            self._handles[kernel] = REGISTRY.add(id(self._context), executable), executable
        return self._handles[kernel][0]

    @cached_property
    def _tiles(self) -> list[tuple[list[StepTiles], list[StepTiles]]]:
        """Per rank, the tiles of forward's steps and of backward's; one list where they are the same, lowered once."""
        return [_step_tiles(s) for s in self.schedules]

    def _jobs(self, wire: Format, kernel: Kernel, scale: float, of: int | None = None) -> list[ring.Job]:
        """One job per rank: of a forward call, or of the backward call `of` a forward call's number."""
        state = self._context.driver.state
        number, state.calls = state.calls, state.calls + 1
        phase = 0 if of is None else 1 + of
        return [
            ring.Job(schedule, tiles[min(phase, 1)], kernel, wire, self._context.pool, scale, self._id, number, phase)
            for schedule, tiles in zip(self.schedules, self._tiles, strict=True)
        ]

    def __deepcopy__(self, memo: object) -> Plan:
        return self  # a frozen value; models that hold one are copied

    def __reduce__(self) -> str:
        raise TypeError(
            "plan must not be pickled: it belongs to this process's ring. "
            "Send context.geometry, or its schedules, and plan again where they arrive."
        )

    def __repr__(self) -> str:
        return f"Plan(mask={str(self.mask)[:60]}, {self.partition!r})"


_TOPIC = "an attention call"
_BACKWARD_TOPIC = "a backward call"


@dataclass(frozen=True, eq=False)
class _Executable:
    """A plan with a call's options fixed: what an op's handle stands for."""

    plan: Plan
    kernel: str | Kernel | None

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, int]:
        plan, wire, kernel = self.plan, _wire(q, k, v), choose(_call(q, k, v, scale), self.kernel)
        plan._agree(_TOPIC, wire, _facts(wire, kernel, scale))
        jobs = plan._jobs(wire, kernel, scale)
        if q.shape[0] == 0:
            out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
            return out, q.new_zeros(q.shape[:-1], dtype=accumulator_dtype(q.dtype)), jobs[0].call
        rows = sharding.slices(plan._core, plan._context.driver.ring_ranks)
        programs = [ring.forward(job, q[:, :, r], k[:, :, r], v[:, :, r]) for job, r in zip(jobs, rows, strict=True)]
        with torch.autocast(q.device.type, enabled=False):
            results = plan._context.driver.run(programs)
        return _joined([r[0] for r in results]), _joined([r[1] for r in results]), jobs[0].call

    def run_backward(
        self, grads: Grads, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, call: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        plan, wire = self.plan, _wire(q, k, v)
        kernel = choose(_call(q, k, v, scale), self.kernel)
        plan._agree(_BACKWARD_TOPIC, wire, _facts(wire, kernel, scale) | {"gradients of q, k, v": str(grads.needs)})
        jobs = plan._jobs(wire, kernel, scale, of=call)
        if q.shape[0] == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        rows = sharding.slices(plan._core, plan._context.driver.ring_ranks)
        saved = _saved(grads, out, lse)
        programs = [
            ring.backward(job, q[:, :, r], k[:, :, r], v[:, :, r], saved.rows(Rows(slice(None), r)))
            for job, r in zip(jobs, rows, strict=True)
        ]
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv = zip(*plan._context.driver.run(programs), strict=True)
        return _joined(dq), _joined(dk), _joined(dv)


def _saved(grads: Grads, out: Tensor, lse: Tensor) -> Saved:
    dtype = accumulator_dtype(out.dtype)
    delta = (out.to(dtype) * grads.dout.to(dtype)).sum(-1)
    if grads.dlse is not None:
        delta -= grads.dlse
    return Saved(out, lse, grads.dout, grads.dlse, delta)


def _step_tiles(schedule: Schedule) -> tuple[list[StepTiles], list[StepTiles]]:
    one, two = schedule.forward, schedule.backward
    backward = [StepTiles(two.tiles_of(step)) for step in range(len(two))]
    offsets = two.tile_offsets[: len(one.tile_offsets)]  # backward's extra last steps have none
    if np.array_equal(one.tiles, two.tiles) and np.array_equal(one.tile_offsets, offsets):
        return backward, backward
    return [StepTiles(one.tiles_of(step)) for step in range(len(one))], backward


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Ranks' rows joined; a fresh contiguous tensor in any case, because an op's results must not alias its inputs."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), 2)


def _call(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Call:
    return Call(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, q.device.type, scale)


def _wire(q: Tensor, k: Tensor, v: Tensor) -> Format:
    size = accumulator_dtype(q.dtype).itemsize
    dtype = str(q.dtype).removeprefix("torch.")
    return Format(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], dtype, q.dtype.itemsize, size)


def _facts(wire: Format, kernel: Kernel, scale: float) -> dict[str, str]:
    return {**{k: str(v) for k, v in asdict(wire).items()}, "scale": repr(scale), "kernel": kernel.name}


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
