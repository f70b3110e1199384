"""Checks: how much of each message is checked on arrival."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ringspun.errors import PlanError


@dataclass(frozen=True)
class Checks:
    """Every message's header and end mark; and of some calls every byte, by a checksum.

    Args:
        every: of how many consecutive calls, forward or backward, one has checksums; 0: none.

    >>> print(Checks.parse("header"), Checks.parse("checksum"), Checks.parse("checksum/16"))
    header checksum checksum/16
    """

    every: int = 0

    @classmethod
    def parse(cls, text: str) -> Checks:
        """What `str` writes: "header", "checksum", or "checksum/N" for one call in N.

        Raises:
            PlanError: anything else.
        """
        found = re.fullmatch(r"(header)|checksum(?:/([1-9][0-9]{0,8}))?", text) if isinstance(text, str) else None
        if found is None:
            raise PlanError(
                f"checks must be 'header', 'checksum' or 'checksum/N' for one call in N, e.g. 'checksum/16'; "
                f"got {text!r}."
            )
        return cls(0 if found[1] else int(found[2] or 1))

    def sums(self, call: int) -> bool:
        """Whether the messages of a call carry checksums: the same on every rank.

        One call of every N; which one changes from N to the next N, for a model calls its layers in a fixed order, and
        some layers would never have their turn.
        """
        if self.every == 0:
            return False
        turn, place = divmod(call, self.every)
        chosen = hashlib.blake2b(turn.to_bytes(8, "little"), digest_size=8).digest()
        return place == int.from_bytes(chosen, "little") % self.every

    def __str__(self) -> str:
        return ("header", "checksum")[self.every] if self.every < 2 else f"checksum/{self.every}"
