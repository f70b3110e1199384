"""How the ranks of a job make one gradient of their shares: by one all-reduce here, or by a wrapper in backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringspun.train.parallel.ranks import Mesh, clip_, flat_gradient
from ringspun.train.parallel.scaling import clip_gradients


class Gradient(ABC):
    """Of one model, on one rank. A step calls `zero`, then `backward` per micro-batch, `sum` and `clip`."""

    summed_in_backward: bool
    """Whether what `finite` looks at is the sum already, and not this rank's share."""

    @abstractmethod
    def zero(self) -> None:
        """Forgets the last step's."""

    @abstractmethod
    def backward(self, share: Tensor, *, last: bool) -> None:
        """Adds a micro-batch's.

        Args:
            share: this rank's share of the loss. last: no other micro-batch follows in this step.
        """

    @abstractmethod
    def finite(self) -> bool:
        """Whether there is no NaN and no Inf in what this rank holds."""

    @abstractmethod
    def sum(self, ranks: Mesh) -> None:
        """Sums the shares of all ranks, if that is still to do."""

    @abstractmethod
    def clip(self, max_norm: float, *, step: int) -> float:
        """Scales the sum down to `max_norm`; its norm before, the same on all ranks."""

    def during(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch."""
        return nullcontext()


class FlatGradient(Gradient):
    """Of a bare model: one float32 buffer, one all-reduce."""

    summed_in_backward = False

    def __init__(self, model: nn.Module) -> None:
        self.flat = flat_gradient(model)

    def zero(self) -> None:
        self.flat.zero_()

    def backward(self, share: Tensor, *, last: bool) -> None:
        share.backward()  # type: ignore[no-untyped-call]

    def finite(self) -> bool:
        return bool(torch.isfinite(self.flat).all())

    def sum(self, ranks: Mesh) -> None:
        ranks.sum_(self.flat)

    def clip(self, max_norm: float, *, step: int) -> float:
        return clip_(self.flat, max_norm=max_norm, step=step)


class WrappedGradient(Gradient):
    """Of a model that DDP or FSDP2 reduces.

    Args:
        model: as it is called. scale: its `gradient_scale`.
    """

    summed_in_backward = True

    def __init__(self, model: nn.Module, scale: float) -> None:
        self._model, self._scale = model, scale

    def zero(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def backward(self, share: Tensor, *, last: bool) -> None:
        (share * self._scale).backward()  # type: ignore[no-untyped-call]

    def finite(self) -> bool:
        return all(bool(torch.isfinite(grad).all()) for grad in self._held())

    def sum(self, ranks: Mesh) -> None:
        pass

    def clip(self, max_norm: float, *, step: int) -> float:
        return clip_gradients(self._model, max_norm)

    def during(self, *, last: bool) -> AbstractContextManager[None]:
        # FSDP reduces each micro-batch's: to keep gradients whole until the last one would cost what it saves
        if isinstance(self._model, DistributedDataParallel) and not last:
            return self._model.no_sync()
        return nullcontext()

    def _held(self) -> Iterator[Tensor]:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                yield parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
