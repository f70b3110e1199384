"""Torch's fused attentions on NVIDIA GPUs, in plain torch on any device and in any float dtype: shapes, layouts and
quirks as PyTorch's source has them (ATen/native/transformers/cuda, ATen/native/cudnn), and an error where the real ones
would read what is not meant. So all but the ops themselves can be held against the oracle where there is no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ringspun.torch.kernels import AtenCudnn, AtenEfficient, AtenFlash, Call
from ringspun.torch.kernels.aten_flash import FlashOps
from ringspun.torch.kernels.aten_fused import FusedOps


def seen(n: int, m: int, left: int | None, right: int | None, most_keys: int | None = None) -> Tensor:
    """Which keys flash attention shows to which rows, as its C++ makes it of its arguments.

    Args:
        most_keys: of the longest sequence, which bounds are compared with; default `m`.
    """
    most_keys = m if most_keys is None else most_keys
    left, right = (-1 if x is None or x >= most_keys else x for x in (left, right))
    if left < 0 and right < 0:
        return torch.ones(n, m, dtype=torch.bool)
    left, right = (most_keys if x < 0 else x for x in (left, right))
    i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)[None, :]
    return (j >= i - left) & (j <= i + right)


def upper_left(n: int, m: int, causal: bool) -> Tensor:
    """Which keys the other two show to which rows."""
    return torch.ones(n, m, dtype=torch.bool).tril() if causal else torch.ones(n, m, dtype=torch.bool)


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``[B, H, T, D]`` -> out in q's dtype, lse ``[B, H, T]``; a row without keys has 0 and +inf."""
    p, lse = _weights(q, k, allowed, scale)
    out = p @ _wide(v, q)
    return out.to(q.dtype), lse


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, allowed: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """By the lse given, and by a delta made of what is given for `out`."""
    scores = _wide(q, q) @ _wide(k, q).mT * scale
    p = torch.exp(scores - lse[..., None]).masked_fill(~allowed, 0.0)
    wide = _wide(dout, q)
    delta = (wide * _wide(out, q)).sum(-1, keepdim=True)
    ds = p * (wide @ _wide(v, q).mT - delta) * scale
    dq, dk, dv = ds @ _wide(k, q), ds.mT @ _wide(q, q), p.mT @ wide
    return dq.to(q.dtype), _folded(dk, k), _folded(dv, v)


def _weights(q: Tensor, k: Tensor, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = (_wide(q, q) @ _wide(k, q).mT * scale).masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(scores, -1) if k.shape[2] else scores.new_full(scores.shape[:-1], -torch.inf)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return torch.exp(scores - lse[..., None]), lse


def _wide(x: Tensor, like: Tensor) -> Tensor:
    x = x.double() if x.dtype == torch.float64 else x.float()
    return x.repeat_interleave(like.shape[1] // x.shape[1], 1)


def _folded(dx: Tensor, x: Tensor) -> Tensor:
    groups = dx.shape[1] // x.shape[1]
    return dx.reshape(x.shape[0], x.shape[1], groups, *x.shape[2:]).sum(2).to(x.dtype)


def aligned(*tensors: Tensor) -> None:
    """The ops read 16 bytes at once."""
    for x in tensors:
        assert x.stride(-1) == 1, "rows lie together"
        assert x.shape[-1] % 8 == 0, "head sizes are padded"
        offset = x.data_ptr() % 16, *(s * x.itemsize % 16 for s in x.stride()[:-1])
        assert not any(offset), f"rows begin at multiples of 16 bytes: {x.stride()}"


@dataclass
class EmulatedFlash:
    """Notes its calls: packed or not, and the window."""

    calls: list[tuple[bool, object, object]] = field(default_factory=list)

    def forward(self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, **window):
        assert dropout == 0.0 and debug is False
        allowed = self._checked(q, k, v, cum_q, cum_k, max_q, max_k, causal, **window)
        self.calls.append((cum_q is not None, *window.values()))
        if cum_q is None:
            out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), allowed(q.shape[1], k.shape[1]), scale)
            return out.transpose(1, 2), lse.contiguous(), None, None, None
        out, lse = torch.full_like(q, torch.nan), q.new_full(q.shape[1::-1], torch.nan, dtype=_accumulator(q))
        for rows, keys in _sequences(cum_q, cum_k):
            some = q[rows], k[keys], v[keys]
            found = attend(*(x.transpose(0, 1)[None] for x in some), allowed(len(some[0]), len(some[1])), scale)
            out[rows], lse[:, rows] = found[0][0].transpose(0, 1), found[1][0]
        return out, lse, None, None, None

    def backward(
        self, dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, unused, *, scale, **window
    ):
        assert dropout == 0.0 and seed.numel() == unused.numel() == 2
        assert lse.is_contiguous() and lse.dtype == _accumulator(q), "lse's strides are not looked at"
        assert dout.shape == out.shape == q.shape and dout.dtype == out.dtype == q.dtype
        allowed = self._checked(q, k, v, cum_q, cum_k, max_q, max_k, causal, **window)
        if cum_q is None:
            assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
            given = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
            found = attend_backward(*given, lse, allowed(q.shape[1], k.shape[1]), scale)
            return tuple(x.transpose(1, 2) for x in found)
        assert lse.shape == (q.shape[1], q.shape[0])
        grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        for rows, keys in _sequences(cum_q, cum_k):
            given = [x.transpose(0, 1)[None] for x in (dout[rows], q[rows], k[keys], v[keys], out[rows])]
            found = attend_backward(*given, lse[None, :, rows], allowed(given[0].shape[2], given[2].shape[2]), scale)
            for grad, part, at in zip(grads, found, (rows, keys, keys), strict=True):
                grad[at] = part[0].transpose(0, 1)
        return tuple(grads)

    def _checked(self, q, k, v, cum_q, cum_k, max_q, max_k, causal, *, window_size_left, window_size_right):
        aligned(q, k, v)
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
        assert q.ndim == k.ndim == v.ndim == (4 if cum_q is None else 3)
        if cum_q is None:
            assert cum_k is None and (max_q, max_k) == (q.shape[1], k.shape[1]) and min(max_q, max_k) > 0
        else:
            for cum, x, most in ((cum_q, q, max_q), (cum_k, k, max_k)):
                assert cum.dtype == torch.int32 and cum.is_contiguous()
                assert int(cum[0]) == 0 and int(cum[-1]) == len(x) and int(cum.diff().min()) >= 0
                assert int(cum.diff().max()) <= most
            assert max_q > 1, "of one row in every sequence, if of no more in any"
        left, right = (None, 0) if causal else (window_size_left, window_size_right)
        return lambda n, m: seen(n, m, left, right, max_k)


@dataclass
class EmulatedEfficient:
    """Memory-efficient attention."""

    def forward(self, q, k, v, bias, with_lse, dropout, causal, *, scale):
        self._checked(q, k, v, causal)
        assert bias is None and with_lse and dropout == 0.0
        out, lse = attend(q, k, v, upper_left(q.shape[2], k.shape[2], causal), scale)
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf), None, None

    def backward(self, dout, q, k, v, bias, out, lse, seed, offset, dropout, needs, causal, *, scale):
        self._checked(q, k, v, causal)
        assert bias is None and dropout == 0.0 and list(needs) == [True, True, True, False]
        rows = q.shape[2]
        assert out.transpose(1, 2).is_contiguous(), "out lies as this op's forward lays it"
        assert lse.shape[2] == -(-rows // 32) * 32 and lse.stride(-1) == 1
        assert torch.isposinf(lse[..., rows:]).all(), "nothing comes of rows that are not there"
        allowed = upper_left(rows, k.shape[2], causal)
        dq, dk, dv = attend_backward(dout, q, k, v, out, lse[..., :rows], allowed, scale)
        return dq, dk, dv, None

    def _checked(self, q, k, v, causal):
        aligned(q, k, v)
        assert q.shape[1] == k.shape[1] == v.shape[1], "it knows no groups"
        assert not causal or k.shape[2] <= q.shape[2], "keys that no row sees get no gradient"


@dataclass
class EmulatedCudnn:
    """cuDNN. `dims`: of its lse. Plans of backward are kept by what the real ones are kept by."""

    dims: int = 4
    plans: dict[object, object] = field(default_factory=dict)

    def forward(self, q, k, v, bias, with_lse, dropout, causal, debug, *, scale):
        self._checked(q, k, v)
        assert bias is None and with_lse and dropout == 0.0 and debug is False
        out, lse = attend(q, k, v, upper_left(q.shape[2], k.shape[2], causal), scale)
        return out.contiguous(), lse[..., None] if self.dims == 4 else lse, None, None, None, None, None, None, None

    def backward(
        self, dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale
    ):
        self._checked(q, k, v)
        assert bias is cum_q is cum_k is None and dropout == 0.0 and (max_q, max_k) == (q.shape[2], k.shape[2])
        assert lse.ndim == self.dims and lse.is_contiguous()
        key = *((x.shape, x.stride()) for x in (q, k, v)), causal
        strides = dout.stride(), out.stride()
        assert strides == self.plans.setdefault(key, strides), "a plan for other strides would be run"
        assert dout.stride() == out.stride(), "cuDNN before 9.5.1 wants dout laid out like out"
        allowed = upper_left(max_q, max_k, causal)
        return attend_backward(dout, q, k, v, out, lse.reshape(q.shape[:3]), allowed, scale)

    def _checked(self, q, k, v):
        aligned(q, k, v)
        assert k.shape[2] > 1, "it does not do one key"


class Flash(AtenFlash):
    """The kernel on emulated ops: on any device, in any dtype."""

    devices = None

    def __init__(self) -> None:
        self.emulated = EmulatedFlash()
        super().__init__(FlashOps(self.emulated.forward, self.emulated.backward))

    def refuses(self, call: Call) -> str | None:
        return super().refuses(as_on_gpu(call))


class Efficient(AtenEfficient):
    """Likewise."""

    devices = None

    def __init__(self) -> None:
        emulated = EmulatedEfficient()
        super().__init__(FusedOps(emulated.forward, emulated.backward))

    def refuses(self, call: Call) -> str | None:
        return super().refuses(as_on_gpu(call))


class Cudnn(AtenCudnn):
    """Likewise."""

    devices = None

    def __init__(self, dims: int = 4) -> None:
        emulated = EmulatedCudnn(dims)
        super().__init__(FusedOps(emulated.forward, emulated.backward))
        self._few = Efficient()

    def refuses(self, call: Call) -> str | None:
        return super().refuses(as_on_gpu(call))


def as_on_gpu(call: Call) -> Call:
    """The same call, of a device and in a dtype that the real ops take."""
    return replace(call, device="cuda", dtype=torch.bfloat16)


def _sequences(cum_q: Tensor, cum_k: Tensor):
    ends = zip(cum_q.tolist()[:-1], cum_q.tolist()[1:], cum_k.tolist()[:-1], cum_k.tolist()[1:], strict=True)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in ends]


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
