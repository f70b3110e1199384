"""What every mask is, how masks combine, and what their files share."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg
from ringspun.core.host import is_integer
from ringspun.errors import MaskError

Positions = NDArray[np.int64]
Allowed = NDArray[np.bool_]


@dataclass(frozen=True)
class Mask(ABC):
    """A set of allowed (query, key) pairs over global positions."""

    @abstractmethod
    def allowed(self, q: Positions, k: Positions) -> Allowed:
        """Whether each pair is allowed; `q` and `k` broadcast against each other."""

    @abstractmethod
    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        """The same set as disjoint regions ``[n, 6]`` (see `ringspun.core.regions`), in positions.

        Args:
            q_len: queries (tokens). k_len: keys (tokens), at positions 0 .. k_len - 1.
            q_start: position of the first query; decoding sets it to the keys that came before, and a negative one puts
                queries before the first key.
        """

    def as_array(self, q_len: int, k_len: int | None = None, *, q_start: int = 0) -> Allowed:
        """The dense boolean matrix ``[q_len, k_len]`` (True = may look), straight from the definition.

        Its row i is the query at position ``q_start + i``; arguments as in `regions`; `k_len` is `q_len` if not given.
        """
        k_len = q_len if k_len is None else k_len
        q, k = np.arange(q_start, q_start + q_len)[:, None], np.arange(k_len)[None, :]
        return np.broadcast_to(self.allowed(q, k), (q_len, k_len)).copy()

    def __and__(self, other: Mask) -> Mask:
        return And(_operands(And, self, other)) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or(_operands(Or, self, other)) if isinstance(other, Mask) else NotImplemented

    @cached_property
    def text(self) -> str:
        """`str` of it, made once: of a large mask that takes a while, and every plan asks for it."""
        return str(self)

    def __str__(self) -> str:
        """The canonical string; for the masks of this package ``parse(str(mask)) == mask``."""
        values = [(f, getattr(self, f.name)) for f in dataclasses.fields(self)]
        shown = [
            str(_lists(value)) if f.default is dataclasses.MISSING else f"{f.name}={_lists(value)}"
            for f, value in values
            if f.default is dataclasses.MISSING or value != f.default
        ]
        name = type(self).__name__.lower()
        return f"{name}({', '.join(shown)})" if shown else name


@dataclass(frozen=True)
class And(Mask):
    """Pairs that every operand allows; made by ``a & b``."""

    masks: tuple[Mask, ...]

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return np.asarray(np.logical_and.reduce(np.broadcast_arrays(*(m.allowed(q, k) for m in self.masks))))

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        first, *others = (m.regions(q_len, k_len, q_start) for m in self.masks)
        for other in others:
            first = rg.intersect(first, other)
        return first

    def __str__(self) -> str:
        return " & ".join(f"({m.text})" if isinstance(m, Or) else m.text for m in self.masks)


@dataclass(frozen=True)
class Or(Mask):
    """Pairs that any operand allows; made by ``a | b``."""

    masks: tuple[Mask, ...]

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return np.asarray(np.logical_or.reduce(np.broadcast_arrays(*(m.allowed(q, k) for m in self.masks))))

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        first, *others = (m.regions(q_len, k_len, q_start) for m in self.masks)
        for other in others:
            first = rg.unite(first, other)
        return first

    def __str__(self) -> str:
        return " | ".join(m.text for m in self.masks)


def _lists(value: Any) -> Any:
    """A field as a string shows it: tuples, also within tuples, as lists."""
    return [_lists(v) for v in value] if isinstance(value, tuple) else value


def _operands(kind: type[And] | type[Or], *masks: Mask) -> tuple[Mask, ...]:
    """Operands with nested ones of the same kind taken flat, so that equal expressions are equal values."""
    return tuple(part for m in masks for part in (m.masks if isinstance(m, kind) else (m,)))


def everything(q_len: int, k_len: int, q_start: int) -> rg.Table:
    """Every pair of these queries and keys: what the regions of a mask lie within."""
    return rg.rectangle(q_start, q_start + q_len, 0, k_len)


def rectangles(q0: Positions, q1: Positions, k0: Positions, k1: Positions, within: rg.Table) -> rg.Table:
    """Rectangles without a band, one per entry, cut to the region `within`."""
    wide = np.full(len(q0), rg.UNBOUNDED, np.int64)
    return rg.intersect(np.stack([q0, q1, k0, k1, -wide, wide], axis=1).astype(np.int64), within)


def integer(name: str, value: Any, least: int | None = None) -> int:
    """`value` as an int, if it is one of at least `least` and not beyond any length."""
    if not is_integer(value):
        raise MaskError(f"{name} must be an integer; got {value!r}.")
    if least is not None and value < least:
        raise MaskError(f"{name} must be >= {least}; got {value}.")
    if abs(int(value)) > rg.UNBOUNDED:
        raise MaskError(f"{name} must lie within +-2**60 (None, where allowed, is unbounded); got {value}.")
    return int(value)


def short(values: NDArray[np.int64]) -> str:
    """What an error shows of many values."""
    shown = ", ".join(map(str, values[:8].tolist()))
    return f"[{shown}{', ...' if len(values) > 8 else ''}] ({len(values)} values)"
