"""The loss by position: what more context is worth to a model.

    curve = perplexity(model, context, sequences, windows=(512,))
    curve.losses[0]       # nats, with all that comes before, by bucket of positions
    curve.losses[1]       # with the last 256 to 512 tokens alone

If a model uses its context, the first falls with the position and lies below the second. Truncated contexts are
documents of a packed sequence: a pass over those that begin at even multiples of half a window, and one over the odd
ones; each token is counted where it has the most before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ringspun.core.mask import Causal, Documents, Mask
from ringspun.errors import ConfigError
from ringspun.evaluation.exam import Tokens
from ringspun.evaluation.judged import Judged, Logits, asking
from ringspun.train.losses.loss import IGNORED

if TYPE_CHECKING:
    from ringspun.torch import ContextParallel


@dataclass(frozen=True)
class LossByPosition:
    """Mean losses (nats) of tokens by where they stand.

    Args:
        edges: of the buckets, in tokens from the beginning of the sequence. tokens: of each bucket, over all sequences.
        windows: tokens of truncated contexts. losses: of each bucket, with the whole context, then with each window;
            NaN where there is no token.
    """

    edges: tuple[int, ...]
    tokens: tuple[int, ...]
    windows: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.edges[-1]

    @property
    def means(self) -> tuple[float, ...]:
        """The loss over all tokens, with the whole context, then with each window; NaN where that of a token is."""
        weights = np.array(self.tokens)
        there = weights > 0  # a bucket without tokens has no loss; NaN elsewhere is the model's
        return tuple(float(np.array(row)[there] @ weights[there] / weights.sum()) for row in self.losses)

    @property
    def perplexity(self) -> float:
        """The exponential of the loss over all tokens with the whole context."""
        loss = self.means[0]
        return math.exp(min(loss, 700.0)) if math.isfinite(loss) else loss

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; no loss, or one that is not finite, is None."""
        rows = [[_finite(x) for x in row] for row in self.losses]
        return {
            "task": "perplexity",
            "seq_len": self.seq_len,
            "edges": list(self.edges),
            "tokens": list(self.tokens),
            "loss": rows[0],
            "mean_loss": _finite(self.means[0]),
            "perplexity": _finite(self.perplexity),
            "windows": [
                {"tokens": window, "loss": row, "mean_loss": _finite(mean)}
                for window, row, mean in zip(self.windows, rows[1:], self.means[1:], strict=True)
            ],
        }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def perplexity(
    model: nn.Module | Logits | Judged,
    context: ContextParallel,
    sequences: Sequence[Tokens],
    *,
    buckets: int = 8,
    windows: Sequence[int] = (),
) -> LossByPosition:
    """The loss of a model on some sequences, by position. Collective; the same result on every rank.

    Args:
        model, context: as for `retrieval`. sequences: tokens ``[S]`` each, all of one length.
        buckets: equal parts of a sequence. windows: compare with contexts of at most so many tokens (even).
    Raises:
        ConfigError: no sequences, of different lengths, too short; or windows that cannot be.
    """
    lengths = {len(ids) for ids in sequences}
    if len(lengths) != 1:
        raise ConfigError(f"sequences must be some of one length; got {len(sequences)} of {sorted(lengths)} tokens.")
    seq_len = lengths.pop()
    if not 1 <= buckets < seq_len:
        raise ConfigError(f"buckets must be from 1 to less than the {seq_len} tokens of a sequence; got {buckets}.")
    for window in windows:
        if window < 2 or window % 2 or window > seq_len:
            raise ConfigError(f"windows must be even, from 2 to the {seq_len} tokens of a sequence; got {window}.")
    edges = np.linspace(0, seq_len, buckets + 1).round().astype(np.int64)
    judged, counted = Judged.of(model), _Counted(edges, 1 + len(windows))
    with asking(judged):
        for ids in sequences:
            for row, window in enumerate((seq_len, *windows)):
                for passed in _passes(ids, window):
                    passed.count(judged, context, counted, row)
    sums, tokens = context.driver.all_reduce(torch.from_numpy(counted.table)).numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums / tokens
    return LossByPosition(
        tuple(edges.tolist()),
        tuple(int(n) for n in tokens[0]),
        tuple(windows),
        tuple(map(tuple, means.tolist())),
    )


class _Counted:
    """Sums of losses and numbers of tokens, of this process.

    Args:
        edges: of buckets. rows: kinds of context.
    """

    def __init__(self, edges: Tokens, rows: int) -> None:
        self.edges, self.table = edges, np.zeros((2, rows, len(edges) - 1))

    def add(self, row: int, places: Tokens, losses: NDArray[np.float64]) -> None:
        """Losses of tokens at these places."""
        bucket = np.searchsorted(self.edges, places, side="right") - 1
        np.add.at(self.table[0, row], bucket, losses)
        np.add.at(self.table[1, row], bucket, 1)


def _passes(ids: Tokens, window: int) -> Iterator[_Pass]:
    """Passes in which, together, each token but the first is counted once."""
    if window >= len(ids):
        yield _Pass(ids, 0, None, np.arange(len(ids)) > 0)
        return
    half = window // 2
    for start in (0, half):
        place = np.arange(len(ids) - start)
        wanted = place % window >= half
        if start == 0:
            wanted |= (place > 0) & (place < half)  # the beginning has no more
        if wanted.any():
            sizes = [min(window, len(place) - at) for at in range(0, len(place), window)]
            yield _Pass(ids[start:], start, Documents(sizes), wanted)


@dataclass(frozen=True, eq=False)
class _Pass:
    """One pass of a model.

    Args:
        ids: its tokens. start: the place of the first in the whole sequence. documents: truncated contexts.
        wanted: whether a token's own loss is counted.
    """

    ids: Tokens
    start: int
    documents: Documents | None
    wanted: NDArray[np.bool_]

    def count(self, judged: Judged, context: ContextParallel, counted: _Counted, row: int) -> None:
        """Adds the losses of this process's rows."""
        part = context.partition(seq_len=len(self.ids), documents=self.documents)
        mask: Mask = Causal() if self.documents is None else Causal() & self.documents
        plan = part.plan(mask)
        targets = np.append(np.where(self.wanted, self.ids, IGNORED)[1:], IGNORED)
        places = np.arange(1, len(self.ids) + 1) + self.start

        def local(values: Tokens) -> Tensor:
            return part.shard(torch.from_numpy(np.ascontiguousarray(values))[None], dim=1)

        mine = local(targets)
        positions = part.positions(restart=self.documents is not None)[None]
        losses = judged.losses(local(self.ids), plan, positions, mine)
        chosen = mine[0] != IGNORED
        counted.add(row, local(places)[0, chosen].numpy(), losses[0, chosen].double().cpu().numpy())
