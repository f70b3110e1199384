"""Token-wise functions, a block of tokens at a time: what they compute on the way is never alive for all tokens.

    y = blockwise(layer.mlp, x, 512)

Forward keeps the inputs alone. Backward computes each block again, takes its gradients, and forgets it; gradients of
weights are summed in float32 (float64) and rounded once. One forward more of `fn` is the price.

Source: Liu and Abbeel 2023 (arXiv 2305.19370), of which this is the feed-forward half; Chen et al. 2016 (1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import get_device_states, set_device_states

from ringspun.errors import NotDifferentiable, ShapeError, UnsupportedByRing

Tensors = tuple[Tensor, ...]
TokenWise = Callable[..., Any]
"""Maps tensors to one or several, row by row: no row of the result depends on another row's input."""


@overload
def blockwise(fn: Callable[..., Tensor], x: Tensor | Tensors, block_size: int, *, dim: int = ...) -> Tensor: ...
@overload
def blockwise(fn: Callable[..., Tensors], x: Tensor | Tensors, block_size: int, *, dim: int = ...) -> Tensors: ...
@torch.compiler.disable  # type: ignore[untyped-decorator]
def blockwise(fn: TokenWise, x: Tensor | Tensors, block_size: int, *, dim: int = 1) -> Tensor | Tensors:
    """``fn(x)`` over blocks of tokens, forward and backward, with the activations of one block alive at a time.

        y = blockwise(lambda x: x + mlp(norm(x)), x, 512)
        y = blockwise(lambda x, a: x + project(a), (x, a), 512)

    Gradients reach whatever `fn` uses: inputs, parameters, tensors that it closes over. Dropout draws the same numbers
    again; autocast is as it was in forward. Compiled callers get a graph break, not a graph as long as all blocks.

    Args:
        fn: a module or function of one tensor, or of as many as `x` has, that treats rows along `dim` one by one. It
            gives a tensor, or a tuple of tensors, each with as many rows along `dim`. It is called again in backward,
            and must then do the same. What it returns for blocks of no rows must have the right shape, if T can be 0.
        x: ``[B, T, ...]``, any number of tokens, none too; or a tuple of tensors that are cut alike.
        block_size: tokens of a block; the last one may be shorter.
        dim: the dimension of tokens.
    Returns:
        what ``fn(x)`` returns.
    Raises:
        ShapeError: block_size below 1, inputs of unequal numbers of tokens, results that have others.
        UnsupportedByRing: `fn` changes an input in place.
        NotDifferentiable: a second derivative is asked for, or a tensor that `fn` takes from outside cannot be found.
    """
    inputs = (x,) if isinstance(x, Tensor) else tuple(x)
    call = _Call.now(fn, inputs, block_size, dim)
    if torch.is_grad_enabled():
        outs, used, needs = call.forward(inputs)
        if any(needs):
            outs = _Again.apply(call, outs, needs, len(inputs), *inputs, *used)  # type: ignore[no-untyped-call]
    else:
        outs = call.over_blocks(inputs, call.of_block)
    return outs if call.several else outs[0]


@dataclass
class _Call:
    """One call: what to compute, how it is cut, and in what state of random numbers and autocast."""

    fn: TokenWise
    cuts: list[tuple[int, int]]  # first row, rows
    dim: int
    random: _Random
    autocast: list[torch.autocast]
    around: tuple[_Outside, ...]  # of the calls that this one is inside of
    several: bool = False

    @classmethod
    def now(cls, fn: TokenWise, inputs: Tensors, block_size: int, dim: int) -> _Call:
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ShapeError(f"block_size must be a number of tokens, at least 1; got {block_size!r}.")
        shapes = [tuple(x.shape) for x in inputs]
        if not inputs or not all(-x.ndim <= dim < x.ndim for x in inputs):
            raise ShapeError(f"x must have a dimension {dim}, that of tokens; got shapes {shapes}.")
        dim = dim % inputs[0].ndim
        if len({shape[dim : dim + 1] for shape in shapes}) > 1:
            raise ShapeError(f"x must have the same number of tokens in each tensor, along dim {dim}; got {shapes}.")
        rows = shapes[0][dim]
        cuts = [(at, min(block_size, rows - at)) for at in range(0, rows, block_size)] or [(0, 0)]
        kinds = sorted({"cpu", inputs[0].device.type})
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        around = tuple(mode for mode in modes if isinstance(mode, _Outside))
        return cls(fn, cuts, dim, _Random.now(inputs), [_autocast_of(kind) for kind in kinds], around)

    def over_blocks(self, tensors: Tensors, work: Callable[[Tensors], Tensors]) -> Tensors:
        """What `work` gives for each block of `tensors`, joined, and never held twice."""
        outs: Tensors = ()
        with ExitStack() as stack:
            for autocast in self.autocast:
                stack.enter_context(autocast)
            for at, rows in self.cuts:
                parts = work(tuple(x.narrow(self.dim, at, rows) for x in tensors))
                if len(self.cuts) == 1:
                    return parts
                outs = outs or tuple(self._room(part, tensors[0].shape[self.dim]) for part in parts)
                for out, part in zip(outs, parts, strict=True):
                    out.narrow(self.dim, at, rows).copy_(part)
        return outs

    def _room(self, part: Tensor, rows: int) -> Tensor:
        return part.new_empty([*part.shape[: self.dim], rows, *part.shape[self.dim + 1 :]])

    def of_block(self, blocks: Tensors) -> Tensors:
        """`fn` of one block, checked."""
        before = _versions(blocks)
        found = self.fn(*blocks)
        if _versions(blocks) != before:  # backward would compute again from what is there then
            raise UnsupportedByRing(
                "fn must leave its inputs as they are; it changed one in place. Let it begin with an operation that "
                "is not (inplace=False)."
            )
        self.several = not isinstance(found, Tensor)
        outs = tuple(found) if self.several else (found,)
        rows = blocks[0].shape[self.dim]
        for out in outs:
            if not isinstance(out, Tensor) or out.ndim <= self.dim or out.shape[self.dim] != rows:
                got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
                raise ShapeError(f"fn must give {rows} rows along dim {self.dim} for {rows} tokens; got {got}.")
        return outs

    def graph_of_block(
        self, blocks: Tensors, inputs: Tensors, outside: _Outside, again: tuple[_Outside, ...] = ()
    ) -> tuple[Tensors, Tensors]:
        """A block's leaves, and its results with their graph, which begins at leaves alone."""
        own = tuple(b.detach().requires_grad_(x.requires_grad) for b, x in zip(blocks, inputs, strict=True))
        # This graph is gone when its block is: hooks of a checkpoint or an offload around us are not for it.
        with ExitStack() as stack:
            # In backward the calls around this one are over; tensors that they stand leaves in for must be those again.
            entered: list[AbstractContextManager[Any]] = [torch.enable_grad(), saved_tensors_hooks(_packed, _same)]
            for one in (*entered, *again, outside):
                stack.enter_context(one)
            return own, self.of_block(own)

    def forward(self, inputs: Tensors) -> tuple[Tensors, Tensors, list[bool]]:
        """Results without a graph; the tensors from outside that they depend on; which of them have gradients.

        Every block is looked at: an expert may have no token in the first.
        """
        outside, used = _Outside(), dict[Tensor, None]()
        needs: list[bool] = []

        def work(blocks: Tensors) -> Tensors:
            own, outs = self.graph_of_block(blocks, inputs, outside)
            used.update(dict.fromkeys(outside.of_graph(outs, own)))
            needs[:] = [a or b.requires_grad for a, b in zip(needs or [False] * len(outs), outs, strict=True)]
            return tuple(out.detach() for out in outs)

        return self.over_blocks(inputs, work), tuple(used), needs

    def backward(self, inputs: Tensors, used: Tensors, grads: Sequence[Tensor | None]) -> tuple[Tensors, Tensors]:
        """Gradients of those inputs that require them, and of `used`."""
        outside, given = _Outside(used), tuple(g for g in grads if g is not None)
        sums = [torch.zeros_like(x, dtype=_accumulator(x.dtype)) for x in used]

        def work(blocks: Tensors) -> Tensors:
            own, outs = self.graph_of_block(blocks[: len(inputs)], inputs, outside, self.around)
            leaves = [x for x in own if x.requires_grad]
            known = [out for out, g in zip(outs, grads, strict=True) if g is not None]
            ends = [(o, g) for o, g in zip(known, blocks[len(inputs) :], strict=True) if o.requires_grad]
            if not ends:
                return tuple(torch.zeros_like(x) for x in leaves)
            found = torch.autograd.grad(
                [o for o, _ in ends], [*leaves, *outside.leaves(used)], [g for _, g in ends], allow_unused=True
            )
            for total, share in zip(sums, found[len(leaves) :], strict=True):
                if share is not None:
                    total.add_(share)
            pairs = zip(leaves, found, strict=False)
            return tuple(torch.zeros_like(x) if g is None else g for x, g in pairs)

        with self.random.again():
            of_inputs = self.over_blocks((*inputs, *given), work)
        return of_inputs, tuple(total.to(x.dtype) for total, x in zip(sums, used, strict=True))


class _Again(torch.autograd.Function):
    """Results that are there already; in backward each block is computed again."""

    @staticmethod
    def forward(ctx: Any, call: _Call, outs: Tensors, needs: list[bool], count: int, *tensors: Tensor) -> Tensors:
        ctx.call, ctx.count = call, count
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(out for out, needed in zip(outs, needs, strict=True) if not needed))
        ctx.save_for_backward(*tensors)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotDifferentiable(
                "second derivatives of blockwise must not be asked for; they are not defined. Use create_graph=False."
            )
        tensors = ctx.saved_tensors  # read once: a checkpoint gives them once
        inputs, used = tensors[: ctx.count], tensors[ctx.count :]
        needed = ctx.needs_input_grad[4:]
        wanted = tuple(x for x, need in zip(used, needed[ctx.count :], strict=True) if need)
        of_inputs, of_used = ctx.call.backward(inputs, wanted, grads)
        left = iter((*of_inputs, *of_used))
        return None, None, None, None, *(next(left) if need else None for need in needed)


class _Outside(TorchFunctionMode):
    """Stands a leaf in for every tensor with a graph of its own that goes into an operation of `fn`.

    A block's backward thus ends where `fn` begins: it would go on to what lies behind otherwise, once for each block.
    """

    def __init__(self, used: Tensors = ()) -> None:
        super().__init__()
        with torch.enable_grad():
            self._first = torch.zeros((), requires_grad=True).view(()).grad_fn._sequence_nr()  # type: ignore[union-attr]
        self._by_edge: dict[tuple[Any, int], tuple[Tensor, Tensor]] = {}
        for x in used:
            self._stand_in(x)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._stand_in, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _stand_in(self, x: Tensor) -> Tensor:
        if x.grad_fn is None or not self._is_before(x.grad_fn):
            return x
        edge = x.grad_fn, x.output_nr
        if edge not in self._by_edge:
            self._by_edge[edge] = x, x.detach().requires_grad_()
        return self._by_edge[edge][1]

    def _is_before(self, node: Any) -> bool:
        return bool(node._sequence_nr() < self._first)

    def leaves(self, used: Tensors) -> list[Tensor]:
        """What stands for `used` in a block's graph."""
        return [self._stand_in(x) for x in used]

    def of_graph(self, outs: Tensors, own: Tensors) -> list[Tensor]:
        """The tensors with gradients that results depend on, besides the block's own leaves."""
        originals = {leaf: x for x, leaf in self._by_edge.values()}
        found: list[Tensor] = []
        nodes, known = [out.grad_fn for out in outs if out.grad_fn is not None], set(own)
        seen: set[Any] = set()
        while nodes:
            for node, _ in nodes.pop().next_functions:
                if node is None or node in seen:
                    continue
                seen.add(node)
                if hasattr(node, "variable"):
                    found += [originals.get(node.variable, node.variable)] if node.variable not in known else []
                elif self._is_before(node):
                    raise NotDifferentiable(
                        f"fn must take tensors that were computed before in plain sight; got one of {node.name()} that "
                        "it hides. Give it as one more tensor of x, or detach it."
                    )
                else:
                    nodes.append(node)
        return found


@dataclass(frozen=True)
class _Random:
    """States of the generators of the CPU and of the inputs' devices."""

    cpu: Tensor
    kind: str
    devices: list[int]
    states: list[Tensor]

    @classmethod
    def now(cls, inputs: Tensors) -> _Random:
        return cls(torch.get_rng_state(), inputs[0].device.type, *get_device_states(*inputs))

    @contextmanager
    def again(self) -> Iterator[None]:
        """As it was; afterwards as it is now."""
        with torch.random.fork_rng(self.devices, device_type="cuda" if self.kind == "cpu" else self.kind):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states, device_type=self.kind)
            yield


def _autocast_of(kind: str) -> torch.autocast:
    """Autocast as it is now, to be entered again; without a cache, for a cast weight belongs to one block's graph."""
    return torch.autocast(
        kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
    )


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _versions(blocks: Tensors) -> list[int]:
    """Of each block, a number that changes with what it holds; inference tensors have none, and no backward."""
    return [0 if x.is_inference() else x._version for x in blocks]


def _packed(x: Tensor) -> Tensor:
    return x.detach()  # with its graph, a result that its own operation saves would be a cycle


def _same(x: Tensor) -> Tensor:
    return x
