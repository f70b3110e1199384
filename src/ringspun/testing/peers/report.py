"""A comparison as tables in Markdown: one of all rows, then one per row."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ringspun.testing.peers.comparing import Outcome
from ringspun.testing.peers.record import Comparison
from ringspun.testing.peers.rows import Row
from ringspun.testing.timing import paired_ratio

MIB = 1 << 20
NOTES = """\
All peers run the same seeded data with random incoming gradients, in turn in one run, the machine's cores shared among
the ranks. Seconds: median over the rounds, the slowest rank's. Over ours: of forward + backward, the median ratio of
paired rounds. Peak: of a first forward + backward above its inputs, what torch allocates in the calling thread, the
rank that has most; what gloo allocates in its own threads is not seen. Sent: by the rank that sends most; ours by its
driver's count, headers and all, others by the arguments of their collectives. Errors: the largest over the tensor's
largest entry, against dense float64, at the shorter length above, by the same code. A peer that is wrong is not timed
as if right: where its `out` is right, its forward is. Instead of what a peer refuses, the nearest that it can do is
judged and timed, in at most 3 rounds; its errors are then against that. Peers in JAX are one process with as many
devices as others have ranks, handing tensors over included; their memory and messages torch does not see."""


def words_of(row: Row, tokens: int | None = None) -> str:
    """A row as a heading."""
    work = row.work(tokens)
    mask = str(work.mask) if len(str(work.mask)) < 40 else f"causal & {len(str(work.mask).split(','))} documents"
    heads = f"H={row.heads}" if row.heads == row.kv_heads else f"H={row.heads}, K={row.kv_heads}"
    return f"{mask}, S={work.seq_len:,}, R={row.ranks}, {heads}, D={row.head_size}, {row.dtype}"


def markdown(comparison: Comparison) -> str:
    """All of it."""
    one = comparison
    head = [f"{one.machine}; {one.rounds} rounds; errors at S={one.judged_tokens:,}.", "", NOTES, "", *summary(one)]
    parts = [line for row, found in one.rows for line in ("", f"### {words_of(row, one.tokens)}", "", *table(found))]
    return "\n".join([*head, *parts])


def summary(comparison: Comparison) -> list[str]:
    """One line per row: our ring, the fastest other that is right, and the leanest other ring."""
    lines = ["| row | ours, s | fastest right other | its s | over ours | our peak, MiB | leanest other ring, MiB |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row, found in comparison.rows:
        ours = found[0]
        others = [o for o in found if o.both_s and not o.is_ours]
        rival = min(others, key=lambda o: o.median_s, default=None)
        rings = [o.peak_bytes for o in others if o.is_ring and o.peak_bytes is not None]
        name = "" if rival is None else rival.peer + (f", {rival.instead} instead" if rival.instead else "")
        cells = [words_of(row, comparison.tokens), _seconds(ours.both_s), name, _seconds(rival.both_s if rival else ()),
                 _over(rival, ours), _mib(ours.peak_bytes), _mib(min(rings, default=None))]  # fmt: skip
        lines.append(_line(cells))
    return lines


def table(found: Sequence[Outcome]) -> list[str]:
    """One line per peer."""
    titles = ["who", "version", "forward, s", "both, s", "over ours", "peak, MiB", "sent, MiB"]
    titles += ["error of out", "dq", "dk", "dv", "remarks"]
    return [_line(titles), "|---" * len(titles) + "|", *(_line(_cells(o, found[0])) for o in found)]


def remarks(outcome: Outcome) -> str:
    """What came of it, in words, and how it is called."""
    said = [f"refuses: {outcome.refusal}"] if outcome.refusal else []
    if outcome.instead:
        said.append(f"**instead: {outcome.instead}**")
    if outcome.status == "wrong":
        said += [f"**{outcome.words}**", "only its forward is timed" if outcome.forward_s else "not timed"]
    elif outcome.words:
        said.append(f"failed: {outcome.words}" if outcome.status == "failed" else outcome.words)
    said.append(outcome.remark)
    return "; ".join(part for part in said if part)


def _cells(o: Outcome, ours: Outcome) -> list[str]:
    errors = [f"{o.errors[name]:.1e}" if o.errors else "" for name in ("out", "dq", "dk", "dv")]
    sent = "?" if o.both_s and o.sent_bytes is None else _mib(o.sent_bytes)
    figures = [_seconds(o.forward_s), _seconds(o.both_s), _over(o, ours), _mib(o.peak_bytes), sent]
    return [o.peer, o.version or "", *figures, *errors, remarks(o)]


def _over(other: Outcome | None, ours: Outcome) -> str:
    rounds = 0 if other is None else min(len(other.both_s), len(ours.both_s))
    if other is None or not rounds:
        return ""
    return f"{paired_ratio(other.both_s[:rounds], ours.both_s[:rounds]).median:.3f}"


def _seconds(times: Sequence[float]) -> str:
    return f"{median(times):.3f}" if times else ""


def _mib(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / MIB:.2f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
