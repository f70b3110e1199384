"""What `Plan.attention` is given: looked at before anything is computed or sent, and refused in the user's terms."""

from __future__ import annotations

import difflib
import numbers

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringspun.errors import DtypeError, NotDifferentiable, PlanError, ShapeError
from ringspun.torch.bias import Alibi, RelativeTable, Rule, function_rule
from ringspun.torch.drivers import Driver


def check_tensors(driver: Driver, rows: tuple[int, int], batch: int | None, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v fit each other, the driver, and the plan.

    Args:
        rows: queries and keys that this process holds. batch: rows that the plan's masks are for; None: any.
    Raises:
        ShapeError, DtypeError, NotDifferentiable: naming the tensor and the ring rank.
    """
    where = _where(driver)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x, where)
        if x.ndim != 4:
            raise ShapeError(f"{name} must be [B, H, T, D] {where}; got shape {tuple(x.shape)}.")
    if not (q.dtype == k.dtype == v.dtype):
        raise DtypeError(f"q, k and v must have one dtype {where}; got {q.dtype}, {k.dtype}, {v.dtype}.")
    if not (q.device == k.device == v.device):
        raise DtypeError(f"q, k and v must be on one device {where}; got {q.device}, {k.device}, {v.device}.")
    movable = driver.devices
    if movable is not None and q.device.type not in movable:
        raise DtypeError(f"q, k and v must be on {' or '.join(movable)} for this group {where}; got {q.device}.")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} {where}"
    if q.shape[2] != rows[0] or not (k.shape[2] == v.shape[2] == rows[1]):
        held, side = f"q, k and v must hold {rows[0]}", "plan.partition"
        other = "" if k.shape[2] == q.shape[2] else " Keys of another sequence: plan(..., key_len=...)."
        if rows[0] != rows[1]:
            held, side, other = f"q must hold {rows[0]}, k and v {rows[1]}", "plan.queries and plan.keys", ""
        raise ShapeError(
            f"{held} tokens in dim 2; got {shapes}. Shard them by {side}, and order them [B, H, T, D].{other}"
        )
    if not (q.shape[0] == k.shape[0] == v.shape[0]) or k.shape[1] != v.shape[1]:
        raise ShapeError(f"q, k and v must share B, and k and v their heads; got {shapes}.")
    if batch is not None and q.shape[0] != batch:
        raise ShapeError(f"q, k and v must have a batch of {batch}, a row per mask of the plan; got {shapes}.")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"query heads must be a multiple of key heads; got {shapes}.")
    if q.shape[3] != k.shape[3] or q.shape[3] == 0 or v.shape[3] == 0:
        raise ShapeError(f"q and k must have one head size, at least 1; got {shapes}.")


def check_terms(driver: Driver, q: Tensor, sinks: Tensor | None, bias: object) -> tuple[Rule | None, Tensor | None]:
    """Raise unless sinks and bias fit q; the bias as its rule and its tensor.

    Raises:
        ShapeError, DtypeError, NotDifferentiable: naming the argument and the ring rank.
    """
    heads = q.shape[1]
    if sinks is not None:
        _check_tensor("sinks", sinks, _where(driver), q)
        if sinks.shape != (heads,):
            raise ShapeError(f"sinks must be [H], one per query head; got {tuple(sinks.shape)} for {heads} heads.")
    if bias is None:
        return None, None
    if isinstance(bias, Alibi | RelativeTable):
        _check_tensor("slopes" if isinstance(bias, Alibi) else "table", bias.values, _where(driver), q)
        bias.rule.check(bias.values, heads)
        return bias.rule, bias.values
    if isinstance(bias, Tensor | type) or not callable(bias):
        raise DtypeError(
            f"bias must be Alibi(slopes), RelativeTable(table, buckets) or a function of positions; got "
            f"{type(bias).__name__}. A dense bias would need the whole S x S on every rank."
        )
    return function_rule(bias, heads, q.device), None


def _where(driver: Driver) -> str:
    return f"(ring rank {driver.ring_ranks[0]} of {driver.size})"


def _check_tensor(name: str, x: Tensor, where: str, like: Tensor | None = None) -> None:
    if type(x).__name__ == "DTensor":
        raise DtypeError(f"{name} must be a plain tensor {where}; got a DTensor. Pass its `.to_local()`.")
    if not isinstance(x, Tensor):
        raise DtypeError(f"{name} must be a tensor {where}; got {type(x).__name__}.")
    if not x.dtype.is_floating_point:
        raise DtypeError(f"{name} must be floating point {where}; got {x.dtype}.")
    if x.dtype.itemsize < 2:
        raise DtypeError(f"{name} must be float64, float32, bfloat16 or float16 {where}; got {x.dtype}.")
    if x.layout != torch.strided or x.is_nested:
        raise DtypeError(f"{name} must be a dense tensor {where}; got {x.layout}.")
    if like is not None and x.device != like.device:
        raise DtypeError(f"{name} must be on q's device {where}; got {x.device} and {like.device}.")
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        raise NotDifferentiable(
            f"{name} must not carry a forward-mode tangent; ring attention has derivatives in reverse mode only. "
            "Use torch.autograd.grad or backward."
        )


_INSTEAD = {
    "dropout_p": "a ring does not drop weights. Leave it out, and set the model's attention dropout to 0",
    "attn_mask": "what may be seen is the plan's mask. Write plan(Causal() & ...); dense masks are not supported",
    "is_causal": "what may be seen is the plan's mask. Write plan(Causal())",
    "enable_gqa": "grouped heads need no switch. Leave it out",
    "s_aux": "these are called sinks here. Write sinks=...",
    "alibi_slopes": "a bias has a name. Write bias=Alibi(slopes)",
    "window_size": "what may be seen is the plan's mask. Write plan(Window(w)), or Band(left, right)",
    "cu_seqlens": "documents are the plan's. Write plan(Causal() & Documents.from_cu_seqlens(...))",
}


_KNOWN = ("scale", "softcap", "sinks", "bias", "return_lse", "kernel")


def refuse(names: dict[str, object]) -> None:
    for name, value in names.items():
        if (name == "dropout_p" and value == 0) or (name == "attn_mask" and value is None):
            continue  # nothing is asked for
        near = difflib.get_close_matches(name, _KNOWN, 1)
        unknown = f"did you mean {near[0]}?" if near else f"it takes {', '.join(_KNOWN)}"
        advice = _INSTEAD.get(name, f"plan.attention knows no such argument; {unknown}")
        raise TypeError(f"{name} must not be given to plan.attention; {advice}.")


LARGEST_SCALE = 1e300


def checked_scale(scale: float | None, head_size: int) -> float:
    if scale is None:
        return float(head_size**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not -LARGEST_SCALE <= scale <= LARGEST_SCALE:
        raise PlanError(f"scale must be a finite number (not a tensor: it has no gradient); got {scale!r}.")
    return float(scale)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast does to scaled_dot_product_attention: float tensors to the device's autocast dtype, but not
    float64."""
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:
        eligible = isinstance(x, Tensor) and x.dtype.is_floating_point and x.dtype != torch.float64
        return x.to(dtype) if eligible else x

    return cast(q), cast(k), cast(v)
