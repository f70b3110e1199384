"""A rank's diary: what it sends, receives and computes, from which its pass and the slots of its buffers follow.

Routes that relay nothing, or on several ways at once, are told event by event; here every message and every block gets
the first buffer that is free. Times count thirds of a step: what is waited for and posted before the tiles of step t,
at 3t; what is waited for with its first tile, and gradients, at 3t + 1; what is added and posted after them, at 3t + 2.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np

from ringspun.core.route.base import NONE, OWN, Action, BoundRoute, Legs, MessageColumn, Moment, Rows, StepColumn, legs
from ringspun.core.wire import Payload


@dataclass(eq=False)
class Stay:
    """A block, or its gradients, in a buffer from `since` until before `until`."""

    payload: Payload
    since: int
    until: int
    slot: int = NONE


@dataclass(frozen=True)
class _Message:
    step: int
    moment: Moment
    action: Action
    peer: int
    block: int
    due: int
    stay: Stay
    packed: bool = False


@dataclass
class Diary:
    """One pass of one rank.

    Args:
        ring_rank: whose. tokens: rows of every block that travel. reader: of steps that say no other; default: the
            rank.
    """

    ring_rank: int
    tokens: Rows
    reader: int | None = None
    _own_step: int = 0
    _steps: dict[int, dict[StepColumn, int | Stay]] = field(default_factory=dict)
    _messages: list[_Message] = field(default_factory=list)
    _stays: list[Stay] = field(default_factory=list)

    def compute(self, step: int, block: int, stay: Stay | None, reader: int | None = None) -> None:
        """A step's tiles are those of `block`, which lies there (None: in the rank's own tensors), and of `reader`."""
        self._note(step, SOURCE=block)
        if reader is not None:
            self._note(step, READER=reader)
        if stay is not None:
            self._keep(stay, 3 * step + 2)
            self._note(step, SLOT=stay)

    def compute_own(self, step: int) -> None:
        """The rank's own rows are computed at that step, and at none before it."""
        self._own_step = step
        self._note(step, SOURCE=self.ring_rank)

    def gather(self, step: int, block: int, arrived: Stay | None) -> Stay:
        """The gradients of a step's block gather there; with what others gathered, where that has `arrived`."""
        stay = self._stay(Payload.DKV, 3 * step + 1) if arrived is None else arrived
        self._keep(stay, 3 * step + 3)
        self._note(step, GRAD_SLOT=stay, GRAD_FRESH=int(arrived is None))
        return stay

    def home(self, step: int, block: int, stay: Stay) -> None:
        """Gradients of one of the rank's own blocks are added at the end of a step. One a step."""
        assert StepColumn.HOME not in self._steps.get(step, {})
        self._keep(stay, 3 * step + 2)
        self._note(step, HOME_SLOT=stay, HOME=block)

    def receive(self, payload: Payload, block: int, peer: int, step: int, due: int) -> Stay:
        """Post a receive at `step`, wait for it at `due`."""
        moment = _moment(payload)
        stay = self._stay(payload, 3 * step + 2 * moment)
        self._keep(stay, 3 * due + moment)
        self._messages.append(_Message(step, moment, Action.RECEIVE, peer, block, due, stay))
        return stay

    def send(self, stay: Stay | None, payload: Payload, block: int, peer: int, step: int, due: int) -> Stay:
        """Post a send of what lies there (None: of the rank's own rows, packed for it) at `step`, wait at `due`; where
        it lies, for another send of this step that is due later."""
        moment, packed = _moment(payload), stay is None
        stay = self._stay(payload, 3 * step + 2 * moment) if stay is None else stay
        self._keep(stay, 3 * due + moment)
        self._messages.append(_Message(step, moment, Action.SEND, peer, block, due, stay, packed))
        return stay

    def legs(self, count: int) -> Legs:
        """The pass, of `count` steps."""
        self._number()
        steps = np.zeros((count, len(StepColumn)), np.int64)
        steps[:, [StepColumn.SLOT, StepColumn.GRAD_SLOT]] = OWN
        steps[:, StepColumn.HOME_SLOT] = NONE
        steps[:, StepColumn.STRIDES] = 1
        steps[:, [StepColumn.SOURCE, StepColumn.HOME]] = self.ring_rank
        steps[:, StepColumn.READER] = self.ring_rank if self.reader is None else self.reader
        steps[: self._own_step, StepColumn.READER] = NONE  # where nothing else is computed
        for step, noted in self._steps.items():
            if step < self._own_step and StepColumn.SOURCE in noted:
                steps[step, StepColumn.READER] = self.ring_rank
            for column, value in noted.items():
                steps[step, column] = value.slot if isinstance(value, Stay) else value
        table = np.array(list(map(self._row, self._messages)), np.int64).reshape(-1, len(MessageColumn))
        return legs(steps, [table])

    def _row(self, m: _Message) -> list[int]:
        slot = OWN - m.stay.slot if m.packed else m.stay.slot
        rows = int(self.tokens[m.block])
        return [m.step, m.moment, m.action, m.stay.payload, m.peer, m.block, 0, rows, 0, 1, slot, m.due]

    def _note(self, step: int, **values: int | Stay) -> None:
        self._steps.setdefault(step, {}).update({StepColumn[name]: value for name, value in values.items()})

    def _stay(self, payload: Payload, since: int) -> Stay:
        self._stays.append(Stay(payload, since, since))
        return self._stays[-1]

    @staticmethod
    def _keep(stay: Stay, until: int) -> None:
        stay.until = max(stay.until, until)

    def _number(self) -> None:
        """Give every stay the first slot that is free."""
        free: dict[Payload, list[int]] = {}
        for stay in sorted(self._stays, key=lambda stay: (stay.since, stay.until)):
            slots = free.setdefault(stay.payload, [])
            stay.slot = next((i for i, until in enumerate(slots) if until <= stay.since), len(slots))
            slots[stay.slot : stay.slot + 1] = [stay.until]


class Written(BoundRoute):
    """A route whose passes are told by diaries. Backward computes a rank's own rows last: behind them the gradients
    that come home are waited for, and until then nobody holds a sum of its own beside those that travel."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Steps of forward, the same on every rank; 1: nothing travels."""

    @property
    def tail(self) -> int:
        """Steps that backward has more, to wait for gradients that come home last."""
        return 1

    @abstractmethod
    def write(self, ring_rank: int, *, backward: bool) -> Diary:
        """The diary of one rank."""

    def forward(self, ring_rank: int) -> Legs:
        return self.write(ring_rank, backward=False).legs(self.count)

    def backward(self, ring_rank: int) -> Legs:
        return self.write(ring_rank, backward=True).legs(self.count + (self.tail if self.count > 1 else 0))

    def own_step(self, *, backward: bool) -> int:
        """When a rank computes with its own rows."""
        return self.count if backward and self.count > 1 else 0


def _moment(payload: Payload) -> Moment:
    return Moment.BEFORE if payload == Payload.KV else Moment.AFTER
