"""`Plan.as_sdpa`: a plan for models that take no argument more, by a mode that lasts as long as its ``with``.

A `TorchFunctionMode` sees every call of PyTorch's functions made in its thread. This one answers those that are
attention and lets all others pass: nothing is patched, nothing is left behind. What such a call asks for and a plan
does not do is refused, never ignored.

Activation checkpointing runs a block again in backward, when the ``with`` is over: that would be local attention, and
wrong gradients. So a checkpoint that began inside the ``with`` is refused, unless its `context_fn` enters the mode
again.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ringspun.core import regions
from ringspun.core.mask import Mask, RowMasks
from ringspun.core.partition import Sides
from ringspun.core.text import shown
from ringspun.errors import RingspunWarning, UnsupportedByRing

if TYPE_CHECKING:
    from ringspun.torch.plan import Plan

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Of a checkpointed block: around its forward run, and around the second one in backward."""
ContextFn = Callable[[], Contexts]


@contextmanager
def as_sdpa(plan: Plan, says: tuple[bool, ...], *, quiet: bool = False) -> Iterator[None]:
    """See `ringspun.torch.Plan.as_sdpa`.

    Args:
        says: values of `is_causal` that agree with the plan's mask. quiet: no warning where nothing was computed.
    """
    from ringspun.torch.frames import checkpoints_running  # here: it loads PyTorch's compiler, which takes a second

    state = plan._calls.driver.state
    quiet = quiet or torch.compiler.is_compiling()
    before = -1 if quiet else state.calls
    with _AsSdpa(plan, says, checkpoints_running, torch.is_grad_enabled()):
        yield
    if not quiet and state.calls == before:
        warnings.warn(
            "no attention was computed under plan.as_sdpa(): the model calls neither scaled_dot_product_attention nor "
            "nn.MultiheadAttention, so whatever attention it has is local to each rank. Call plan.attention there.",
            RingspunWarning,
            stacklevel=3,
        )


def checkpoint_contexts(others: ContextFn | None = None) -> Contexts:
    """Contexts for a checkpointed block: it runs under the plan of the innermost ``with plan.as_sdpa():`` both times.

    Give it to `torch.utils.checkpoint.checkpoint` as `context_fn`, with ``use_reentrant=False``. Outside of every
    `as_sdpa` it adds nothing, so a model may keep it in its settings.

    Args:
        others: another `context_fn` to keep; a selective policy is ``functools.partial(checkpoint_contexts,
            functools.partial(create_selective_checkpoint_contexts, policy))``.
    """
    mode = _innermost()
    return _again(mode, others)


def checkpoint_contexts_of(plan: Plan, others: ContextFn | None = None) -> Contexts:
    """See `ringspun.torch.Plan.checkpoint_contexts`."""
    mode = _innermost()
    if mode is None or mode.plan is not plan:
        raise UnsupportedByRing(
            f"plan.checkpoint_contexts must be used inside `with plan.as_sdpa():` of the same plan; got "
            f"{'none' if mode is None else 'that of another plan'}. Put the whole call of the model there."
        )
    return _again(mode, others)


def _again(mode: _AsSdpa | None, others: ContextFn | None) -> Contexts:
    first, second = (nullcontext(), nullcontext()) if others is None else others()
    return (first, second) if mode is None else (_both(mode, first), _both(mode, second))


@contextmanager
def _both(mode: _AsSdpa, other: AbstractContextManager[Any]) -> Iterator[None]:
    with as_sdpa(mode.plan, mode.says, quiet=True), other:
        yield


class _AsSdpa(TorchFunctionMode):
    """The mode of one ``with``.

    Args:
        says: values of `is_causal` that agree with the plan's mask.
        running: counts the checkpoints that are running; those that are when it begins will enter it again themselves,
            when they run their block again.
        grad: whether gradients were on when it began.
    """

    def __init__(self, plan: Plan, says: tuple[bool, ...], running: Callable[[], int], grad: bool) -> None:
        super().__init__()
        self.plan, self.says, self.running, self.grad = plan, says, running, grad
        self.around = running()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(func is other for other in _GRAPHS):  # one by one: a traced dict does not find them
            _refuse(self.plan, _IN_A_GRAPH)
        answer = _ANSWERS.get(func)
        if answer is None:
            return func(*args, **(kwargs or {}))
        if self.running() > self.around and (self.grad or torch.is_grad_enabled()):
            _refuse(self.plan, _CHECKPOINTED)
        return answer(self, *args, **(kwargs or {}))


_CHECKPOINTED = (
    "checkpoint must enter plan.as_sdpa() again when it recomputes; got one that does not, and whose gradients would "
    "be those of local attention. Write checkpoint(..., use_reentrant=False, context_fn=plan.checkpoint_contexts); "
    "where no gradient is wanted, enter torch.no_grad() before plan.as_sdpa()."
)


def _innermost() -> _AsSdpa | None:
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((mode for mode in reversed(stack) if isinstance(mode, _AsSdpa)), None)


def _refuse(plan: Plan, words: str) -> None:
    """Raise, and tell the other ranks, which may have called attention already."""
    if torch.compiler.is_compiling():
        raise UnsupportedByRing(words)
    failure = UnsupportedByRing(words)
    plan._calls.fail(failure)
    raise failure


def _attention(
    mode: _AsSdpa,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by a plan."""
    plan = mode.plan
    _check(mode, attn_mask, dropout_p, is_causal)
    dims = {x.ndim for x in (query, key, value)}
    if dims == {3}:  # [B, T, D]: one head
        return plan.attention(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), scale=scale).squeeze(1)
    if dims != {4}:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        _refuse(plan, f"query, key and value must be [B, H, T, D] or [B, T, D]; got {shapes}. Reshape them.")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        heads = f"{query.shape[1]} and {key.shape[1]}"
        _refuse(plan, f"query and key must have equal heads; got {heads}. Call with enable_gqa=True.")
    return plan.attention(query, key, value, scale=scale)


def _check(mode: _AsSdpa, attn_mask: Tensor | None, dropout_p: float, is_causal: bool) -> None:
    """Refuse what the call says and the plan does not do."""
    plan = mode.plan
    if attn_mask is not None:
        _refuse(plan, f"attn_mask must be None under plan.as_sdpa(); got one of shape {tuple(attn_mask.shape)}. {_SAY}")
    if dropout_p > 0:
        _refuse(plan, f"dropout_p must be 0 on a ring; got {dropout_p}. Set the model's attention dropout to 0.")
    if is_causal not in mode.says:
        word = "looks ahead" if is_causal else "never looks ahead"
        start = plan._sides.queries.start
        where = f" (query_start={start}; is_causal=True aligns the first query with the first key)" if start else ""
        _refuse(
            plan,
            f"is_causal must say what the plan's mask does; got {is_causal} for {shown(plan._mask, 60)}, which {word}"
            f"{where}. {_SAY}",
        )


_SAY = "What may be seen is the plan's mask: make the plan with it (Causal() & ..., or Full()), and let the call agree."


def what_calls_may_say(sides: Sides, mask: Mask | RowMasks) -> tuple[bool, ...]:
    """The values of `is_causal` that agree with a mask.

    True: no query looks ahead of itself. False: some query does; or none could, or none looks back either, so that
    causality took nothing away. A batch of masks must agree row by row.
    """
    queries, q_len, k_len = sides.queries, sides.queries.seq_len, sides.keys.seq_len
    both = [
        regions.looks(one.regions(q_len, k_len, queries.start))
        for one in (mask.masks if isinstance(mask, RowMasks) else (mask,))
    ]
    could = queries.start < k_len - 1
    causal = queries.start == 0 and not any(ahead for ahead, _ in both)
    free = all(ahead or not (could and back) for ahead, back in both)
    return tuple(value for value, fits in ((True, causal), (False, free)) if fits)


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def _multi_head_attention(mode: _AsSdpa, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """`torch.nn.functional.multi_head_attention_forward`, the body of `torch.nn.MultiheadAttention`, by a plan.

    Written anew: its own call of scaled_dot_product_attention is out of a mode's sight.
    """
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    given, plan = bound.arguments, mode.plan
    for name, usual in _NOT_ON_A_RING.items():
        if given[name] is not usual:
            _refuse(plan, f"{name} must be {usual} on a ring; got {type(given[name]).__name__}. Give {name}={usual}.")
    # beside is_causal=True PyTorch asks for a mask, and does not read it either
    attn_mask = None if given["is_causal"] else given["attn_mask"]
    _check(mode, attn_mask, given["dropout_p"] if given["training"] else 0.0, given["is_causal"])
    inputs = given["query"], given["key"], given["value"]
    if any(x.ndim != 3 for x in inputs):
        _refuse(
            plan, f"query must be [T, B, E] (with batch_first, [B, T, E]); got {tuple(inputs[0].shape)}. Add a batch."
        )
    if given["use_separate_proj_weight"]:
        weights = given["q_proj_weight"], given["k_proj_weight"], given["v_proj_weight"]
    else:
        weights = given["in_proj_weight"].chunk(3)
    biases = (None, None, None) if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    heads = given["num_heads"]
    q, k, v = (  # [T, B, E] to [B, H, T, D]
        F.linear(x, weight, bias).view(*x.shape[:2], heads, -1).permute(1, 2, 0, 3)
        for x, weight, bias in zip(inputs, weights, biases, strict=True)
    )
    out = plan.attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
    return F.linear(out, given["out_proj_weight"], given["out_proj_bias"]), None


_NOT_ON_A_RING: dict[str, Any] = {
    "need_weights": False,
    "key_padding_mask": None,
    "add_zero_attn": False,
    "bias_k": None,
    "bias_v": None,
    "static_k": None,
    "static_v": None,
}


def _flex_attention(mode: _AsSdpa, *args: Any, **kwargs: Any) -> Any:
    plan = mode.plan
    _refuse(
        plan, "flex_attention must not be called under plan.as_sdpa(). Call plan.attention, with a plan of its mask."
    )


_ANSWERS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
    torch.ops.higher_order.flex_attention: _flex_attention,
}
_GRAPHS = (
    torch.ops.higher_order.tag_activation_checkpoint,
    torch.ops.higher_order.cond,
    torch.ops.higher_order.while_loop,
    torch.ops.higher_order.scan,
    torch.ops.higher_order.map_impl,
)
"""Operators that hold a graph, which PyTorch traces without any mode: attention in it would be local."""
_IN_A_GRAPH = (
    "checkpoint, cond, while_loop, scan and map must not stand inside a compiled function under plan.as_sdpa(): "
    "PyTorch applies no mode there. Compile what they run instead, checkpoint(torch.compile(block), x, "
    "use_reentrant=False, context_fn=plan.checkpoint_contexts), or call plan.attention in the model."
)
