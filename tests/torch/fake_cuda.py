"""Fake CUDA tensors with a PyTorch for CPUs: they have a device, shapes, strides and dtypes, no bytes; ops are run by
their shape functions, which raise for operands that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import ringspun.torch.mail
from ringspun.torch.buffers import BufferPool

aten = torch.ops.aten


class WithoutDevice(TorchFunctionMode):
    """What of PyTorch's Python methods asks for the device, which is not there, by ops that do not: ``x[...]`` by
    `select`, `narrow` and `unsqueeze`, and copies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _picked(*args)
        if func is Tensor.__setitem__:
            x, where, value = args
            found = _picked(x, where)
            aten.copy_.default(found, value) if isinstance(value, Tensor) else found.fill_(value)
            return None
        if func is Tensor.copy_:
            return aten.copy_.default(*args)
        if func is Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func is Tensor.to and isinstance(args[1], torch.device):
            return aten._to_copy.default(args[0], device=args[1])
        return func(*args, **(kwargs or {}))


def _picked(x: Tensor, where: Any) -> Tensor:
    where = where if isinstance(where, tuple) else (where,)
    if Ellipsis in [w for w in where if not isinstance(w, Tensor)]:
        at = next(n for n, w in enumerate(where) if w is Ellipsis)
        room = x.ndim - sum(w is not None and w is not Ellipsis for w in where)
        where = (*where[:at], *[slice(None)] * room, *where[at + 1 :])
    dim = 0
    for w in where:
        if w is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(w, slice):
            first, last, step = w.indices(x.shape[dim])
            assert step == 1
            x, dim = x.narrow(dim, first, max(0, last - first)), dim + 1
        elif isinstance(w, Tensor | list):
            rows = torch.as_tensor(w, device=x.device)
            x, dim = x.index_select(dim, rows), dim + 1
        else:
            x = x.select(dim, w)
    return x


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Everything within is fake. A ring's messages are moved, but nobody reads their headers, which have no bytes, and
    buffers are not told apart by their addresses."""
    nothing = dict.fromkeys(("seal", "clear", "check"), lambda *_, **__: None)
    with (
        mock.patch.multiple(ringspun.torch.mail, **nothing),
        mock.patch.object(BufferPool, "lease", lambda _, n, device: torch.empty(n, dtype=torch.uint8, device=device)),
        mock.patch.object(BufferPool, "give_back", lambda *_: None),
        FakeTensorMode(),
        WithoutDevice(),
    ):
        yield
