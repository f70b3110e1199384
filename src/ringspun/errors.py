"""Every exception and warning that ringspun raises on purpose.

RingspunError
├── MaskError              (ValueError)    a mask that cannot be built or parsed
├── LayoutError            (ValueError)    a layout that cannot deal these tokens
├── PlanError              (ValueError)    a mask and a layout that do not go together
├── ShapeError             (ValueError)    tensors that do not fit the plan
├── DtypeError             (TypeError)     tensors of a type or device that cannot be used
├── KernelRefused          (ValueError)    no kernel can do this call; lists every reason
├── NotDifferentiable      (RuntimeError)  a derivative that is not defined here
├── MissingExtra           (ImportError)   an optional dependency is absent; gives the install line
├── PlanMismatchError      (RuntimeError)  ranks disagree about what to compute
├── TransferError          (RuntimeError)  a block arrived that is not the one expected
├── PeerError              (RuntimeError)  a rank is dead, late, or reported its own failure
├── RingBroken             (RuntimeError)  a ring used again after a call that did not end alike on all ranks
├── UnsupportedByRing      (ValueError)    a model or call that attention on a ring cannot honour
├── ConfigError            (ValueError)    a config, profile or question that cannot be
├── DataError              (ValueError)    text that is missing, empty or unreadable
├── CheckpointError        (RuntimeError)  a checkpoint that is damaged, or of another run
├── NonFiniteError         (RuntimeError)  a NaN or Inf in the loss or gradients of some rank
├── ProofError             (RuntimeError)  ring and one process differ by more than rounding explains
└── LaunchError            (RuntimeError)  a rank of the job failed

RingspunWarning            (UserWarning)   a legal request that is very likely a mistake
"""

from __future__ import annotations


class RingspunError(Exception):
    """Root of all errors of this package."""


class MaskError(RingspunError, ValueError):
    """A mask that cannot be built or parsed."""


class LayoutError(RingspunError, ValueError):
    """A layout that cannot be built, parsed, or deal these tokens."""


class PlanError(RingspunError, ValueError):
    """A mask, layout, route and length that do not go together."""


class ShapeError(RingspunError, ValueError):
    """Tensors whose shapes do not fit each other or the plan."""


class DtypeError(RingspunError, TypeError):
    """Tensors of a dtype, device or kind that cannot be used here."""


class KernelRefused(RingspunError, ValueError):
    """No kernel can do this call exactly; the message lists each kernel's reason."""


class NotDifferentiable(RingspunError, RuntimeError):
    """A derivative was asked for that is not defined."""


class MissingExtra(RingspunError, ImportError):
    """An optional dependency is absent; the message gives the install line."""


class PlanMismatchError(RingspunError, RuntimeError):
    """The ranks of a ring disagree about what to compute."""


class TransferError(RingspunError, RuntimeError):
    """A message arrived that is not the one the schedule expects."""


class PeerError(RingspunError, RuntimeError):
    """A rank of the ring is dead, late, or reported a failure of its own."""


class RingBroken(RingspunError, RuntimeError):
    """A ring was used again after a call that did not end alike on all its ranks."""


class UnsupportedByRing(RingspunError, ValueError):
    """A model or a call asks for something that attention on a ring cannot honour."""


class ConfigError(RingspunError, ValueError):
    """A config, profile or question to the planner that cannot be read, or whose values do not go together."""


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


class RingspunWarning(UserWarning):
    """A legal request that is very likely a mistake."""
