"""Running the shared cases on PyTorch: a ring (loopback or processes) and dense attention in the same dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspun.testing.cases import BUCKETS, Case, Inputs, bias_of_positions, uses_lse
from ringspun.testing.comparison import TENSORS
from ringspun.testing.yardstick import rounded as rounded  # cases are rounded where they are run
from ringspun.torch import ContextParallel, Loopback, Plan
from ringspun.torch.bias import Alibi, Bias, RelativeTable
from ringspun.torch.kernels import Kernel

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def run_ring(
    case: Case,
    given: Inputs,
    context: ContextParallel | None = None,
    *,
    kernel: str | Kernel | None = None,
    plan: Plan | None = None,
) -> dict[str, np.ndarray]:
    """A case on a ring, forward and backward, gathered in global order: float64 copies of out, lse, dq, dk, dv, and
    where the case has such inputs of dsinks, dbias.

    Args:
        context: the ring; default a `Loopback` of the case's size. Gradients are summed over a ring of processes.
        plan: of the case; default one by the ring's own layout.
    """
    context = context or ContextParallel(Loopback(case.ranks, seed=case.seed), layout=case.layout)
    plan = plan or plan_of(case, context)
    queries, keys, dtype = plan.queries, plan.keys, getattr(torch, case.dtype)
    q, k, v = (
        side.shard(torch.from_numpy(x).to(dtype), dim=2).requires_grad_()
        for side, x in ((queries, given.q), (keys, given.k), (keys, given.v))
    )
    shared = {
        name: torch.from_numpy(x).to(dtype).requires_grad_()
        for name, x in (("sinks", given.sinks), ("bias", given.bias))
        if x is not None
    }
    asked = case.arguments
    out, lse = plan.attention(
        q, k, v, scale=asked.scale, softcap=asked.softcap, sinks=shared.get("sinks"),
        bias=_bias(asked.bias, shared.get("bias")), return_lse=True, kernel=kernel,
    )  # fmt: skip
    dout = queries.shard(torch.from_numpy(given.dout).to(dtype), dim=2)
    dlse = queries.shard(torch.from_numpy(given.dlse).to(lse.dtype), dim=2)
    # where nobody uses lse, which is the usual call: the extra column that carries dlse would be rounded in bfloat16
    ends, grads = ((out, lse), (dout, dlse)) if uses_lse(case) else ((out,), (dout,))
    dq, dk, dv, *shares = torch.autograd.grad(ends, (q, k, v, *shared.values()), grads)
    by_query = {name: _numpy(queries.gather(x.detach(), dim=2)) for name, x in (("out", out), ("lse", lse), ("dq", dq))}
    by_key = {name: _numpy(keys.gather(x, dim=2)) for name, x in (("dk", dk), ("dv", dv))}
    sums = {f"d{name}": _numpy(context.driver.all_reduce(x.double())) for name, x in zip(shared, shares, strict=True)}
    return by_query | by_key | sums


def plan_of(case: Case, context: ContextParallel) -> Plan:
    """A case's plan on a ring."""
    return context.plan(
        case.seq_len, case.mask, key_len=case.key_len, key_layout=case.key_layout, query_start=case.query_start
    )


def _bias(kind: str, values: Tensor | None) -> Bias | None:
    if kind == "function":
        return bias_of_positions
    if values is None:
        return None
    return Alibi(values) if kind == "alibi" else RelativeTable(values, BUCKETS)


def run_dense(case: Case, given: Inputs) -> dict[str, np.ndarray]:
    """The same case as one call of torch's own attention with an explicit mask, in the case's dtype: the yardstick."""
    dtype = getattr(torch, case.dtype)
    size = max(case.shape.head_size, case.shape.value_size) + (case.dtype != "bfloat16")
    scale = case.shape.head_size**-0.5
    allowed = torch.from_numpy(case.allowed)
    bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -torch.inf)
    seen = allowed.any(-1)
    bias[~seen] = 0.0  # rows without keys are cut out by hand: ops differ on them
    q, k, v, dout = (_padded(x, size, dtype) for x in (given.q, given.k, given.v, given.dout))
    out, lse = _forward(q, k, v, attn_mask=bias, scale=scale)
    dout = dout * seen[:, None]
    op_out = out
    if case.dtype != "bfloat16":  # the spare column carries dlse: delta - dlse
        column = case.shape.value_size
        op_out = torch.zeros_like(out)
        delta = (out * dout).sum(-1) - torch.from_numpy(given.dlse).to(dtype)
        op_out[..., column], dout[..., column] = delta, seen.to(dtype)
    dq, dk, dv = _backward(dout, q, k, v, op_out, lse.contiguous(), 0.0, False, attn_mask=bias, scale=scale)
    out, lse = out * seen[:, None], lse.masked_fill(~seen, -torch.inf)
    d, e = case.shape.head_size, case.shape.value_size
    cut = dict(zip(TENSORS, (out[..., :e], lse, dq[..., :d], dk[..., :d], dv[..., :e]), strict=True))
    return {name: _numpy(x) for name, x in cut.items()}


def _padded(x: np.ndarray, size: int, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.pad(torch.from_numpy(x).to(dtype), (0, size - x.shape[-1]))


def _numpy(x: Tensor) -> Any:
    return x.detach().double().numpy()
