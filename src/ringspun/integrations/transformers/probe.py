"""What a model does besides attention, found out by running it: it may not mix tokens.

On a ring each rank runs the model over its own tokens. That is right if, and only if, nothing but attention lets one
token know of another: no state, convolution, running sum, shift or mean over tokens. Names of layers do not tell
(there are new ones every month), so one token is poisoned with NaN and attention is replaced by something that looks
at no other token. Then a NaN in any other token's row came by another way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ringspun.errors import UnsupportedByRing
from ringspun.integrations.transformers.layers import PLAN_KEYWORD, Asked, asked

TOKENS, POISONED = 23, 9  # not the one in the middle, which a flip would leave where it is


@dataclass
class Probe:
    """Stands for a plan while a model is looked at; gathers what is seen.

    Args:
        names: path of each module by its id. given_positions: whether the model was given its positions.
    """

    names: dict[int, str]
    given_positions: bool = True
    layers: list[Asked] = field(default_factory=list)
    mixes: str | None = None
    follows_shift_labels: bool = False

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, window: int | None, position_ids: Tensor | None
    ) -> Tensor:
        """As attention in which every token sees itself alone, ``[B, T, H, D]``; notes what the layer asks for."""
        layer = asked(module, window, self.names.get(id(module), ""))
        if position_ids is None and self.given_positions:
            raise UnsupportedByRing(
                f"model must hand position_ids on to its attention; {layer.layer} got none. "
                "It would count the positions of every shard from 0."
            )
        if k.shape[2] != q.shape[2]:
            raise UnsupportedByRing(
                f"keys must be those of the same {q.shape[2]} tokens as the queries; got {k.shape[2]} in {layer.layer}."
            )
        self.layers.append(layer)
        own = v + 0 * k.sum(-1, keepdim=True)  # a key of NaN matters too
        out = own.repeat_interleave(q.shape[1] // k.shape[1], dim=1) + 0 * q.sum(-1, keepdim=True)
        return out.transpose(1, 2).contiguous()

    def loss(self, logits: Tensor, *args: Any, shift_labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        """As a loss; notes whether the model hands the shifted labels on."""
        self.follows_shift_labels = shift_labels is not None
        return logits.new_zeros(())

    def watch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A forward hook: the first module with a NaN in a row that was not poisoned; its parent, if it came in so."""
        if self.mixes is None and any(_reached(x) for x in _tensors(output)):
            path = self.names[id(module)]
            came_in = any(_reached(x) for x in _tensors(inputs))
            self.mixes = (path.rpartition(".")[0] if came_in else path) or "its own forward"


def look(model: nn.Module) -> Probe:
    """Runs a model over a few tokens, in evaluation and without gradients; its state stays as it was.

    Args:
        model: with the ring's attention selected and its cache off; its weights are there (not on `meta`).
    Raises:
        UnsupportedByRing: it mixes tokens, asks for what the ring does not do, or does not run over `input_ids`.
    """
    name = type(model).__name__
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedByRing(f"model must have its weights; {name} has some on meta. Load them before prepare.")
    names = {id(module): path for path, module in model.named_modules()}
    weight = _embedding(model).weight
    ids = (torch.arange(2, TOKENS + 2, device=weight.device) % weight.shape[0])[None]
    accepted = inspect.signature(model.forward).parameters
    labels = {"labels": ids, "shift_labels": ids, "num_items_in_batch": TOKENS} if "labels" in accepted else {}
    seen, own = Probe(names), Probe(names, given_positions=False)
    output = _run(model, seen, input_ids=ids, position_ids=torch.arange(TOKENS, device=ids.device)[None], **labels)
    if seen.mixes is not None:
        raise UnsupportedByRing(
            f"model must mix tokens by attention alone; {name} mixes them in {seen.mixes}, whose state or neighbours "
            "would begin anew at every shard."
        )
    if not seen.layers:
        raise UnsupportedByRing(f"model must call attention through AttentionInterface; {name} did not.")
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and logits.shape[:2] != ids.shape:
        raise UnsupportedByRing(
            f"model must give a row of logits for every token; {name} gives shape {tuple(logits.shape)} for "
            f"{TOKENS} tokens. A shard does not hold the token that it would pick."
        )
    if not _same(output, _run(model, own, input_ids=ids, **labels)):
        raise UnsupportedByRing(f"model must count positions 0, 1, 2, ...; {name} counts otherwise when given none.")
    return seen


def _run(model: nn.Module, seen: Probe, **inputs: Any) -> Any:
    with _evaluating(model), _loss(model, seen.loss), ExitStack() as hooks, torch.no_grad():
        hooks.callback(_embedding(model).register_forward_hook(_poison).remove)
        for module in model.modules():
            hooks.callback(module.register_forward_hook(seen.watch).remove)
        try:
            return model(**inputs, **{PLAN_KEYWORD: seen})
        except UnsupportedByRing:
            raise
        except Exception as problem:
            raise UnsupportedByRing(
                f"model must run over input_ids and position_ids, and hand {PLAN_KEYWORD} on to its attention; "
                f"{type(model).__name__} raised {type(problem).__name__}: {problem}"
            ) from problem


def _same(one: Any, two: Any) -> bool:
    """Whether two outputs agree, far beyond any rounding, in their first tensor with a row per token."""
    a, b = (next(x.float() for x in _tensors(output) if x.shape[:2] == (1, TOKENS)) for output in (one, two))
    return torch.allclose(a, b, rtol=1e-2, atol=1e-2 * float(a.nan_to_num().abs().max()), equal_nan=True)


def _embedding(model: Any) -> Any:
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    if not isinstance(getattr(embedding, "weight", None), Tensor):
        raise UnsupportedByRing(f"model must embed input_ids; {type(model).__name__} has no input embeddings.")
    return embedding


def _poison(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    poisoned = output.clone()
    poisoned[:, POISONED] = torch.nan
    return poisoned


def _reached(x: Tensor) -> bool:
    """Whether a NaN stands in the row of a token that was not poisoned, in a tensor that has a row per token."""
    if not x.is_floating_point() or x.ndim < 3 or x.shape[:2] != (1, TOKENS):
        return False
    rows = x.reshape(TOKENS, -1).isnan().any(1)
    rows[POISONED] = False
    return bool(rows.any())


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _tensors(part)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was in training:
            module.training = was


@contextmanager
def _loss(model: Any, loss: Any) -> Iterator[None]:
    """With another loss in the model."""
    own = vars(model).get("_loss_function")
    model.loss_function = loss
    try:
        yield
    finally:
        del model._loss_function
        if own is not None:
            model.loss_function = own
