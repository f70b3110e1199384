"""Rotary embeddings of a Hugging Face model, fixed for a length: the same on every rank, and exact far out.

Transformers takes the length that decides dynamic frequencies from the largest position of a call, which on a ring is
one rank's own; it forms angles in float32; and casting a model rounds its frequencies along with its weights. What
stands here in its place takes the length from whoever calls `fix_rope`, forms angles in float64 (`rotary.py`), and has
no buffer that a cast could reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ringspun.errors import UnsupportedByRing
from ringspun.integrations.transformers import PLAN_KEYWORD
from ringspun.integrations.transformers.layers import Choice
from ringspun.integrations.transformers.probe import Probe
from ringspun.train.rope import Rope, from_config, head_size_of
from ringspun.train.rope.base import whole
from ringspun.train.rope.rotary import turned

M = TypeVar("M", bound=nn.Module)


def fix_rope(model: M, *, seq_len: int, rope: Rope | None = None) -> M:
    """Fixes the rotary embeddings of a Transformers model for a length; again for another one.

        fix_rope(model, seq_len=part.position_count())             # a dynamic or longrope model, on a ring
        fix_rope(model, seq_len=stage.seq_len, rope=stage.rope)    # the next stage of a ContextSchedule

    Where the frequencies depend on the length (dynamic, longrope), do so before `prepare`, which refuses them else. A
    call whose plan says positions that go further is refused, a shorter one rotates by those of `seq_len`. The plan
    says the longest document where its partition has documents, else the end of the sequence; positions of a batch's
    own, which may run on through documents, are not looked at.

    Args:
        model: changed in place: its rotary modules are replaced. seq_len: the length that decides (tokens), the same on
            every rank: `Partition.position_count`, with `restart=False` where documents are given running positions.
            rope: another scaling; the model's config is changed to it, so that a saved model has it.
    Returns:
        `model`.
    Raises:
        UnsupportedByRing: no rotary module, or one whose cosines and sines are not those of its config in the usual
            form; a `rope` that does not fit the model. ConfigError: no length; as `from_config`. The model is then
            as it was.
    """
    whole("seq_len", seq_len)
    found = list(_rotary_modules(model))
    if not found:
        raise UnsupportedByRing(f"model must have rotary embeddings with a rope_type; {type(model).__name__} has none.")
    fixed = [FixedRope(module.config, _ropes(module, rope, path), seq_len=seq_len) for path, _, _, module in found]
    for (path, _, _, module), new in zip(found, fixed, strict=True):
        new.doubled = module.doubled if isinstance(module, FixedRope) else _is_doubled(module, path)
        new.train(module.training)
    for (_, parent, name, module), new in zip(found, fixed, strict=True):
        if rope is not None:
            _rewrite(new.config, rope, seq_len)
        if isinstance(module, FixedRope):
            module.take(new)
        else:
            setattr(parent, name, new)
            parts: set[nn.Module] = {model, parent}  # both, as in `prepare`
            for part in parts:
                part.register_forward_pre_hook(partial(_check_length, new), with_kwargs=True)
    return model


class FixedRope(nn.Module):
    """A rotary embedding in the form that Transformers calls: cosines and sines ``[B, T, rotated]``, each frequency's
    twice, or (`doubled` is False, as gpt-oss has it) once ``[B, T, rotated / 2]``.

    Args:
        config: the model's. ropes: by kind of layer; None where there is one. seq_len: what decides (tokens).
    """

    def __init__(self, config: Any, ropes: dict[str | None, Rope], *, seq_len: int) -> None:
        super().__init__()
        self.config, self.ropes, self.seq_len = config, ropes, seq_len
        self.needs_length = any(rope.needs_length for rope in ropes.values())
        self.doubled = True
        size = head_size_of(config)
        # Plain tensors and no buffers: a cast of the model must not reach them.
        self._tables = {kind: torch.from_numpy(rope.inv_freq(size, seq_len=seq_len)) for kind, rope in ropes.items()}
        self._factors = {kind: rope.attention_factor for kind, rope in ropes.items()}

    def take(self, other: FixedRope) -> None:
        """Becomes `other`."""
        self.config, self.ropes, self.seq_len, self.needs_length = (
            other.config,
            other.ropes,
            other.seq_len,
            other.needs_length,
        )
        self._tables, self._factors = other._tables, other._factors

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Of integer positions ``[B, T]``, in the dtype of `x`."""
        table = self._tables[layer_type] = self._tables[layer_type].to(x.device)
        cos, sin = turned(position_ids, table, self._factors[layer_type], x.dtype)
        return (torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)) if self.doubled else (cos, sin)

    def extra_repr(self) -> str:
        """What is fixed."""
        return f"seq_len={self.seq_len}, {', '.join(map(str, self.ropes.values()))}"


def _rotary_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Path, parent, name and module of every rotary embedding whose config says its type."""
    for path, module in list(model.named_modules()):
        if isinstance(module, FixedRope) or (
            getattr(module, "rope_type", None) is not None and getattr(module, "config", None) is not None
        ):
            parent, _, name = path.rpartition(".")
            yield path, model.get_submodule(parent), name, module


def _ropes(module: Any, rope: Rope | None, path: str) -> dict[str | None, Rope]:
    if isinstance(module, FixedRope):
        ropes = module.ropes
    else:
        kinds = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
        ropes = {kind: from_config(module.config, kind) for kind in kinds}
    if rope is None:
        return ropes
    if set(ropes) != {None}:
        raise UnsupportedByRing(
            f"rope must be None for a model whose layers rotate differently; got {rope} at {path}, which has one for "
            f"{', '.join(map(str, ropes))}."
        )
    size, before = head_size_of(module.config), ropes[None]
    if rope.rotated(size) != before.rotated(size):
        raise UnsupportedByRing(
            f"rope must rotate as many dims as the model does, {before.rotated(size)} of {size} at {path}; got "
            f"{rope.rotated(size)}."
        )
    return {None: rope}


def _is_doubled(module: Any, path: str) -> bool:
    """Whether a module gives each frequency twice; refuses one that does something else with its frequencies."""
    positions, x = torch.arange(6)[None], torch.zeros(1)
    try:
        own = type(module)(module.config)  # a fresh one, for this one may have been cast
        mine = FixedRope(module.config, _ropes(module, None, path), seq_len=positions.shape[1])
        for kind in mine.ropes:
            given = (x, positions) if kind is None else (x, positions, kind)
            theirs = own(*given)
            mine.doubled = theirs[0].shape == mine(*given)[0].shape
            torch.testing.assert_close(tuple(theirs), mine(*given), rtol=1e-5, atol=1e-5)
    except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError) as problem:
        raise UnsupportedByRing(
            f"rotary embedding must give the cosines and sines of its config's frequencies, each once or twice; "
            f"{type(module).__name__} at {path} does not: {problem}"
        ) from problem
    return mine.doubled


def _rewrite(config: Any, rope: Rope, seq_len: int) -> None:
    written = rope.to_config(head_size=head_size_of(config), max_position_embeddings=seq_len)
    for name, value in written.items():
        setattr(config, name, value)


def _check_length(fixed: FixedRope, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a call whose positions would need other frequencies: by every rank alike."""
    given = kwargs.get(PLAN_KEYWORD)
    if not fixed.needs_length or given is None or isinstance(given, Probe):
        return
    choice = given if isinstance(given, Choice) else Choice.of(given)
    if choice.position_count > fixed.seq_len:
        raise UnsupportedByRing(
            f"positions must be below {fixed.seq_len}, for which the model's rotations were fixed; got a plan whose "
            f"positions go up to {choice.position_count - 1}. On every rank, write fix_rope(model, "
            f"seq_len={choice.position_count})."
        )
