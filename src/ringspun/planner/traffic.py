"""Bytes that one device sends for one layer, by what shares the layer out."""

from __future__ import annotations

from ringspun.core.accounting import account
from ringspun.planner.ring import schedules
from ringspun.planner.time import Job, exchange_bytes, exchanges, gather_bytes, gathers


def layer_bytes(job: Job) -> dict[str, float]:
    """Of one layer that sees all keys, forward and backward, by name: the ring's from its schedule's account (the
    busiest rank), the others' by their formulas; once more for what is computed again.

    Source of the others: arXiv 2405.07719 table 2.
    """
    split, model = job.split, job.model
    passes = exchanges(job.checkpointing)
    return {
        "ring": _ring_bytes(job) if split.ring > 1 else 0.0,
        "ulysses": passes * exchange_bytes(model, job.tokens, split) * (split.ulysses - 1) / split.ulysses,
        "tp": gathers(job.checkpointing) * gather_bytes(model, job.tokens, split) * (split.tp - 1) / split.tp,
    }


def _ring_bytes(job: Job) -> float:
    ranks = schedules(job.split.ring, job.layout, job.route, job.mask, job.seq_len)
    forward, backward = (
        max(account(s.backward if b else s.forward, job.work.wire, backward=b).total_sent_bytes for s in ranks)
        for b in (False, True)
    )
    return float(forward * (2 if job.checkpointing == "layer" else 1) + backward)
