"""Messages damaged between processes: what the ranks of a pool are asked to do. They import this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from on_ranks import caught
from torch import distributed as dist

from ringspun import Causal, Contiguous
from ringspun.core.route.base import Action
from ringspun.core.wire import HEADER_BYTES
from ringspun.torch import ContextParallel, Gloo
from ringspun.torch.drivers import Transfer

S = 26


def flip_a_bit(whole: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    whole[HEADER_BYTES + 5] ^= 16
    return whole


def swap_words(whole: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    words = whole.view(torch.int64)
    words[[9, 30]] = words[[30, 9]]
    return whole


def cut_short(whole: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return whole[: len(whole) // 2]


def cut_to_nothing(whole: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return whole[:0]


def send_again(whole: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return before


DAMAGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    f.__name__: f for f in (flip_a_bit, swap_words, cut_short, cut_to_nothing, send_again)
}


class Tampers(Gloo):
    """Sends what a function makes of its `at`-th message and the one before it."""

    def __init__(self, group: dist.ProcessGroup, at: int, damage: str) -> None:
        super().__init__(group, timeout_s=15.0)
        self._at, self._damage, self._sent = at, DAMAGES[damage], 0
        self._last = torch.empty(0, dtype=torch.uint8)

    def _post(self, transfers: list[Transfer]):
        return super()._post([self._tampered(t) if t.action == Action.SEND else t for t in transfers])

    def _tampered(self, sent: Transfer) -> Transfer:
        mine, before, self._last = self._sent, self._last, sent.buffer.clone()
        self._sent += 1
        if mine != self._at:
            return sent
        self._timeout = timedelta(seconds=0.5)  # the other rank will not come to what follows
        return replace(sent, buffer=self._damage(sent.buffer.clone(), before))


def send_damaged(rank: int, odd: int, at: int, damage: str, checks: str, backward: Any) -> tuple[str, str, str]:
    """Rank `odd` of a fresh group damages its `at`-th message; what two rounds raise here, and what the next call."""
    group = dist.new_group(list(range(dist.get_world_size())))
    driver = Tampers(group, at if rank == odd else -1, damage)
    plan = ContextParallel(driver, layout=Contiguous(), checks=checks, backward=backward).plan(S, Causal())
    x = [torch.randn(1, 2, plan.partition.local_tokens, 8, requires_grad=True) for _ in range(3)]

    def rounds() -> None:
        for _ in range(2):
            torch.autograd.grad(plan.attention(*x).square().sum(), x)

    return *caught(rounds), caught(rounds)[0]


def disagree_on_checks(rank: int) -> tuple[str, str]:
    """Every rank its own idea of what is checked."""
    checks = ("header", "checksum", "checksum/16")[rank]
    return caught(lambda: ContextParallel(dist.group.WORLD, checks=checks, timeout_s=5.0).plan(S, Causal()))
