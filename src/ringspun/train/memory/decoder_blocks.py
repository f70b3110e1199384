"""The feed-forward layers of any Hugging Face decoder model, a block of tokens at a time, without editing the model.

    apply_blockwise(model, 1024)     # and remove_blockwise(model)

A feed-forward module keeps its name, weights and hooks, and gets a class of its own that inherits from its class, as
`fully_shard` does it: state dicts and `isinstance` are as before. Transformers itself is not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ringspun.errors import ShapeError, UnsupportedByRing
from ringspun.train.memory.blockwise import blockwise

M = TypeVar("M", bound=nn.Module)
FEED_FORWARDS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "feedforward")
"""What decoder layers call their feed-forward module."""
_PROBED = 13


def apply_blockwise(model: M, block_size: int) -> M:
    """Runs the feed-forward module of every decoder layer over blocks of tokens, by `blockwise`.

    Args:
        model: a Transformers model (or any other, of layers with a module called `mlp` or alike beside attention), with
            its weights; changed in place. Before `fully_shard`, before `torch.compile`.
        block_size: tokens of a block, over all batch rows.
    Returns:
        `model`.
    Raises:
        UnsupportedByRing: no such layer, or one whose feed-forward mixes tokens (capacities, batch norms) or computes
            in place. The model is then as it was.
    """
    layers = [(path, module) for path, module in model.named_modules() if _feed_forward(module) is not None]
    if not layers:
        raise UnsupportedByRing(
            f"model must have decoder layers with attention and a module called {', '.join(FEED_FORWARDS)}; "
            f"{type(model).__name__} has none. Call blockwise yourself where it computes its feed-forward."
        )
    try:
        for path, layer in layers:
            _wrap(layer, block_size, path)
    except BaseException:
        remove_blockwise(model)
        raise
    return model


def wrap_decoder_layer(layer: M, block_size: int) -> M:
    """As `apply_blockwise`, of one decoder layer.

    Raises:
        UnsupportedByRing: as there.
    """
    if _feed_forward(layer) is None:
        raise UnsupportedByRing(
            f"layer must have attention and a module called {', '.join(FEED_FORWARDS)}; {type(layer).__name__} has not."
        )
    _wrap(layer, block_size, type(layer).__name__)
    return layer


def remove_blockwise(model: M) -> M:
    """Undoes `apply_blockwise` and `wrap_decoder_layer`; the model is as before."""
    for module in model.modules():
        if isinstance(module, _Blockwise):
            if isinstance(module, FSDPModule):
                raise UnsupportedByRing("model must not be sharded to be undone; fully_shard has its own class for it.")
            module.__class__ = type(module).__mro__[2]
            del module.ringspun_block_size
    return model


class _Blockwise(nn.Module):
    """Stands before a feed-forward module's own class."""

    ringspun_block_size: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or any(value is not None for value in kwargs.values()):
            raise UnsupportedByRing(
                f"feed-forward over blocks must be given hidden states alone; {type(self).__mro__[2].__name__} got "
                f"{', '.join(kwargs) or 'more'}, too. Call blockwise yourself, with them cut alike."
            )
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if torch.is_grad_enabled() and _router_logits_wanted():
            raise UnsupportedByRing(
                "output_router_logits must be False where experts run over blocks; got True. The gradient of the "
                "balance loss would end at each layer."
            )
        found = blockwise(partial(_of_rows, super().forward), rows, self.ringspun_block_size, dim=0)
        if isinstance(found, Tensor):
            return _as_rows_of(hidden_states, found)
        return (_as_rows_of(hidden_states, found[0]), *found[1:])


def _as_rows_of(hidden_states: Tensor, rows: Tensor) -> Tensor:
    """Rows ``[N, C]`` as ``[B, T, C]``; no size is left to be guessed, for a rank may have no token."""
    return rows.reshape(*hidden_states.shape[:-1], rows.shape[-1])


def _router_logits_wanted() -> bool:
    """Whether Transformers, where it is loaded, records router logits in this call."""
    recording = sys.modules.get("transformers.utils.output_capturing")
    wanted = getattr(recording, "_active_collector", None)
    return "router_logits" in ((wanted.get() if wanted is not None else None) or ())


def _of_rows(forward: Callable[[Tensor], Any], rows: Tensor) -> Any:
    """Of rows ``[N, C]``, as one batch row; what comes besides the hidden states (gpt-oss: router scores) has rows."""
    found = forward(rows[None])
    return found[0] if isinstance(found, Tensor) else (found[0][0], *found[1:])


@cache
def _blockwise_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Blockwise{kind.__name__}", (_Blockwise, kind), {"__module__": kind.__module__})


def _feed_forward(layer: nn.Module) -> nn.Module | None:
    """A decoder layer's feed-forward module; None: it is no decoder layer."""
    children = dict(layer.named_children())
    if not any("attn" in name or "attention" in name for name in children):
        return None
    return next((children[name] for name in FEED_FORWARDS if name in children), None)


def _wrap(layer: nn.Module, block_size: int, path: str) -> None:
    module = _feed_forward(layer)
    assert module is not None
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ShapeError(f"block_size must be a number of tokens, at least 1; got {block_size!r}.")
    if isinstance(module, _Blockwise):
        raise UnsupportedByRing(f"feed-forward of {path} must not be over blocks already; call remove_blockwise first.")
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise UnsupportedByRing(f"feed-forward of {path} must be wrapped before fully_shard, not after it.")
    _check_token_wise(module, _width(layer, path), path)
    module.__class__ = _blockwise_class(type(module))  # type: ignore[arg-type]
    cast(_Blockwise, module).ringspun_block_size = block_size


def _width(layer: nn.Module, path: str) -> int:
    """C: what the layer says, or the width of its norm."""
    own = getattr(layer, "hidden_size", None)
    if isinstance(own, int):
        return own
    norms = (child for name, child in layer.named_children() if "norm" in name or "ln" in name)
    for weight in (p for norm in norms for p in norm.parameters() if p.ndim == 1):
        return len(weight)
    raise UnsupportedByRing(f"layer must tell its width, by hidden_size or by a norm; {path} does not.")


@torch.no_grad()
def _check_token_wise(module: nn.Module, width: int, path: str) -> None:
    """Refuses what a block of tokens would change: whole and cut must agree, for all tokens alike too (one expert)."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise _mixes(path, f"has a {type(part).__name__}")
    first = next(module.parameters())
    if first.is_meta:
        raise UnsupportedByRing(f"feed-forward of {path} must have its weights; they are on meta. Load them before.")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_PROBED, width, generator=generator).to(first.device, first.dtype)
    training = [(part, part.training) for part in module.modules()]
    module.eval()  # dropout would differ
    try:
        for some in (rows, rows[:1].expand_as(rows).contiguous()):
            before = some.clone()
            whole = _hidden(module(some[None]))[0]
            cut = torch.cat([_hidden(module(piece[None]))[0] for piece in torch.split(some, 5)])
            if not torch.equal(some, before):
                raise _mixes(path, "changes its input in place")
            if whole.shape != cut.shape or not torch.allclose(whole.float(), cut.float(), rtol=1e-2, atol=_near(whole)):
                raise _mixes(path, "gives other rows when cut")
    finally:
        for part, was in training:
            part.training = was


def _hidden(found: Any) -> Tensor:
    hidden = found if isinstance(found, Tensor) else found[0]
    assert isinstance(hidden, Tensor)
    return hidden


def _near(x: Tensor) -> float:
    return 1e-2 * float(x.float().abs().max())


def _mixes(path: str, how: str) -> UnsupportedByRing:
    return UnsupportedByRing(
        f"feed-forward of {path} must treat tokens one by one to run over blocks; it {how}. Leave this model as it is."
    )


def wrapped(model: nn.Module) -> Iterator[nn.Module]:
    """The feed-forward modules that run over blocks."""
    return (module for module in model.modules() if isinstance(module, _Blockwise))
