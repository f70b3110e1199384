"""What `certify` asks and what it is answered: numbers in, numbers out. NumPy alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ringspun.core.mask import Mask
from ringspun.core.reference import Reference
from ringspun.testing.cases import Case, Inputs, bias_gradient, dense_bias, inputs, reference, spoiled, uses_lse
from ringspun.testing.comparison import SHARED, TENSORS
from ringspun.testing.yardstick import dense, round_to, rounded

GIVES = (*TENSORS, *SHARED)
"""What an attention can give: out, lse, and the gradients of q, k, v, sinks and the bias's tensor."""

Owners = tuple[np.ndarray, np.ndarray]
"""The ring rank of each query and of each key."""


@dataclass(frozen=True)
class Problem:
    """Attention of whole sequences, and the incoming gradients of its results. Arrays are read-only and in the dtype
    asked for; NumPy has no bfloat16, so that comes as float32 whose numbers bfloat16 holds exactly.

        score(i, j) = bound(scale * q_i . k_j) + bias(h, i, j)          bound(x) = softcap * tanh(x / softcap), or x
        weight      = exp(score) where `allowed`, else 0
        out_i       = sum_j weight v_j / (exp(sink_h) + sum_j weight),  lse_i = log of that denominator

    A row that is allowed no key has out 0, lse -inf (with sinks: the sink) and no gradient.

    Args:
        case: the case as data. given: its inputs, float64.
    """

    case: Case
    given: Inputs

    @cached_property
    def q(self) -> np.ndarray:
        """``[B, H, Sq, D]``."""
        return self._held(self.given.q)

    @cached_property
    def k(self) -> np.ndarray:
        """``[B, K, Sk, D]``, H a multiple of K: query head h reads key/value head ``h // (H // K)``."""
        return self._held(self.given.k)

    @cached_property
    def v(self) -> np.ndarray:
        """``[B, K, Sk, Dv]``."""
        return self._held(self.given.v)

    @cached_property
    def dout(self) -> np.ndarray:
        """Incoming gradient of out, ``[B, H, Sq, Dv]``."""
        return self._held(self.given.dout)

    @cached_property
    def dlse(self) -> np.ndarray | None:
        """Incoming gradient of lse, ``[B, H, Sq]``; None where nobody uses lse."""
        return self._held(self.given.dlse) if uses_lse(self.case) else None

    @property
    def mask(self) -> Mask | tuple[Mask, ...]:
        """What may be seen, by positions: queries start at `query_start`, keys at 0. A tuple: one per batch row."""
        return self.case.mask

    @cached_property
    def allowed(self) -> np.ndarray:
        """The same as booleans, ``[Sq, Sk]``, or ``[B, 1, Sq, Sk]`` where each batch row has its own."""
        return _frozen(self.case.allowed)

    @property
    def query_start(self) -> int:
        """Position of the first query among the keys."""
        return self.case.query_start

    @property
    def scale(self) -> float:
        """Of the scores."""
        asked = self.case.arguments.scale
        return float(self.case.shape.head_size**-0.5) if asked is None else asked

    @property
    def has_default_scale(self) -> bool:
        """Whether `scale` is ``D ** -0.5``."""
        return self.case.arguments.scale is None

    @property
    def softcap(self) -> float | None:
        """Bound of the scores, or None."""
        return self.case.arguments.softcap

    @cached_property
    def sinks(self) -> np.ndarray | None:
        """``[H]``, or None."""
        return None if self.given.sinks is None else self._held(self.given.sinks)

    @cached_property
    def bias(self) -> np.ndarray | None:
        """What is added to the scores, ``[H or 1, Sq, Sk]``, or None."""
        dense = dense_bias(self.case, self.given.bias)
        return None if dense is None else self._held(dense, narrow=False)

    @property
    def bias_kind(self) -> str:
        """ "" for none, "alibi", "table" or "function": what `bias` was made of, for attentions that make it."""
        return self.case.arguments.bias

    def bias_gradient(self, dense: np.ndarray) -> np.ndarray | None:
        """The gradient of the tensor behind `bias` (slopes ``[H]``, table ``[N, H]``) from ``[H, Sq, Sk]`` of `bias`
        itself, summed over the batch: what `Answer.dbias` is. None where there is no tensor."""
        return bias_gradient(self.case, dense)

    @property
    def dtype(self) -> str:
        """ "float64", "float32" or "bfloat16"."""
        return self.case.dtype

    def _held(self, x: np.ndarray, narrow: bool = True) -> np.ndarray:
        return _frozen(round_to(x, self.dtype if narrow or self.dtype == "float64" else "float32"))


@dataclass(frozen=True)
class Answer:
    """What an attention gives; None for what it does not. Any float dtype, shapes as the inputs'; `lse` ``[B, H, Sq]``.

    `dsinks` ``[H]``; `dbias`: see `Problem.bias_gradient`.
    """

    out: np.ndarray
    lse: np.ndarray | None = None
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dsinks: np.ndarray | None = None
    dbias: np.ndarray | None = None


class Candidate(ABC):
    """An attention that wants to be certified. A plain function of a `Problem` is one too; see `certify`.

    `name` stands in reports; `gives` says up front which tensors of `GIVES` come, so that others are listed as not
    certified, never as passed.
    """

    name: str
    gives: tuple[str, ...] = GIVES

    @abstractmethod
    def answer(self, problem: Problem) -> Answer:
        """The answer.

        Raises:
            KernelRefused, UnsupportedByRing: it cannot do this exactly, and says so. Anything else is a fault.
        """

    def owners(self, problem: Problem) -> Owners | None:
        """Who holds which query and which key, where this is a ring: reports then name ranks."""
        return None

    def alone(self) -> Candidate | None:
        """The same on one rank, where this is a ring of `ringspun.testing.comparison.MANY_RANKS` or more: in bfloat16
        the error must not grow with the ring."""
        return None


class Function(Candidate):
    """A plain function as a candidate."""

    def __init__(self, function: Callable[[Problem], Answer], gives: tuple[str, ...], name: str) -> None:
        self._function, self.gives, self.name = function, gives, name

    def answer(self, problem: Problem) -> Answer:
        return self._function(problem)


@lru_cache(maxsize=1024)
def problem_of(case: Case) -> Problem:
    """The problem of a case; inputs rounded to its dtype, padding spoiled where the case says so."""
    given = rounded(case, inputs(case))
    return Problem(case, spoiled(case, given) if case.spoiled else given)


@lru_cache(maxsize=1024)
def oracle(case: Case) -> Reference:
    """The float64 oracle's answer to `problem_of` a case."""
    return reference(case, rounded(case, inputs(case)))


@lru_cache(maxsize=1024)
def yardstick(case: Case) -> dict[str, np.ndarray]:
    """What dense attention in the case's dtype answers."""
    return dense(case, rounded(case, inputs(case)))


def _frozen(x: np.ndarray) -> np.ndarray:
    x = np.array(x)
    x.flags.writeable = False
    return x
