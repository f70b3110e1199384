"""Which plan a layer gets: what each attention layer asks for, and what each plan's mask is cut down to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from torch import Tensor, nn

from ringspun.core.mask import And, Band, Chunks, Mask, Window, documents_of
from ringspun.errors import UnsupportedByRing

if TYPE_CHECKING:
    from ringspun.torch import Partition, Plan

PLAN_KEYWORD = "ringspun_plan"
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KINDS = (CHUNKED, FULL, SLIDING)
_OLD_NAMES = {"attention": FULL}

Local = tuple[str, ...]
"""The windows and chunks that a mask is cut down to, or that a layer asks for, sorted; empty: none. Words, and no set
of masks: a compiled call compares them."""


@dataclass(frozen=True)
class Asked:
    """What an attention layer asks for.

    Args:
        layer: its path in the model. kind: its entry in the config's `layer_types`, or what its window says.
        local: its window or chunks.
    """

    layer: str
    kind: str
    local: Local


def asked(module: nn.Module, window: int | None, layer: str = "") -> Asked:
    """What a layer asks for in a call.

    Args:
        module: the attention layer. window: the `sliding_window` that it passes (tokens). layer: its path, if known.
    Raises:
        UnsupportedByRing: a kind of attention that the ring does not have.
    """
    config, layer = getattr(module, "config", None), layer or name_of(module)
    if window is not None and not getattr(module, "is_causal", True):
        raise UnsupportedByRing(f"sliding_window must be that of a causal layer; got one to both sides in {layer}.")
    kind = _declared(module, config) or (FULL if window is None else SLIDING)
    if kind not in KINDS:
        raise UnsupportedByRing(
            f"layer_types must be {', '.join(KINDS)} on a ring; got {kind} in {layer}. "
            "What it mixes besides would begin anew at every shard."
        )
    if kind == SLIDING and window is None:
        window = getattr(config, "sliding_window", None)
    if kind == CHUNKED:
        return Asked(layer, kind, (f"chunks({config.attention_chunk_size})",))  # type: ignore[union-attr]
    return Asked(layer, kind, () if window is None else (f"window({window})",))


def name_of(module: nn.Module) -> str:
    """What an error calls a layer whose path is not known."""
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ if index is None else f"layer {index} ({type(module).__name__})"


def _declared(module: nn.Module, config: Any) -> str | None:
    kinds, index = layer_kinds(config), getattr(module, "layer_idx", None)
    return kinds[index] if kinds and isinstance(index, int) and index < len(kinds) else None


def layer_kinds(config: Any) -> Sequence[str]:
    """The kind of every layer, where the config lists them."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return [_OLD_NAMES.get(kind, kind) for kind in kinds]


def plans(model: nn.Module, partition: Partition, mask: Mask | Sequence[Mask]) -> dict[str, Plan]:
    """One plan for every kind of attention layer of a model, over one partition. Collective, like `Partition.plan`.

        full_attention      mask
        sliding_attention   mask & Window(config.sliding_window)
        chunked_attention   mask & Chunks(config.attention_chunk_size)

    Args:
        model: a Transformers model; its config's `layer_types` and windows are read.
        partition: who holds which token. mask: what the full layers see; a list: one mask per batch row.
    Returns:
        plans by kind; pass them as ``ringspun_plan=``.
    Raises:
        UnsupportedByRing: a kind of layer that the ring does not have, or chunks that documents would shift.
        Others as `Partition.plan`.
    """
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    kinds = sorted(set(layer_kinds(config))) or [FULL if window is None else SLIDING]
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise UnsupportedByRing(f"layer_types must be {', '.join(KINDS)} on a ring; got {', '.join(sorted(unknown))}.")
    cut: dict[str, Mask] = {}
    if SLIDING in kinds:
        cut[SLIDING] = Window(window)
    if CHUNKED in kinds:
        cut[CHUNKED] = Chunks(config.attention_chunk_size)
        _refuse_shifted_chunks(config.attention_chunk_size, mask)
    return Plans((kind, partition.plan(_cut_down(mask, cut.get(kind)))) for kind in kinds)


def text_config(model: nn.Module) -> Any:
    """The config of the text model, where there are several."""
    config: Any = model.config
    return config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config


def _cut_down(mask: Mask | Sequence[Mask], local: Mask | None) -> Mask | list[Mask]:
    if isinstance(mask, Mask):
        return mask if local is None else mask & local
    return [row if local is None else row & local for row in mask]


def _refuse_shifted_chunks(size: int, mask: Mask | Sequence[Mask]) -> None:
    """Transformers counts chunks from the beginning of each document; `Chunks` counts them from the sequence's."""
    for row in [mask] if isinstance(mask, Mask) else mask:
        shifted = [start for documents in documents_of(row) for start in documents.starts if start % size]
        if shifted:
            raise UnsupportedByRing(
                f"documents must start at multiples of attention_chunk_size {size}; got one that starts at "
                f"{shifted[0]}. Its chunks would be cut elsewhere than in one process."
            )


def _local(mask: Mask | tuple[Mask, ...]) -> Local:
    """The windows and chunks among the operands of a mask's `&`; of several masks, what the first is cut down to."""
    if isinstance(mask, tuple):
        rows = [_local(row) for row in mask]
        if any(row != rows[0] for row in rows):
            raise UnsupportedByRing("a plan's rows must have one window; got several. Windows belong to layers.")
        return rows[0]
    parts = mask.masks if isinstance(mask, And) else (mask,)
    bounded = [p for p in parts if isinstance(p, Band | Window | Chunks)]
    found = (Window(p.left + 1) if isinstance(p, Band) and p.right == 0 and p.left is not None else p for p in bounded)
    real = [p for p in found if p not in (Window(None), Band(None, 0), Band(None, None))]
    return tuple(sorted({str(p) for p in real}))


class Choice:
    """The plans of one call of a model: a single one for all layers, or one per kind of layer; and of their partition
    what every call of a model is checked by, as plain numbers and words: compiled calls guard on them.

    Args:
        given: what the caller passed as `ringspun_plan`.
    Raises:
        UnsupportedByRing: nothing given, plans of several partitions or of cross-attention, or a rank without tokens.
    """

    def __init__(self, given: Plan | Mapping[str, Plan]) -> None:
        self._single = not isinstance(given, Mapping)
        self._plans: dict[str, Plan] = dict(given) if isinstance(given, Mapping) else {"": given}
        if not self._plans:
            raise UnsupportedByRing(f"{PLAN_KEYWORD} must hold a plan; got none. Use plans(model, partition, mask).")
        if not all(plan.queries.core == plan.keys.core for plan in self._plans.values()):
            raise UnsupportedByRing(
                "plan must be one of self-attention; got one whose keys are other tokens, or dealt otherwise, than its "
                "queries. Make it without key_len, key_layout and query_start."
            )
        self._locals = {kind: _local(plan.mask) for kind, plan in self._plans.items()}
        first, *others = self._plans.values()
        self.partition = first.partition
        for other in others:
            part = other.partition
            if part.context is not self.partition.context or part.core != self.partition.core:
                raise UnsupportedByRing(
                    f"{PLAN_KEYWORD} must hold plans of one partition; got {self.partition!r} and {part!r}."
                )
        empty = np.flatnonzero(self.partition.core.tokens == 0)
        if len(empty):  # the same on all ranks, so that they refuse alike; models cannot run over no tokens
            raise UnsupportedByRing(
                f"plan must give every rank a token; it gives none to ring rank {empty[0]} of {self.partition.seq_len} "
                "tokens. Use a smaller ring, a longer sequence or another layout."
            )
        self.held = self.partition.local_tokens
        self.position_count = self.partition.position_count()
        self.last = tuple(int(row[-1]) for row in self.own_positions())

    @staticmethod
    def of(given: Any) -> Choice:
        """That of a call; of a plan, and of `plans`, made before.

        Raises: as the class.
        """
        if isinstance(given, Plans):
            return given.choice
        if isinstance(given, Mapping):
            return Choice(given)
        made = given.companion(COMPANION)
        if isinstance(made, UnsupportedByRing):
            raise made
        return made  # type: ignore[no-any-return]

    def own_positions(self) -> list[Tensor]:
        """The positions that a call may be given, of the first batch row ``[T]``: global ones, and where there are
        documents also those that restart in each."""
        part = self.partition
        own = [part.positions(restart=restart) for restart in sorted({False, part.restarts})]
        return [x.reshape(-1, x.shape[-1])[0] for x in own]

    def plan_of(self, layer: Asked) -> Plan:
        """The plan that a layer gets.

        A single plan may show a layer without a window less than everything: its mask is then what the layer sees.
        Raises:
            UnsupportedByRing: no plan, or one whose window is not the layer's.
        """
        kind = "" if self._single else layer.kind
        if kind not in self._plans:
            raise UnsupportedByRing(
                f"{PLAN_KEYWORD} must hold a plan for {layer.kind}, which {layer.layer} asks for; "
                f"got plans for {', '.join(self._plans)}. Use plans(model, partition, mask)."
            )
        found = self._locals[kind]
        if found == layer.local or (self._single and not layer.local):
            return self._plans[kind]
        raise UnsupportedByRing(
            f"{PLAN_KEYWORD} must have {_shown(layer.local)} for {layer.layer}; got a plan with {_shown(found)}. "
            "Use plans(model, partition, mask), which makes one plan per kind of layer."
        )


def _shown(local: Local) -> str:
    return " & ".join(local) or "no window"


class Plans(dict[str, "Plan"]):
    """Plans by kind of layer, and what a call is checked by; not to be changed, for that was worked out from them."""

    def __init__(self, plans: Iterable[tuple[str, Plan]]) -> None:
        super().__init__(plans)
        self.choice = Choice(self)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("plans must not be changed; write {**plans, kind: plan} for others.")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


COMPANION = "transformers"


def companion(plan: Plan) -> Choice | UnsupportedByRing:
    """What is kept with every plan: the choice of a call that gives it, or why there is none."""
    try:
        return Choice(plan)
    except UnsupportedByRing as refusal:
        return refusal
