"""`ContextParallel`, `Partition` and `Plan`: what a user holds.

cp   = ContextParallel(group, layout=Zigzag())        # the ring
part = cp.partition(seq_len=S, documents=docs)        # who holds which token
plan = part.plan(Causal() & docs)                     # what to compute
out  = plan.attention(q, k, v)                        # [B, H, T, D]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspun.core import partition as core_partition
from ringspun.core.layout import Layout, Zigzag
from ringspun.core.mask import Documents, Mask
from ringspun.core.route import Ring, Route
from ringspun.core.schedule import Geometry, Schedule, compile_schedules, input_digest
from ringspun.errors import PlanError, ShapeError
from ringspun.torch import sharding
from ringspun.torch.buffers import BufferPool
from ringspun.torch.drivers import Driver, Gloo, Loopback
from ringspun.torch.kernels import Kernel
from ringspun.torch.ops import KEPT_PER_CONTEXT
from ringspun.torch.plan import Plan, check_schedules

CHECKS = ("header",)


class ContextParallel:
    """A ring of ranks that together hold one sequence (context parallelism; its size is what others call `cp_size`).

    Args:
        group: a gloo process group (any world ranks; its order is the ring's order), a one-dimensional `DeviceMesh`, a
            `Loopback`, or None: the default group, or this process alone where torch.distributed is not initialised.
        layout: the rule that deals tokens to ranks. route: how blocks travel: "auto" or a `Route`.
        checks: "header": every message carries a header that the receiver compares with its own schedule.
        timeout_s: longest wait for a peer (seconds).
    Raises:
        PlanError: a group that cannot be used.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | dist.device_mesh.DeviceMesh | Loopback | None = None,
        *,
        layout: Layout | None = None,
        route: Route | str = "auto",
        checks: str = "header",
        timeout_s: float = 600.0,
    ) -> None:
        if checks not in CHECKS:
            raise PlanError(f"checks must be one of {CHECKS}; got {checks!r}.")
        if not (route == "auto" or isinstance(route, Route)):
            raise PlanError(f"route must be 'auto' or a Route; got {route!r}.")
        if not timeout_s > 0:
            raise PlanError(f"timeout_s must be positive; got {timeout_s}.")
        self.driver = _driver(group, timeout_s)
        self.pool = BufferPool()
        self.calls = 0
        self.agreed_sizes = ""  # of the last call's messages, on all ranks
        layout = Zigzag() if layout is None else layout
        if not isinstance(layout, Layout):
            raise PlanError(f"layout must be a Layout, e.g. Zigzag(); got {layout!r}.")
        chosen = route if isinstance(route, Route) else Ring()
        self.geometry = Geometry(self.driver.size, self.driver.ring_ranks, layout, chosen)
        self._plans: OrderedDict[bytes, Plan] = OrderedDict()

    @property
    def ring_size(self) -> int:
        """Number of ranks R."""
        return self.driver.size

    @property
    def ring_rank(self) -> int:
        """This process's place in the ring; 0 for a loopback, which plays all of them."""
        return self.driver.ring_ranks[0]

    def partition(self, seq_len: int, *, documents: Documents | None = None) -> Partition:
        """Who holds which of `seq_len` tokens. Local: no communication.

        Raises:
            LayoutError, MaskError: a length or documents that do not fit.
        """
        return Partition(self, self.geometry.partition(seq_len, documents))

    def plan(self, seq_len: int, mask: Mask, *, documents: Documents | None = None) -> Plan:
        """Partition and plan in one. Collective: every rank of the ring must call it, with equal arguments.

        Raises:
            PlanMismatchError: the ranks' arguments differ. PeerError: another rank's own plan failed, or it is late.
            PlanError, LayoutError, MaskError: arguments that do not go together; raised on every rank.
        """
        try:
            part = self.partition(seq_len, documents=documents)
        except Exception as failure:
            self._agree_on_plan(bytes(32), {}, failure)
            raise
        return part.plan(mask)

    def _plan(self, part: core_partition.Partition, what: Mask | Schedule | tuple[Schedule, ...]) -> Plan:
        """A plan for a partition, from the cache where there is one; collective every time, cached or not."""
        failure: Exception | None = None
        digest, key, plan, mask = bytes(32), b"", None, None
        try:
            mask = what if isinstance(what, Mask) else _mask_of(what)
            digest = input_digest(part, mask, self.geometry.route)
            key = digest if isinstance(what, Mask) else _key_of(what)
            plan = self._plans.get(key)
            if plan is None or plan.mask != mask:  # two classes of masks may write themselves alike
                plan = self._compile(part, mask, what, digest)
        except Exception as problem:
            failure = problem
        fields = {"seq_len": part.seq_len, "mask": mask, "layout": part.layout, "documents": part.documents}
        self._agree_on_plan(digest, {k: _shown(v) for k, v in fields.items()}, failure)
        assert plan is not None
        self._plans[key] = plan
        self._plans.move_to_end(key)
        if len(self._plans) > KEPT_PER_CONTEXT:
            self._plans.popitem(last=False)
        return plan

    def _compile(self, part: core_partition.Partition, mask: Mask, what: Any, inputs: bytes) -> Plan:
        route, ranks = self.geometry.route, self.geometry.ring_ranks
        made = compile_schedules(part, mask, route, ranks) if what is mask else check_schedules(what, ranks, inputs)
        return Plan(self, part, mask, made)

    def _agree_on_plan(self, digest: bytes, fields: dict[str, str], failure: Exception | None) -> None:
        self.driver.agree("the plan", digest, fields, failure)

    def __repr__(self) -> str:
        name = type(self.driver).__name__.lower()
        return f"ContextParallel(ring_size={self.ring_size}, layout={self.geometry.layout}, driver={name})"


class Partition:
    """Who holds which token of one sequence; made by `ContextParallel.partition`.

    On a `Loopback` this process holds all shards, joined in rank order; `slices[r]` are rank r's rows.
    """

    def __init__(self, context: ContextParallel, core: core_partition.Partition) -> None:
        self.context, self.core = context, core

    @property
    def seq_len(self) -> int:
        """Global length S (tokens)."""
        return int(self.core.seq_len)

    @property
    def documents(self) -> Documents | None:
        """The documents that the partition was made with."""
        return self.core.documents

    @property
    def local_tokens(self) -> int:
        """Rows that this process holds."""
        return sum(int(self.core.tokens[r]) for r in self.context.driver.ring_ranks)

    @property
    def slices(self) -> list[slice]:
        """Rows of each rank that this process plays, in the tensors that `shard` returns."""
        return sharding.slices(self.core, self.context.driver.ring_ranks)

    def positions(self, *, restart: bool = False, device: torch.device | str | None = None) -> Tensor:
        """Global position of each row that this process holds, int64 ``[T]``.

        Args:
            restart: count within each document instead (padding: 0); needs the partition's documents.
        Raises:
            PlanError: `restart` without documents.
        """
        return sharding.positions(self.core, self.context.driver.ring_ranks, restart).to(device or "cpu")

    def shard(self, x: Tensor, *, dim: int) -> Tensor:
        """The rows of `x` that this process holds, along `dim` (S there, T in the result). Differentiable.

        `x` is the whole tensor, the same on every rank; its gradient is this rank's share.
        Raises:
            ShapeError: `x` has not S entries along `dim`.
        """
        return sharding.shard(self.core, self.context.driver.ring_ranks, x, dim)

    def gather(self, x: Tensor, *, dim: int) -> Tensor:
        """All ranks' rows in global order: exactly S along `dim`. Collective. Differentiable: backward sums the shares.

        Raises:
            ShapeError: `x` has not this process's number of rows along `dim`.
        """
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != self.local_tokens:
            failure = ShapeError(
                f"gather must get {self.local_tokens} rows along dim {dim} (ring rank {self.context.ring_rank}); "
                f"got shape {tuple(x.shape)}."
            )
            self.context.driver.report(failure)  # the other ranks wait for these rows
            raise failure
        return sharding.gather(self.core, self.context.driver, x, dim)

    def shard_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """The shard of a language-model batch ``[B, S]``, labels shifted *before* they are cut.

        Args:
            batch: `input_ids`, optionally `labels` (-100: no target); other ``[B, S]`` tensors are sharded alike.
        Returns:
            the shards ``[B, T]``; `position_ids` (restarting in each document where there are documents); with
            `labels`,
            `shift_labels` (the next token of the same document, -100 at its end) and `num_items_in_batch`, the number
            of targets of the whole sequence, equal on all ranks.
        Raises:
            ShapeError: a tensor that is not ``[B, S]``.
        """
        return sharding.shard_batch(self.core, self.context.driver.ring_ranks, batch)

    def plan(self, mask: Mask | Schedule | tuple[Schedule, ...]) -> Plan:
        """What to compute over this partition. Collective: every rank must call it, with equal arguments.

        Args:
            mask: a mask, or what `ContextParallel.geometry.schedule` made of one (in a loader's worker, say).
        Raises: as `ContextParallel.plan`.
        """
        return self.context._plan(self.core, mask)

    def __repr__(self) -> str:
        return f"Partition(seq_len={self.seq_len}, tokens={self.core.tokens.tolist()}, layout={self.core.layout})"


def _driver(group: Any, timeout_s: float) -> Driver:
    if isinstance(group, Driver):
        return group
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise PlanError(f"mesh must have one dimension; got {group.ndim}. Pass the ring's own, e.g. mesh['ring'].")
        group = group.get_group()
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Loopback(1)
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise PlanError(
            f"group must be a process group that this rank belongs to, a mesh or a Loopback; got {group!r}."
        )
    if dist.get_world_size(group) == 1:
        return Loopback(1)
    backend = str(dist.get_backend(group))
    if "gloo" not in backend:
        raise PlanError(f"group must use the gloo backend; got {backend!r}. Other backends are not supported yet.")
    return Gloo(group, timeout_s=timeout_s)


def _mask_of(what: Any) -> Mask:
    """The mask that schedules were made from."""
    first = what[0] if isinstance(what, tuple) and what else what
    if isinstance(first, Schedule):
        return first.mask
    raise PlanError(f"mask must be a ringspun mask; got {what!r}. Combine Causal(), Window(...), ... with & and |.")


def _key_of(schedules: Schedule | tuple[Schedule, ...]) -> bytes:
    """What a plan of these very schedules is kept under: not their inputs alone, for somebody may have edited them."""
    return b"".join(s.digest for s in (schedules if isinstance(schedules, tuple) else (schedules,)))


def _shown(value: Any, limit: int = 120) -> str:
    text = str(value)
    return text if len(text) <= limit else text[:limit] + "..."


__all__ = ["ContextParallel", "Kernel", "Partition", "Plan"]
