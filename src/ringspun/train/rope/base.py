"""What all rotations have in common; and how numbers are checked."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ringspun.errors import ConfigError

OURS = {"rope_theta": "theta", "attention_factor": "attention_factor_given"}
"""Our names for Hugging Face's, where they differ."""
THEIRS = {ours: theirs for theirs, ours in OURS.items()}
ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class Rope(ABC):
    """The frequencies of a rotary embedding; read from a Hugging Face config by `from_config` or `from_parameters`.

    Args:
        theta: base of the frequencies. partial_rotary_factor: the part of each head that is rotated.
    Raises:
        ConfigError: a value out of range.
    """

    theta: float = 10_000.0
    partial_rotary_factor: float = 1.0

    rope_type: ClassVar[str]
    needs_length: ClassVar[bool] = False
    """Whether the frequencies depend on the length of the sequence."""

    def __post_init__(self) -> None:
        least("rope_theta", self.theta, 0, beyond=True)
        least("partial_rotary_factor", self.partial_rotary_factor, 0, beyond=True)
        if self.partial_rotary_factor > 1:
            raise ConfigError(f"partial_rotary_factor must be at most 1; got {self.partial_rotary_factor!r}.")

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    def rotated(self, head_size: int) -> int:
        """How many of a head's `head_size` dims have a frequency: an even number.

        Raises:
            ConfigError: it would be odd or 0.
        """
        dims = int(head_size * self.partial_rotary_factor)
        if dims < 2 or dims % 2:
            raise ConfigError(
                f"rotated dims must be even and at least 2; got {dims} (head size {head_size}, "
                f"partial_rotary_factor {self.partial_rotary_factor})."
            )
        return dims

    def inv_freq(self, head_size: int, *, seq_len: int | None = None) -> NDArray[np.float64]:
        """Angle per position of each pair of dims, radians, ``[rotated / 2]``.

        Args:
            head_size: dims of one head. seq_len: the length that decides (tokens), the same on every rank; types whose
                `needs_length` is set insist on it, the others ignore it.
        Raises:
            ConfigError: no `seq_len` where it decides; an odd size; per-dim factors of another size.
        """
        if self.needs_length and (seq_len is None or seq_len < 0):
            raise ConfigError(
                f"seq_len must be given for {self.rope_type} rotations; got {seq_len}. It decides the frequencies, and "
                "no rank may take it from its own positions. Write seq_len=partition.position_count()."
            )
        return self._inv_freq(self.rotated(head_size), seq_len or 0)

    @abstractmethod
    def _inv_freq(self, dims: int, seq_len: int) -> NDArray[np.float64]: ...

    def to_parameters(self) -> dict[str, Any]:
        """This value as a flat dict in Hugging Face's words, complete: `from_parameters` reads it back."""
        mine = {
            THEIRS.get(f.name, f.name): getattr(self, f.name)
            for f in fields(self)
            if f.name == "theta" or getattr(self, f.name) != f.default
        }
        return {"rope_type": self.rope_type} | {k: list(v) if isinstance(v, tuple) else v for k, v in mine.items()}

    def to_config(self, *, head_size: int, max_position_embeddings: int) -> dict[str, Any]:
        """Keyword arguments for a Hugging Face config: `rope_parameters` and `max_position_embeddings`.

        Args:
            head_size: dims of one head. max_position_embeddings: the longest length that the model is made for.
        """
        self.rotated(head_size)
        return {"rope_parameters": self.to_parameters(), "max_position_embeddings": max_position_embeddings}

    def of_theta(self, dims: int) -> NDArray[np.float64]:
        """Unscaled frequencies of that many dims."""
        return np.float64(self.theta) ** (-np.arange(0, dims, 2) / dims)


def least(name: str, value: Any, bound: float, *, beyond: bool = False) -> None:
    """Refuses what is no finite number of at least (`beyond`: more than) `bound`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a number; got {value!r}.")
    if value < bound or (beyond and value == bound):
        raise ConfigError(f"{name} must be {'more than' if beyond else 'at least'} {bound:g}; got {value!r}.")


def whole(name: str, value: Any, bound: int = 1) -> None:
    """Refuses what is no integer of at least `bound`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < bound:
        raise ConfigError(f"{name} must be a whole number, at least {bound}; got {value!r}.")
