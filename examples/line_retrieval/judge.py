"""Judges a run: the checkpoint of its first stage and that of its last, on the same documents, against the bars.

    python examples/line_retrieval/judge.py                                     # recipe.toml
    python examples/line_retrieval/judge.py examples/line_retrieval/full_length.toml

Writes lines.json, lines.png (the last stage) and lines.html (all) into the run's folder and prints a table; ends with 1
where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import recipe
import torch.distributed as dist
from safetensors.torch import load_file

from ringspun.evaluation.exam import Exam, Question, joined
from ringspun.evaluation.heatmap import heatmap
from ringspun.evaluation.lines import lines
from ringspun.evaluation.retrieval import Grid, retrieval
from ringspun.pictures.save import save
from ringspun.torch import ContextParallel
from ringspun.train.config import TrainConfig, load_config
from ringspun.train.launch import start_ranks
from ringspun.train.output import CHECKPOINTS
from ringspun.train.reporting.log import records

FIRST, TURNED, LAST = "first stage", "first stage, rotations of the last", "last stage"
LINES, AMONG_TEXT = "lines", "lines among text"
Grids = dict[str, dict[str, Grid]]
"""By checkpoint, then by kind of document."""


@dataclass(frozen=True)
class Asked:
    """`documents` of each length and kind, the same for every checkpoint, and so many questions about each."""

    seq_lens: tuple[int, ...] = (512, 2048, 8192, 16384)
    documents: int = 5
    questions: int = 50
    seed: int = 1234


@dataclass(frozen=True)
class Bars:
    """What a run must show at `seq_len` bytes, the longest asked about, on documents of nothing but lines."""

    seq_len: int
    questions: int = 250
    accuracy: float = 0.95
    each_depth: float = 0.85
    gain: float = 0.15  # over the checkpoint of the first stage
    minutes: float = 30.0  # of training

    def judge(self, grids: Grids, minutes: float) -> dict[str, tuple[float, bool]]:
        """What was reached, and whether that is enough; the gain only where there is a first stage."""
        last = grids[LAST][LINES]
        accuracy, worst = last.accuracy(self.seq_len), min(last.by_depth(self.seq_len))
        asked = last.counts(self.seq_len)[1]
        found = {
            f"questions, at least {self.questions}": (float(asked), asked >= self.questions),
            f"exact at {self.seq_len}, at least {self.accuracy}": (accuracy, accuracy >= self.accuracy),
            f"in every depth, at least {self.each_depth}": (worst, worst >= self.each_depth),
            f"minutes of training, at most {self.minutes}": (minutes, minutes <= self.minutes),
        }
        if FIRST in grids:
            gain = accuracy - grids[FIRST][LINES].accuracy(self.seq_len)
            found[f"over the first stage, at least {self.gain}"] = (gain, gain >= self.gain)
        return found


def lines_among_text(seq_len: int, *, questions: int, depths: int, seed: Sequence[int], first: int = 0) -> Exam:
    """As `lines`, but half of the document is text that was held out from training, in spans between lines."""
    exam = lines(seq_len // 2, questions=questions, depths=depths, seed=seed, first=first)
    rng = np.random.default_rng(seed)
    text, count = recipe.library()[1], len(exam.document) // recipe.SLOT
    spans = max(1, count // 16)
    places = np.sort(rng.choice(count + 1, spans, replace=False))  # the line ahead of which a span stands
    size = (seq_len - exam.seq_len) // spans
    begins = rng.integers(0, len(text) - size, spans)
    rows, parts, last = exam.document.reshape(count, recipe.SLOT), [], 0
    for place, begin in zip(places.tolist(), begins.tolist(), strict=True):
        parts += [rows[last:place].reshape(-1), text[begin : begin + size]]
        last = place
    document = joined([*parts, rows[last:].reshape(-1)])
    starts = np.arange(count) * recipe.SLOT + size * np.searchsorted(places, np.arange(count), side="right")
    asked = [(question, int(starts[int(question.depth * count)])) for question in exam.questions]
    return Exam(document, tuple(Question(q.ids, q.answer, start / len(document)) for q, start in asked))


def retrieved(config: TrainConfig, context: ContextParallel, asked: Asked) -> Grids:
    """Asks each checkpoint that is compared. Collective."""
    kinds = {LINES: lines, AMONG_TEXT: lines_among_text}
    of_run = {"documents": asked.documents, "questions": asked.questions, "seed": asked.seed}
    grids: Grids = {}
    for name, model in models(config):
        with recipe.autocast(config):
            grids[name] = {
                kind: retrieval(recipe.judged(model), context, make, seq_lens=asked.seq_lens, task=kind, **of_run)
                for kind, make in kinds.items()
            }
    return grids


def models(config: TrainConfig) -> Iterator[tuple[str, recipe.LineModel]]:
    """The models that are compared, by name."""
    first, last = config.legs[0], config.legs[-1]
    if first is not last:
        yield FIRST, loaded(first.config, config.output)
        yield TURNED, loaded(first.config.model_copy(update={"rope": last.config.rope}), config.output)
    yield LAST, loaded(last.config, config.output)


def loaded(config: TrainConfig, run: Path) -> recipe.LineModel:
    """The model at the end of a stage."""
    model = recipe.build_model(config)
    model.load_state_dict(load_file(run / CHECKPOINTS / f"step-{config.steps:06d}" / "model" / "model.safetensors"))
    return model


def on_rank(config: TrainConfig, asked: Asked) -> Grids:
    """One rank's part of `retrieved`."""
    dist.init_process_group("gloo")
    try:
        return retrieved(config, ContextParallel(), asked)
    finally:
        dist.destroy_process_group()


def training_minutes(run: Path) -> float:
    """Of all steps in the log."""
    return sum(record["seconds"] for record in records(run / "log.jsonl") if "seconds" in record) / 60


def shown(grids: Grids, verdict: dict[str, tuple[float, bool]]) -> str:
    """The table of accuracies, and the bars."""
    rows = [f"{'exact answers, %':52}" + "".join(f"{n:>8}" for n in grids[LAST][LINES].seq_lens)]
    for name, kinds in grids.items():
        for kind, grid in kinds.items():
            values = "".join(f"{100 * grid.accuracy(n):8.1f}" for n in grid.seq_lens)
            rows.append(f"{name + ': ' + kind:52}{values}")
    bars = [f"{'held' if held else 'MISSED':8}{value:8.3f}  {words}" for words, (value, held) in verdict.items()]
    return "\n".join([*rows, "", *bars])


def as_dict(grids: Grids, verdict: dict[str, tuple[float, bool]], asked: Asked) -> dict[str, Any]:
    """Plain data for JSON."""
    return {
        "asked": asdict(asked),
        "bars": {words: {"value": value, "held": held} for words, (value, held) in verdict.items()},
        "checkpoints": {name: {kind: g.as_dict() for kind, g in kinds.items()} for name, kinds in grids.items()},
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = Path(__file__).with_name("recipe.toml")
    parser.add_argument("config", type=Path, nargs="?", default=beside, help="config of the run that is judged")
    parser.add_argument("--output", type=Path, help="the run's folder, where it is not the config's")
    parser.add_argument("--ranks", type=int, default=2, help="processes that share each document")
    parser.add_argument(
        "--seq-lens", type=int, nargs="+", default=Asked.seq_lens, help="bytes; bars are of the longest"
    )
    parser.add_argument("--documents", type=int, default=Asked.documents, help="of each length and kind")
    given = parser.parse_args()
    config = load_config(given.config, output=given.output)
    asked = Asked(tuple(sorted(given.seq_lens)), given.documents)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // given.ranks)))
    grids = start_ranks(given.ranks, on_rank, config, asked, logs=config.output)[0]
    verdict = Bars(asked.seq_lens[-1]).judge(grids, training_minutes(config.output))
    (config.output / "lines.json").write_text(json.dumps(as_dict(grids, verdict, asked), indent=1))
    figures = [heatmap(grid, model=name) for name, kinds in reversed(grids.items()) for grid in kinds.values()]
    save(figures[:1], config.output / "lines.png")
    save(figures, config.output / "lines.html")
    print(shown(grids, verdict))
    return 0 if all(held for _, held in verdict.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
