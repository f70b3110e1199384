"""Where an error sits and how it looks: a hint for whoever has to find it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ringspun.testing.problem import Owners

BY_KEY = ("dk", "dv")
FEW = 3
"""Fewer wrong numbers than this show no pattern: a factor fits any one of them."""


@dataclass(frozen=True)
class Finding:
    """One wrong tensor of one case.

    Args:
        case: its name. tensor: which. error, bar: of the comparison. where: heads, batch rows, tokens and ring ranks.
        looks: what kind of mistake the numbers look like.
    """

    case: str
    tensor: str
    error: float
    bar: float
    where: str
    looks: str

    def __str__(self) -> str:
        at = f", {self.where}" if self.where else ""
        return f"{self.tensor}{at}: {self.looks} (error {self.error:.1e}, bar {self.bar:.1e})"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def diagnose(
    tensor: str, found: np.ndarray, right: np.ndarray, bar: float, owners: Owners | None = None
) -> tuple[str, str]:
    """Where `found` is wrong, and how that looks.

    Args:
        tensor: one of `GIVES`. found, right: its values. bar: largest error that is none, relative to
            max(1, max|right|). owners: ring rank of each query and key.
    """
    if found.shape != right.shape:
        return "", f"shape {found.shape} instead of {right.shape}"
    size = max(1.0, float(np.abs(right[np.isfinite(right)]).max(initial=0.0)))
    with np.errstate(invalid="ignore"):
        close = np.abs(found - right) <= bar * size
    wrong = ~(close | (found == right))
    if not wrong.any():
        return "", "spread over all entries, each within reach of the bar"
    if right.ndim < 3:  # dsinks [H], dbias [H] or [N, H]
        where = _span("head", wrong.any(axis=tuple(range(right.ndim - 1))))
        return where or "every head", _looks(found[wrong], right[wrong], tensor)
    by_row = wrong if right.ndim == 3 else wrong.any(-1)  # [B, H, T]
    kind = "kv head" if tensor in BY_KEY else "head"
    rows = by_row.any((0, 1))
    spans = [_span(kind, by_row.any((0, 2))), _span("batch row", by_row.any((1, 2))), _span("row", rows)]
    if owners is not None:
        mine = owners[tensor in BY_KEY]
        spans.append(_ranks(sorted(set(mine[rows].tolist())), len(set(mine.tolist()))))
    moved = _moved(found, right, by_row, bar * size) if right.ndim == 4 else ""
    entries = wrong if right.ndim == 3 else np.broadcast_to(by_row[..., None], right.shape)
    return ", ".join(s for s in spans if s) or "everywhere", moved or _looks(found[entries], right[entries], tensor)


def _span(kind: str, wrong: np.ndarray) -> str:
    """Which of a kind are wrong; nothing where all are."""
    at, total = np.flatnonzero(wrong), len(wrong)
    if len(at) == total:
        return ""
    if len(at) == 1:
        return f"{kind} {at[0]} of {total}"
    whole = at[-1] - at[0] + 1 == len(at)
    return (
        f"{kind}s {at[0]} to {at[-1]} of {total}" if whole else f"{len(at)} {kind}s from {at[0]} to {at[-1]} of {total}"
    )


def _ranks(ranks: list[int], total: int) -> str:
    if len(ranks) == total:
        return ""
    return f"ring rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _moved(found: np.ndarray, right: np.ndarray, wrong: np.ndarray, bar: float) -> str:
    """Whether the wrong rows of one head hold other rows of the answer: blocks swapped, a layout not undone."""
    b, h = (int(x[0]) for x in np.nonzero(wrong.any(-1)))
    rows = np.flatnonzero(wrong[b, h])
    x, y = found[b, h, rows], right[b, h]
    if len(rows) < 2 or not np.isfinite(x).all():
        return ""
    distance = np.abs(x[:, None] - y[None, :]).max(-1)  # [wrong rows, all rows]
    source = distance.argmin(1)
    same = (distance.min(1) <= 2 * bar) & (source != rows) & (np.abs(x).max(-1) > 2 * bar)
    if same.sum() < max(2, len(rows) // 2):
        return ""
    i = int(np.flatnonzero(same)[0])
    return f"rows hold the results of others: row {rows[i]} that of row {source[i]}"


def _looks(x: np.ndarray, y: np.ndarray, tensor: str) -> str:
    """What the wrong numbers `x` have in common, seen beside the right ones."""
    if np.isnan(x).any():
        return "NaN"
    if np.isinf(x).any() or np.isinf(y).any():
        return "infinite in the wrong places" if np.isinf(x).any() else "a number where it must be -inf"
    if not x.any():
        return "zero"
    if not y.any():
        return "not zero where it must be"
    difference = x - y
    worst = float(np.abs(difference).max())
    if len(x) >= FEW:
        factor = float((x * y).sum() / (y * y).sum())
        if np.abs(x - factor * y).max() <= 0.02 * worst:
            shown = f"1{factor - 1:+.1e}" if abs(factor - 1) < 1e-4 else f"{factor:.6g}"
            return f"{shown} times the right value{_known(factor)}"
        if np.abs(difference - difference.mean()).max() <= 0.02 * worst:
            return f"off by {difference.mean():+.6g} throughout"
    if tensor == "lse" and (difference < 0).all():
        return "too small throughout: keys are missing"
    if tensor == "lse" and (difference > 0).all():
        return "too large throughout: keys that must not be seen, or counted twice"
    return "no simple pattern"


def _known(factor: float) -> str:
    """Factors with a name."""
    names = {1 / np.log(2): "base 2 instead of e", np.log(2): "base 2 instead of e", 2.0: "counted twice", -1.0: "sign"}
    return next((f" ({name}?)" for known, name in names.items() if abs(factor / known - 1) < 1e-4), "")
