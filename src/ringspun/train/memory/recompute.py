"""Activation checkpointing: what of each layer is kept for backward, and what is computed again there.

    policy       kept of a layer              computed again                 keys go round     extra FLOPs
    none         everything                   nothing                        2 times           none
    layer        its input                    the layer, its ring too        3 times           1/3, attention 2/7
    attention    that, out and lse            the layer but for attention    2 times           1/3, attention none
    ring_step    that, and the keys and       as attention                   2 times, n hops   1/3, attention none
                 values of n of R - 1 hops                                   less

Extra FLOPs are of those that forward + backward take anyway. The third policy is that of arXiv 2310.03294 (DistFlash-
Attn), the last goes on from there: it pays where the ring's backward waits for its messages. How many hops are kept is
the ring's affair, for it decides what is sent: `ringspun.core.route.Ring` (kept_hops). Layers are run by
`torch.utils.checkpoint`, which also gives dropout the same random numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from ringspun.core.route import Ring
from ringspun.core.text import parse_route
from ringspun.errors import ConfigError
from ringspun.torch import checkpoint_contexts, keep_attention
from ringspun.torch.sdpa import ContextFn

if TYPE_CHECKING:
    from ringspun.torch import Plan

Policy = Literal["none", "layer", "attention", "ring_step"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
_CONTEXTS: dict[str, ContextFn] = {
    "layer": checkpoint_contexts,
    "attention": partial(checkpoint_contexts, keep_attention),
    "ring_step": partial(checkpoint_contexts, keep_attention),
}


@dataclass(frozen=True)
class Applied:
    """What `apply_checkpointing` did to a model.

    Args:
        policy: that it has now. layers: that run again in backward, as they were given.
    """

    policy: Policy
    layers: tuple[nn.Module, ...]
    _undo: tuple[Callable[[], None], ...]

    def undo(self) -> None:
        """Put the model back as it was; a second time changes nothing."""
        for one in self._undo:
            one()


def apply_checkpointing(
    model: nn.Module,
    policy: Policy,
    *,
    layers: type[nn.Module] | Sequence[nn.Module] | None = None,
    plan: Plan | None = None,
    offload: bool = False,
) -> Applied:
    """Have the layers of a model keep less for backward, by a named policy; in place, and to be undone.

        applied = apply_checkpointing(model, "attention")
        ...
        applied.undo()

    Gradients are the same, bit for bit where the layers' own are. Parameters, their names in `state_dict` and what the
    model takes stay as they are, and so do plans given to every call and `plan.as_sdpa()`, which a layer that runs
    again enters again. Wrap the model for FSDP or DDP, and compile it, afterwards.

    Args:
        model: any Hugging Face model with decoder layers, or any module.
        policy: one of `POLICIES`; see the head of this module.
        layers: what runs again as a whole: a class, or some of the model's modules. Default: a Hugging Face model's
            own; there is none for other modules.
        plan: with "ring_step", and with it alone: a plan of the ring, which must keep blocks
            (``ContextParallel(route=Ring(kept_hops=n))``).
        offload: keep the layers' inputs in host memory, pinned, and not on their device. What attention gave stays.
    Raises:
        ConfigError: arguments that do not go together, or an `offload` of a model whose parameters lie in host memory
            already; a model without such layers, or checkpointed already.

    Source: arXiv 1604.06174; "attention": arXiv 2310.03294, section 3.3.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(map(repr, POLICIES))}; got {policy!r}.")
    _check_plan(policy, plan)
    _check_offload(model, policy, offload)
    if policy == "none":
        return Applied(policy, (), ())
    found = _layers(model, layers)
    run = _Run(_CONTEXTS[policy], offload)
    undo = tuple(_have_run(model, layer, run) for layer in found)
    return Applied(policy, tuple(found), undo)


def _check_plan(policy: str, plan: Plan | None) -> None:
    if policy != "ring_step":
        if plan is not None:
            raise ConfigError(f"plan must come with policy 'ring_step', which alone reads it; got policy {policy!r}.")
        return
    if plan is None:
        raise ConfigError(
            "policy 'ring_step' must come with plan=..., of the ring that keeps blocks; got none. Make it by "
            "ContextParallel(route=Ring(kept_hops=n))."
        )
    route = parse_route(plan.schedule.route)
    if not (isinstance(route, Ring) and route.kept_hops):
        raise ConfigError(
            f"policy 'ring_step' must come with a ring that keeps blocks; got route {route}. Make the plan by "
            "ContextParallel(route=Ring(kept_hops=n)), or take policy 'attention'."
        )


def _check_offload(model: nn.Module, policy: str, offload: bool) -> None:
    if not offload:
        return
    if policy == "none":
        raise ConfigError("offload must come with a policy that keeps layers' inputs; got policy 'none'.")
    places = {parameter.device.type for parameter in model.parameters()}
    if places <= {"cpu"}:
        raise ConfigError("offload must move from a device to host memory; got a model in host memory. Leave it out.")


def _layers(model: nn.Module, layers: type[nn.Module] | Sequence[nn.Module] | None) -> list[nn.Module]:
    """What shall run again: of nested ones the outermost."""
    if layers is None:
        wanted = [m for m in model.modules() if _is_hugging_face(m)]
    elif isinstance(layers, type):
        wanted = [m for m in model.modules() if isinstance(m, layers)]
    else:
        wanted = list(layers)
    inside = {id(inner) for one in wanted for inner in one.modules() if inner is not one}
    found = [one for one in wanted if id(one) not in inside]
    if not found:
        raise ConfigError(
            f"model must have the layers that shall run again; {type(model).__name__} has none of "
            f"{'a Hugging Face model' if layers is None else layers}. Give layers=, a class or a list of modules."
        )
    if any(isinstance(m, CheckpointWrapper) or getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise ConfigError("model must not be checkpointed already; it is. Undo that first.")
    return found


def _is_hugging_face(module: nn.Module) -> bool:
    """Whether it is a layer that knows how to be checkpointed, and not to fill a cache a second time then."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


@dataclass(frozen=True)
class _Run:
    """Runs a layer so that it runs again in backward."""

    contexts: ContextFn
    offload: bool

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        host: AbstractContextManager[Any] = save_on_cpu(pin_memory=True) if self.offload else nullcontext()
        with host:
            return checkpoint(function, *args, use_reentrant=False, context_fn=self.contexts, **kwargs)


def _have_run(model: nn.Module, layer: nn.Module, run: _Run) -> Callable[[], None]:
    """Have one layer run so; what puts it back."""
    if _is_hugging_face(layer):
        mine: Any = layer
        mine.gradient_checkpointing, mine._gradient_checkpointing_func = True, run

        def put_back() -> None:
            for name in ("gradient_checkpointing", "_gradient_checkpointing_func"):
                mine.__dict__.pop(name, None)

        return put_back
    wrapped = checkpoint_wrapper(layer, checkpoint_fn=run)
    places = list(_places(model, layer))
    if not places:
        raise ConfigError(f"layers must be inside the model; {type(layer).__name__} is not. Give modules of its own.")
    for parent, name in places:
        setattr(parent, name, wrapped)

    def unwrap() -> None:
        for parent, name in places:
            setattr(parent, name, layer)

    return unwrap


def _places(model: nn.Module, layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where a module hangs in a model; more than once where it is used more than once."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is layer:
                yield parent, name
