"""The scaling types, one frozen value each; their arithmetic is Transformers', in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ringspun.errors import ConfigError
from ringspun.train.rope.base import ORIGINAL, OURS, Rope, least, whole


@final
@dataclass(frozen=True, kw_only=True)
class Default(Rope):
    """RoPE as published: angle per position theta ** (-2i / D) (Su et al., arXiv 2104.09864, section 3.2)."""

    rope_type = "default"

    def _inv_freq(self, dims: int, seq_len: int) -> NDArray[np.float64]:
        return self.of_theta(dims)


@final
@dataclass(frozen=True, kw_only=True)
class Linear(Rope):
    """Position interpolation: position m counts as m / factor (Chen et al., arXiv 2306.15595, equation 4)."""

    factor: float
    rope_type = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        least("factor", self.factor, 1)

    def _inv_freq(self, dims: int, seq_len: int) -> NDArray[np.float64]:
        return self.of_theta(dims) / self.factor


@final
@dataclass(frozen=True, kw_only=True)
class Ntk(Rope):
    """NTK-aware scaling: theta' = theta * factor ** (D / (D - 2)) (arXiv 2309.00071, definition 1). Transformers has no
    such type; to it this is `as_default`."""

    factor: float
    rope_type = "ntk"

    def __post_init__(self) -> None:
        super().__post_init__()
        least("factor", self.factor, 1)

    def as_default(self, head_size: int) -> Default:
        """The same frequencies for heads of that size, by their theta."""
        return _of_larger_theta(self, self.factor, self.rotated(head_size))

    def to_config(self, *, head_size: int, max_position_embeddings: int) -> dict[str, Any]:
        """See `Rope.to_config`; written as a default type with the larger theta."""
        written = self.as_default(head_size)
        return written.to_config(head_size=head_size, max_position_embeddings=max_position_embeddings)

    def _inv_freq(self, dims: int, seq_len: int) -> NDArray[np.float64]:
        return _of_larger_theta(self, self.factor, dims).of_theta(dims)


@final
@dataclass(frozen=True, kw_only=True)
class Dynamic(Rope):
    """Dynamic NTK: theta grows with the length beyond the original one, in Transformers' form
    (factor * seq_len / original - (factor - 1)) ** (D / (D - 2)) (arXiv 2309.00071, section 3.3).

    A function of `seq_len` alone: Transformers, in one process, keeps the theta of the longest call so far.
    """

    factor: float
    original_max_position_embeddings: int
    rope_type = "dynamic"
    needs_length = True

    def __post_init__(self) -> None:
        super().__post_init__()
        least("factor", self.factor, 1)
        whole(ORIGINAL, self.original_max_position_embeddings)

    def as_default(self, head_size: int, *, seq_len: int) -> Default:
        """The same frequencies for heads of that size and one length, by their theta."""
        return _of_larger_theta(self, self._growth(seq_len), self.rotated(head_size))

    def to_config(self, *, head_size: int, max_position_embeddings: int) -> dict[str, Any]:
        """See `Rope.to_config`; Transformers' original length is `max_position_embeddings`, whatever is given here."""
        parameters = self.to_parameters()
        original = parameters.pop(ORIGINAL)
        return {"rope_parameters": parameters, "max_position_embeddings": original}

    def _growth(self, seq_len: int) -> float:
        longest = max(seq_len, self.original_max_position_embeddings)
        return self.factor * longest / self.original_max_position_embeddings - (self.factor - 1)

    def _inv_freq(self, dims: int, seq_len: int) -> NDArray[np.float64]:
        return _of_larger_theta(self, self._growth(seq_len), dims).of_theta(dims)


@final
@dataclass(frozen=True, kw_only=True)
class Yarn(Rope):
    """YaRN (Peng et al., arXiv 2309.00071, section 3.4), with DeepSeek's `mscale` and gpt-oss's `truncate`.

    Args:
        factor: how much longer. original_max_position_embeddings: the length before (tokens).
        beta_fast, beta_slow: turns within it from which a frequency is kept, up to which it is divided.
        attention_factor_given, mscale, mscale_all_dim: what decides `attention_factor`; 0.1 ln(factor) + 1 by default.
        truncate: round the ends of the ramp to whole dims.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor_given: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    rope_type = "yarn"

    def __post_init__(self) -> None:
        super().__post_init__()
        least("factor", self.factor, 1)
        whole(ORIGINAL, self.original_max_position_embeddings)
        least("beta_slow", self.beta_slow, 0, beyond=True)
        least("beta_fast", self.beta_fast, self.beta_slow)
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, OURS.get(name, name))
            if value is not None:
                least(name, value, 0)
        if not isinstance(self.truncate, bool):
            raise ConfigError(f"truncate must be true or false; got {self.truncate!r}.")
        if self.theta == 1:
            raise ConfigError("rope_theta must not be 1 for yarn; all its frequencies would be one.")

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by: scores get warmer by its square."""
        if self.attention_factor_given is not None:
            return self.attention_factor_given
        if self.mscale and self.mscale_all_dim:
            return self._warmth(self.mscale) / self._warmth(self.mscale_all_dim)
        return self._warmth(1.0)

    def _warmth(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0

    def _inv_freq(self, dims: int, seq_len: int) -> NDArray[np.float64]:
        kept = self.of_theta(dims)
        low, high = self._dim_of(self.beta_fast, dims), self._dim_of(self.beta_slow, dims)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        ramp: NDArray[np.float64] = np.clip((np.arange(dims // 2) - low) / (high - low if high != low else 0.001), 0, 1)
        return kept * (1 - ramp) + kept / self.factor * ramp

    def _dim_of(self, turns: float, dims: int) -> float:
        """Where among the dims a frequency makes so many turns in the original length."""
        within = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return dims * math.log(within) / (2 * math.log(self.theta))


@final
@dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """LongRoPE (Ding et al., arXiv 2402.13753): `long_factor` beyond the original length, `short_factor` up to it.

    Args:
        short_factor, long_factor: what each frequency is divided by, one per pair of dims.
        original_max_position_embeddings: the length before (tokens). factor: how much longer the model was made.
        attention_factor_given: default sqrt(1 + ln(factor) / ln(original)).
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_position_embeddings: int
    attention_factor_given: float | None = None
    rope_type = "longrope"
    needs_length = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(ORIGINAL, self.original_max_position_embeddings, 2)
        least("factor", self.factor, 0, beyond=True)
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if not isinstance(factors, tuple):
                raise ConfigError(f"{name} must be a list of numbers; got {factors!r}.")
            for value in factors:
                least(name, value, 0, beyond=True)
        if self.attention_factor_given is not None:
            least("attention_factor", self.attention_factor_given, 0)

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by, whatever the length."""
        if self.attention_factor_given is not None:
            return self.attention_factor_given
        return math.sqrt(1 + max(0.0, math.log(self.factor)) / math.log(self.original_max_position_embeddings))

    def _inv_freq(self, dims: int, seq_len: int) -> NDArray[np.float64]:
        long = seq_len > self.original_max_position_embeddings
        factors = self.long_factor if long else self.short_factor
        if len(factors) != dims // 2:
            name = "long_factor" if long else "short_factor"
            raise ConfigError(f"{name} must have {dims // 2} numbers, one per pair of dims; got {len(factors)}.")
        return self.of_theta(dims) / np.array(factors, dtype=np.float64)


@final
@dataclass(frozen=True, kw_only=True)
class Llama3(Rope):
    """Llama 3.1's scaling (meta-llama/llama-models, `apply_scaling`): wavelengths beyond original / low_freq_factor
    are divided by the factor, those below original / high_freq_factor kept, between them a ramp."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type = "llama3"

    def __post_init__(self) -> None:
        super().__post_init__()
        least("factor", self.factor, 1)
        whole(ORIGINAL, self.original_max_position_embeddings)
        least("low_freq_factor", self.low_freq_factor, 0, beyond=True)
        least("high_freq_factor", self.high_freq_factor, self.low_freq_factor, beyond=True)

    def _inv_freq(self, dims: int, seq_len: int) -> NDArray[np.float64]:
        kept = self.of_theta(dims)
        turns = self.original_max_position_embeddings * kept / (2 * math.pi)
        ramp = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return kept / self.factor * (1 - ramp) + kept * ramp


@final
@dataclass(frozen=True, kw_only=True)
class Proportional(Rope):
    """The first frequencies of a whole head, the others 0 (Gemma 4): `partial_rotary_factor` says how many."""

    factor: float = 1.0
    rope_type = "proportional"

    def __post_init__(self) -> None:
        super().__post_init__()
        least("factor", self.factor, 1)

    def rotated(self, head_size: int) -> int:
        """The whole head: dims without a frequency turn by 0."""
        if head_size < 2 or head_size % 2:
            raise ConfigError(f"rotated dims must be even and at least 2; got head size {head_size}.")
        return head_size

    def _inv_freq(self, dims: int, seq_len: int) -> NDArray[np.float64]:
        turning = int(self.partial_rotary_factor * dims // 2)
        found: NDArray[np.float64] = self.of_theta(dims) / self.factor
        found[turning:] = 0.0
        return found


def _of_larger_theta(rope: Rope, growth: float, dims: int) -> Default:
    if dims == 2:
        raise ConfigError(f"rotated dims must be more than 2 for {rope.rope_type}; got 2.")
    theta = rope.theta * growth ** (dims / (dims - 2))
    return Default(theta=theta, partial_rotary_factor=rope.partial_rotary_factor)
