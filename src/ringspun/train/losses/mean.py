"""`TokenMean`: what the mean loss of a step is over, when its tokens lie on a ring, on data-parallel replicas of that
ring, and in several micro-batches.

    mean  = TokenMean(cp, data=mesh["data"])                  # once
    count = mean.count(micro_batches)                         # once a step: targets of all ranks and micro-batches
    for batch in micro_batches:                               # each from part.shard_batch
        logits = model(...)
        share = token_loss(logits, batch["shift_labels"], total_targets=count.total)
        (share * scale).backward()                            # scale = gradient_scale(model, mean)

What is summed is always each rank's own targets, so nothing has to know how many ranks there are, and no rank's tokens
count twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspun.errors import DataError, PlanError, RingspunError, ShapeError
from ringspun.torch.context import ContextParallel
from ringspun.torch.drivers import Driver, GroupDriver
from ringspun.torch.drivers.base import digest_of
from ringspun.torch.reduction import driver_of
from ringspun.train.losses.loss import IGNORED
from ringspun.train.losses.metrics import Metrics

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ringspun.torch.reduction import Group

_TOPIC = "the targets of a step"


@dataclass(frozen=True)
class StepCount:
    """What the ranks hold together in the micro-batches of one step, each token once.

    Args:
        targets: tokens that are predicted; a number for each token ahead that is predicted, so usually one.
        weights: the same, each target counted by its weight; equal to `targets` where there are none.
        tokens: tokens read, padding included. sequences: batch rows.
    """

    targets: tuple[int, ...]
    weights: tuple[float, ...]
    tokens: int
    sequences: int

    @property
    def total(self) -> float:
        """What the sum of the next tokens' losses is divided by.

        Raises:
            ShapeError: several tokens ahead are predicted.
        """
        if len(self.weights) != 1:
            raise ShapeError(
                f"total must be of one target a token; got {len(self.weights)}. Give count.weights to multi_token_loss."
            )
        return self.weights[0]


class TokenMean:
    """A ring, its data-parallel replicas, and the means over all their tokens.

    Args:
        ring: a ring (`ContextParallel`), or what it is made from. Without replicas and ring:
            ``TokenMean(Loopback(1))``.
        data: the ranks that hold the same part of other sequences, one of each ring: a process group, or a mesh of any
            number of dimensions (``mesh["data"]``); None: there is one ring.
    Raises:
        PlanError: `data` holds other ranks of this rank's ring.
    """

    def __init__(
        self, ring: Group = None, *, data: ContextParallel | dist.ProcessGroup | DeviceMesh | None = None
    ) -> None:
        self._ring = driver_of(ring)
        self._data = [driver_of(axis) for axis in _axes(data)]
        ranks, me = world_ranks(self._ring), set(_own_rank())
        for driver in self._data:
            if both := set(world_ranks(driver)) & set(ranks) - me:
                raise PlanError(
                    "data must be the ranks that hold the same part of other sequences; got "
                    f"{list(world_ranks(driver))}, of which {sorted(both)} are in this rank's ring {list(ranks)}. "
                    "Pass the data dimension, mesh['data']."
                )

    @property
    def data_size(self) -> int:
        """Rings that read different sequences (data parallelism)."""
        return math.prod(driver.size for driver in self._data)

    @property
    def processes(self) -> int:
        """Processes of all rings; a `Loopback` is one."""
        return self._ring.size // len(self._ring.ring_ranks) * self.data_size

    @property
    def own_lines(self) -> tuple[tuple[int, ...], ...]:
        """World ranks of this rank's ring, and of each dimension of the data ranks that it stands in."""
        return tuple(world_ranks(driver) for driver in (self._ring, *self._data))

    def count(self, micro_batches: Sequence[Mapping[str, Any]]) -> StepCount:
        """The targets of all ranks in all micro-batches of a step. Collective: once a step, before its first loss; or
        after its last backward, if losses are sums (``total_targets=1``) and gradients are divided by
        `StepCount.total` then.

        Args:
            micro_batches: of this rank, as `Partition.shard_batch` or `shard_targets` makes them. Read are
                `shift_labels`, `shift_loss_weights` and `num_items_in_batch`, where there are.
        Raises:
            DataError: on all ranks of a ring, when they do not hold the targets that `num_items_in_batch` says; weights
                that are negative or not finite. ShapeError: no micro-batch, or one without `shift_labels`.
            PlanMismatchError: ranks have another number of micro-batches; ranks of a ring another `num_items_in_batch`.
            PeerError: on another rank one of these was raised.
        """
        failure: Exception | None = None
        sums, rows, declared = torch.zeros(0, dtype=torch.float64), 0, None
        fields: dict[str, str] = {}
        try:
            sums, rows, declared = _of_this_rank(micro_batches)
            fields = {"micro_batches": str(len(micro_batches)), "targets of a token": str(len(sums) // 2)}
        except Exception as problem:  # whatever it is, the other ranks are waiting to hear of it
            failure = problem
        for driver in (self._ring, *self._data):
            # who failed on one axis tells those on the next, so that nobody waits
            own = fields | {"num_items_in_batch": str(declared), "rows": str(rows)} if driver is self._ring else fields
            try:
                driver.agree(_TOPIC, digest_of(own), own, failure)
                sums = driver.all_reduce(sums)
                if driver is self._ring:
                    _check_declared(sums, declared, driver)
                    sums = torch.cat([sums, sums.new_tensor([rows])])
            except RingspunError as problem:
                failure = problem
        if failure is not None:
            raise failure
        tokens, *heads, sequences = sums.tolist()
        n = len(heads) // 2
        return StepCount(tuple(int(x) for x in heads[:n]), tuple(heads[n:]), int(tokens), int(sequences))

    def whole(self, share: Tensor) -> Tensor:
        """The sum of all ranks' shares, of a loss or of any sum over tokens; detached. Collective."""
        total = share.detach()
        for driver in (self._ring, *self._data):
            total = driver.all_reduce(total)
        return total

    def share_of(self, whole: Tensor) -> Tensor:
        """This rank's share of what every rank of its ring has whole (computed from gathered values, say), so that
        the sum over the ring counts it once. Differentiable."""
        return whole / (self._ring.size // len(self._ring.ring_ranks))

    def metrics(self, sums: Tensor) -> Metrics:
        """Means over the loss tokens of all ranks. Collective.

        Args:
            sums: of this rank, from `ringspun.train.losses.metrics.token_sums`; of several micro-batches added up.
        """
        return Metrics.of(self.whole(sums))

    def steps_per_epoch(self, samples: int, *, rows: int, micro_batches: int = 1) -> int:
        """Optimizer steps until all of `samples` sequences were read once: ranks of a ring read the same ones.

        Args:
            samples: sequences of the data. rows: of one micro-batch of one ring. micro_batches: of a step.
        """
        return math.ceil(samples / (rows * micro_batches * self.data_size))


@dataclass
class Progress:
    """What a run has read so far, each token and sequence once.

    Args:
        samples: sequences of one epoch.
    """

    samples: int
    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    targets: int = 0

    def add(self, count: StepCount) -> None:
        """One step more."""
        self.steps += 1
        self.sequences += count.sequences
        self.tokens += count.tokens
        self.targets += count.targets[0]

    @property
    def epoch(self) -> float:
        """Epochs so far."""
        return self.sequences / self.samples


def world_ranks(driver: Driver) -> tuple[int, ...]:
    """World ranks of a driver's processes, as far as they are known; this process's own otherwise."""
    return tuple(dist.get_process_group_ranks(driver.group)) if isinstance(driver, GroupDriver) else _own_rank()


def _own_rank() -> tuple[int, ...]:
    return (dist.get_rank() if dist.is_initialized() else 0,)


def _axes(data: Any) -> list[Any]:
    if data is None:
        return []
    if isinstance(data, dist.device_mesh.DeviceMesh):
        return [data.get_group(axis) for axis in range(data.ndim)]
    return [data]


def _of_this_rank(micro_batches: Sequence[Mapping[str, Any]]) -> tuple[Tensor, int, list[int] | None]:
    """Tokens, targets and weights of each token ahead; batch rows; targets of whole sequences, where they are said."""
    if isinstance(micro_batches, Mapping) or not micro_batches:
        raise ShapeError("micro_batches must be a list of at least one batch; got none. Write count([batch]).")
    for batch in micro_batches:
        if not isinstance(batch.get("shift_labels"), Tensor):
            names = ", ".join(batch) or "nothing"
            raise ShapeError(f"micro_batches must hold shift_labels; got one of {names}. Use part.shard_batch.")
    if len({batch["shift_labels"].shape[2:] for batch in micro_batches}) > 1:
        raise ShapeError("micro_batches must predict the same number of tokens ahead; got several.")
    sums = torch.stack([_sums(batch) for batch in micro_batches]).sum(dim=0)
    rows = sum(len(batch["shift_labels"]) for batch in micro_batches)
    declared = [batch.get("num_items_in_batch") for batch in micro_batches]
    return sums, rows, None if None in declared else [int(n) for n in declared if n is not None]


def _sums(batch: Mapping[str, Any]) -> Tensor:
    labels, weights = batch["shift_labels"], batch.get("shift_loss_weights")
    labels = labels[..., None] if labels.ndim == 2 else labels
    real = labels != IGNORED
    targets = real.sum(dim=(0, 1)).double()
    counted = targets
    if weights is not None:
        used = weights.reshape(labels.shape).double().masked_fill(~real, 0)
        if not bool((used.isfinite() & (used >= 0)).all()):
            raise DataError("loss weights must be finite and at least 0; got one that is not. They divide the loss.")
        counted = used.sum(dim=(0, 1))
    tokens = targets.new_tensor([labels.shape[0] * labels.shape[1]])
    return torch.cat([tokens, targets, counted]).cpu()


def _check_declared(sums: Tensor, declared: list[int] | None, ring: Driver) -> None:
    found = int(sums[1 : 1 + len(sums) // 2].sum())
    if declared is not None and found != sum(declared):
        raise DataError(
            f"ranks of a ring must hold each target once; they hold {found} together, and num_items_in_batch says "
            f"{sum(declared)} (ring of {ring.size}). Give all of them the same batch, and cut it by part.shard_batch."
        )
