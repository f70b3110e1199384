"""Attentions of torch as candidates for `certify`: a ring, a kernel, and what has the signature of torch's own.

certify(OnRing(ContextParallel(Loopback(4), layout=Zigzag())))     # a ring, in one thread
certify(OnRing(ContextParallel()))                                 # on every rank of a process group
certify(LocalKernel("eager"))                                      # a kernel alone
certify(Sdpa(torch.nn.functional.scaled_dot_product_attention))    # anything called as torch's attention is
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspun.core.partition import Partition
from ringspun.errors import KernelRefused, PlanError, UnsupportedByRing
from ringspun.testing.comparison import MANY_RANKS
from ringspun.testing.problem import Answer, Candidate, Owners, Problem
from ringspun.testing.torch import plan_of, run_ring
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.kernels import Kernel


class OnRing(Candidate):
    """A ring: problems are dealt out by its layout, answered, gathered. Over processes every rank certifies alike, and
    every rank has the whole report.

    Args:
        context: the ring. kernel: a kernel or its name; default the first that does not refuse.
    """

    def __init__(self, context: ContextParallel, *, kernel: str | Kernel | None = None) -> None:
        self.context, self.kernel = context, kernel
        which = "" if kernel is None else f"{kernel.name if isinstance(kernel, Kernel) else kernel} on "
        self.name = f"{which}a ring of {context.ring_size}, {context.geometry.layout}"

    def answer(self, problem: Problem) -> Answer:
        try:
            return Answer(**run_ring(problem.case, problem.given, self.context, kernel=self.kernel))
        except PlanError as refusal:  # a mask that this layout cannot deal with; found before anything is computed
            raise UnsupportedByRing(str(refusal)) from refusal

    def alone(self) -> LocalKernel | None:
        """The same kernel on one rank."""
        return LocalKernel(self.kernel) if self.context.ring_size >= MANY_RANKS else None

    def owners(self, problem: Problem) -> Owners:
        """The ring rank of each query and of each key."""
        local = ContextParallel(Loopback(self.context.ring_size), layout=self.context.geometry.layout)
        plan = plan_of(problem.case, local)
        return _owners(plan.queries.core), _owners(plan.keys.core)


class LocalKernel(OnRing):
    """A kernel by itself: one rank, no message.

    Args:
        kernel: a kernel or its name; None: for each call the first that does not refuse.
    """

    def __init__(self, kernel: str | Kernel | None) -> None:
        super().__init__(ContextParallel(Loopback(1)), kernel=kernel)
        self.name = kernel.name if isinstance(kernel, Kernel) else kernel or "the chosen kernel"


class Sdpa(Candidate):
    """A function called as `torch.nn.functional.scaled_dot_product_attention`: ``function(q, k, v, attn_mask=...)``.
    It gives no lse, and refuses what its signature has no place for.

    Args:
        function: `attn_mask` is boolean, ``[Sq, Sk]`` or ``[B, 1, Sq, Sk]``, True where a query may look; with a bias
            it is a float ``[H or 1, Sq, Sk]`` that is added to the scores. takes: which of the keywords "scale" and
            "enable_gqa" it knows. name: in reports; default its own.
    """

    gives = ("out", "dq", "dk", "dv", "dbias")

    def __init__(
        self,
        function: Callable[..., Tensor],
        *,
        takes: tuple[str, ...] = ("scale", "enable_gqa"),
        name: str | None = None,
    ) -> None:
        self._function, self._takes = function, takes
        self.name = name or str(getattr(function, "__name__", type(function).__name__))

    def answer(self, problem: Problem) -> Answer:
        options = self._options(problem)
        dtype = getattr(torch, problem.dtype)
        q, k, v = (torch.tensor(x, dtype=dtype, requires_grad=True) for x in (problem.q, problem.k, problem.v))
        mask, bias = torch.tensor(problem.allowed), None
        if problem.bias is not None:
            bias = torch.tensor(problem.bias, dtype=dtype, requires_grad=problem.bias_kind != "function")
            mask = bias.masked_fill(~mask, -torch.inf)
        out = self._function(q, k, v, attn_mask=mask, **options)
        wanted = [q, k, v] + ([bias] if bias is not None and bias.requires_grad else [])
        dq, dk, dv, *dbias = map(_numpy, torch.autograd.grad(out, wanted, torch.tensor(problem.dout, dtype=dtype)))
        return Answer(_numpy(out), None, dq, dk, dv, dbias=problem.bias_gradient(dbias[0]) if dbias else None)

    def _options(self, problem: Problem) -> dict[str, Any]:
        """Keywords of a call.

        Raises:
            KernelRefused: the signature has no place for what is asked.
        """
        asked: dict[str, Any] = {}
        if not problem.has_default_scale:
            asked["scale"] = problem.scale
        if problem.q.shape[1] != problem.k.shape[1]:
            asked["enable_gqa"] = True
        wanted = [n for n in ("softcap", "sinks") if getattr(problem, n) is not None]
        wanted += [n for n in asked if n not in self._takes]
        if wanted:
            raise KernelRefused(f"{' and '.join(wanted)} must not be asked for: {self.name} has no such argument.")
        return asked


def _owners(part: Partition) -> np.ndarray:
    owners = np.empty(part.seq_len, np.int64)
    for rank in range(part.ring_size):
        owners[part.indices(rank)] = rank
    return owners


def _numpy(x: Tensor) -> np.ndarray:
    return np.asarray(x.detach().double().numpy())
