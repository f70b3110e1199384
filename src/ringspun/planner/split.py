"""How a cluster's devices share the work."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ringspun.errors import ConfigError
from ringspun.planner.models import Model


@dataclass(frozen=True)
class Split:
    """Degrees of parallelism; their product is the number of devices. Neighbours first: tp, then ulysses, ring, dp.

    Args:
        ring: devices that a sequence is dealt to. ulysses: devices that deal heads for attention, tokens elsewhere.
        tp: tensor parallel, with its activations cut by tokens between products (Megatron's sequence parallel).
        dp: replicas with sequences of their own.
    """

    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{field.name} must be a whole number of devices >= 1; got {value!r}.")

    @property
    def devices(self) -> int:
        """All of them."""
        return self.ring * self.ulysses * self.tp * self.dp

    @property
    def slices(self) -> int:
        """Parts that a sequence's tokens are cut into."""
        return self.ring * self.ulysses * self.tp

    def check(self, model: Model) -> None:
        """Whether a model's heads can be shared out so.

        Raises:
            ConfigError: they cannot.
        """
        for name, degree in (("tp", self.tp), ("ulysses * tp", self.ulysses * self.tp)):
            if model.heads % degree:
                raise ConfigError(
                    f"{name} must divide heads; got {degree} and {model.name}'s {model.heads} heads. "
                    "A ring cuts tokens, not heads, and takes any number."
                )

    def kv_copies(self, model: Model) -> float:
        """How often a key/value head is held among devices that share heads: more than once where they outnumber it."""
        return max(1.0, self.ulysses * self.tp / model.kv_heads)

    def __str__(self) -> str:
        parts = [f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) > 1]
        return " x ".join(parts) or "one device"
