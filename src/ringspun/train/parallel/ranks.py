"""What the ranks of one job do together besides attention: one all-reduce of the gradient, and one check of
the step.

Parameters are the same on all ranks and each rank's gradient is its share, so the gradient is the SUM over
the ring. It lives in one flat float32 buffer, of which every parameter's `.grad` is a view: one message, no
copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ringspun.errors import DataError, NonFiniteError
from ringspun.torch.drivers.base import Waits


@dataclass(frozen=True)
class Mesh:
    """The ranks of a job. Without a group: this process alone (which may play a whole ring by `Loopback`)."""

    group: dist.ProcessGroup | None = None
    waits: Waits = field(default_factory=Waits, compare=False)

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Processes of the group."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def sum_(self, values: Tensor) -> None:
        """Replaces `values` by their sum over the ranks."""
        if self.size > 1:
            with self.waits.timed():
                dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self.group)

    def gather(self, values: Iterable[float]) -> list[list[float]]:
        """The same few numbers of every rank, in rank order; as float64."""
        mine = torch.tensor(list(values), dtype=torch.float64)
        if self.size == 1:
            return [mine.tolist()]
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with self.waits.timed():
            dist.all_gather(rows, mine, group=self.group)
        return [row.tolist() for row in rows]


def flat_gradient(model: nn.Module) -> Tensor:
    """One float32 buffer whose pieces are the `.grad` of the model's parameters, zeroed; backward adds into
    it.

    Raises:
        TypeError: a parameter is not float32.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise TypeError(f"parameters must be float32; got {parameter.dtype} for {name}. Use autocast instead.")
    sizes = [p.numel() for p in parameters]
    flat = torch.zeros(sum(sizes))
    for parameter, piece in zip(parameters, torch.split(flat, sizes), strict=True):
        parameter.grad = piece.view_as(parameter)
    return flat


class Cause(Protocol):
    """Says in words where a NaN or Inf of a step came from. Collective: all ranks ask, and the same."""

    def loss(self) -> str:
        """Of the loss."""
        ...

    def gradient(self, rank: int) -> str:
        """Of the gradient that `rank` holds."""
        ...


def check_step(
    mesh: Mesh,
    *,
    step: int,
    loss: float,
    finite: bool,
    data_digest: int,
    summed: bool = False,
    why: Cause | None = None,
) -> float:
    """Looks at one step of every rank before the optimizer takes it; all ranks see the same and decide alike.

    Args:
        mesh: the ranks.
        step: number of the step, for the message.
        loss: this rank's share of the loss.
        finite: whether what this rank holds of the gradient has no NaN and no Inf.
        data_digest: digest of the tokens that this rank read.
        summed: what is held is the ranks' sum, which does not tell whose share was wrong.
        why: asked only once something is wrong.

    Returns:
        The loss of the whole sequence.

    Raises:
        NonFiniteError: on every rank, naming the first that has a NaN or Inf.
        DataError: on every rank, when ranks read different tokens.
    """
    rows = mesh.gather([loss, float(finite), float(data_digest)])
    for rank, (share, _, _) in enumerate(rows):
        if not math.isfinite(share):
            cause = "" if why is None else f"; {why.loss()}"
            raise _not_finite(step, f"on rank {rank} the loss is {share}{cause}")
    for rank, (_, whole, _) in enumerate(rows):
        if not whole:
            place = "summed over the ranks" if summed else f"on rank {rank}"
            cause = "" if why is None else f", {why.gradient(rank)}"
            raise _not_finite(step, f"{place} the gradient has a NaN or Inf{cause}")
    different = [rank for rank, row in enumerate(rows) if row[2] != rows[0][2]]
    if different:
        raise DataError(
            f"all ranks must read the same tokens; at step {step}, rank {different[0]} differs from rank 0. "
            "Give every rank the same data and config."
        )
    return math.fsum(row[0] for row in rows)


def _not_finite(step: int, what: str) -> NonFiniteError:
    return NonFiniteError(f"loss and gradients must be finite; at step {step} {what}.")


def clip_(gradient: Tensor, *, max_norm: float, step: int) -> float:
    """Scales the summed gradient down to `max_norm`; returns the norm that it had.

    Raises:
        NonFiniteError: the sum, or its norm, overflowed although every rank's share was finite.
    """
    norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    if not math.isfinite(norm):
        raise NonFiniteError(f"gradient norm must be finite; at step {step} the sum over the ranks has norm {norm}.")
    if norm > max_norm:
        gradient.mul_(max_norm / norm)
    return norm
