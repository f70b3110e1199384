"""Where a loss or a gradient stopped being finite: found only after it did, by running the same batch once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ringspun.train.parallel.ranks import Mesh

_NONE = float("inf")


@dataclass(frozen=True)
class Why:
    """Looks for where a NaN or Inf of a step came from. Every rank asks, and the same.

    Args:
        model: whose modules are watched, and whose parameters have gradients. ranks: of the job.
        forward: runs the step's batch again.
    """

    model: nn.Module
    ranks: Mesh
    forward: Callable[[], object]

    def loss(self) -> str:
        """In words, the first module that gives one, and on which rank. Collective; nothing is changed."""
        names = [name for name, _ in self.model.named_modules()]
        with torch.no_grad(), _watching(self.model) as seen:
            self.forward()
        rows = self.ranks.gather(seen or [_NONE, _NONE])
        moment, rank = min((row[0], rank) for rank, row in enumerate(rows))
        if moment == _NONE:
            return "no module gives one: it is the loss's own"
        return f"the first that gives one is {names[int(rows[rank][1])] or 'the model'} on rank {rank}"

    def gradient(self, rank: int) -> str:
        """In words, of the parameters whose gradients have one on `rank`, that which backward meets first."""
        parameters = list(self.model.named_parameters())
        odd = [place for place, (_, parameter) in enumerate(parameters) if not _finite(parameter.grad)]
        place = int(self.ranks.gather([max(odd, default=-1)])[rank][0])
        return f"first that of {parameters[place][0]}" if place >= 0 else "of no parameter by itself"


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[float]]:
    """Gets [how many modules had run, its place among the modules] of the first whose output is not finite."""
    seen: list[float] = []
    calls = 0

    def look(place: int, output: Any) -> None:
        nonlocal calls
        calls += 1
        if not seen and not all(_finite(x) for x in pytree.tree_leaves(output) if isinstance(x, Tensor)):
            seen.extend((float(calls), float(place)))

    handles = [
        module.register_forward_hook(lambda _module, _args, output, place=place: look(place, output))
        for place, (_, module) in enumerate(model.named_modules())
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _finite(tensor: Tensor | None) -> bool:
    if tensor is None or not tensor.is_floating_point():
        return True
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())
