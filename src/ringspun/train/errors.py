"""What a training run raises on purpose.

RingspunError
├── ConfigError      (ValueError)    a config that cannot be read or does not hold together
├── DataError        (ValueError)    text that is missing, empty, unreadable or not UTF-8
├── CheckpointError  (RuntimeError)  a checkpoint that is damaged or belongs to another run
├── NonFiniteError   (RuntimeError)  a NaN or Inf in the loss or the gradients
├── ProofError       (RuntimeError)  the ring and one process differ by more than rounding explains
└── LaunchError      (RuntimeError)  a rank failed; carries that rank's own message
"""

from __future__ import annotations

from ringspun.errors import RingspunError


class ConfigError(RingspunError, ValueError):
    """A training config that cannot be read, or whose values do not go together."""


class DataError(RingspunError, ValueError):
    """Text that is missing, empty, unreadable, or not UTF-8."""


class CheckpointError(RingspunError, RuntimeError):
    """A checkpoint that is damaged, or that belongs to another run."""


class NonFiniteError(RingspunError, RuntimeError):
    """The loss or the gradients of some rank hold a NaN or Inf."""


class ProofError(RingspunError, RuntimeError):
    """The ring and one process differ by more than rounding explains."""


class LaunchError(RingspunError, RuntimeError):
    """A rank of the job failed."""
