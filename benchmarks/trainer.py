"""Whether Hugging Face's Trainer learns the same on rings of 1, 2 and 4 as by itself: losses, gradients, evaluation.

python benchmarks/trainer.py --out benchmarks/results/$(date +%F)-trainer.md      # 5 runs of 30 steps: a minute

The same sequences, weights and steps; float32, AdamW. Micro-batches have unequal targets.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from ringspun.integrations.trainer import RingTrainer
from ringspun.testing.jobs import as_job
from ringspun.testing.pool import PRELOAD, RankPool
from ringspun.train.parallel.meshes import make_mesh

LOSS_BAR, GRADIENT_BAR, SEQ_LEN, ACCUMULATED = 1e-3, 1e-5, 256, 2
TEXT = sorted(Path(json.__file__).parent.glob("*.py"))  # nobody edits it meanwhile
RUNS: dict[str, dict[str, int]] = {
    "ring 1": {},
    "ring 2": {"ring": 2},
    "ring 4": {"ring": 4},
    "2 rings of 2": {"dp_replicate": 2, "ring": 2},
}


@dataclass
class Curve(TrainerCallback):  # type: ignore[misc]
    """What a run came to; as a callback, it keeps the first step's gradients."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.gradients:
            self.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}

    def gradient_difference(self, other: Curve) -> float:
        """The largest, relative to the largest value of the same parameter's gradient."""
        return max(
            float((x - other.gradients[name]).abs().max() / other.gradients[name].abs().max())
            for name, x in self.gradients.items()
        )


def sequences() -> list[list[int]]:
    """The text as bytes, cut."""
    text = b"".join(path.read_bytes() for path in TEXT)
    return [list(text[i : i + SEQ_LEN]) for i in range(0, len(text) - SEQ_LEN, SEQ_LEN)]


def collate(rows: list[list[int]]) -> dict[str, Tensor]:
    """Of the first tokens of each, a number that its bytes say, nothing is learnt."""
    ids = torch.tensor(rows)
    return {"input_ids": ids, "labels": ids.where(torch.arange(SEQ_LEN) >= ids[:, :1] % 128, -100)}


def curve(steps: int, rows: int, sizes: dict[str, int] | None) -> Curve:
    """A run. Collective.

    Args:
        rows: sequences of a rank's micro-batch. sizes: of the mesh; None: Trainer itself.
    """
    torch.manual_seed(0)
    sizes_of_model = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model, found = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes_of_model)), Curve()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, use_cpu=True, remove_unused_columns=False, per_device_train_batch_size=rows, max_steps=steps,
            gradient_accumulation_steps=ACCUMULATED, per_device_eval_batch_size=rows, learning_rate=3e-3,
            warmup_steps=5, max_grad_norm=1.0, train_sampling_strategy="sequential", logging_steps=1,
            eval_strategy="steps", eval_steps=steps // 2, save_strategy="no", report_to=[], disable_tqdm=True,
            log_level="error",
        )  # fmt: skip
        data = sequences()
        given = {"data_collator": collate, "train_dataset": data[8:], "eval_dataset": data[:8], "callbacks": [found]}
        trainer: Any = (
            Trainer(model, args, **given)
            if sizes is None
            else RingTrainer(model, args, **given, mesh=make_mesh(**sizes) if sizes else None)
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    history = trainer.state.log_history
    found.losses = [entry["loss"] for entry in history if "loss" in entry]
    found.norms = [entry["grad_norm"] for entry in history if "grad_norm" in entry]
    found.evaluated = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    return found


def on_rank(ring_rank: int, steps: int, sizes: dict[str, int]) -> Curve:
    """A run on a process of a pool."""
    with as_job():
        return curve(steps, 2 // sizes.get("dp_replicate", 1), sizes)


def on_mesh(steps: int, sizes: dict[str, int]) -> Curve:
    """A run on processes of its own."""
    world = sizes.get("ring", 1) * sizes.get("dp_replicate", 1)
    with RankPool(world, preload=(*PRELOAD, "transformers.trainer")) as pool:
        curves = pool.run(on_rank, steps, sizes, timeout_s=200.0)
    assert all(one.losses == curves[0].losses for one in curves), "ranks log one loss"
    return curves[0]


def report(one: Curve, curves: dict[str, Curve]) -> str:
    """The table, and whether all are within the bars."""
    steps = len(one.losses)
    shown = sorted({1, steps // 4, steps // 2, steps})
    heads = [f"loss at {n}" for n in shown] + [f"evaluated at {steps // 2}", f"at {steps}"]
    heads += ["losses differ by", "evaluations by", "norms by (relative)", "first gradients by (relative)"]
    lines = [f"| run | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    worst = [0.0, 0.0]
    for name, found in {"Trainer, one process": one, **curves}.items():
        pairs = [*zip(found.losses, one.losses, strict=True)]
        loss = max(abs(a - b) for a, b in pairs)
        norm = max(abs(a - b) / b for a, b in zip(found.norms, one.norms, strict=True))
        evaluation = max(abs(a - b) for a, b in zip(found.evaluated, one.evaluated, strict=True))
        gradient = found.gradient_difference(one)
        worst = [max(worst[0], loss, evaluation), max(worst[1], gradient)]
        cells = [f"{found.losses[n - 1]:.5f}" for n in shown] + [f"{x:.5f}" for x in found.evaluated]
        lines.append(
            f"| {name} | {' | '.join([*cells, f'{loss:.1e}', f'{evaluation:.1e}', f'{norm:.1e}', f'{gradient:.1e}'])} |"
        )
    held = "hold" if worst[0] < LOSS_BAR and worst[1] < GRADIENT_BAR else "DO NOT HOLD"
    lines += ["", f"The bars, losses to {LOSS_BAR:g} and first gradients to {GRADIENT_BAR:g}, {held}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    one = curve(given.steps, 2, None)
    table = report(one, {name: on_mesh(given.steps, sizes) for name, sizes in RUNS.items()})
    text = (
        f"# Hugging Face's Trainer on rings\n\n    python benchmarks/trainer.py --steps {given.steps}\n\n"
        f"torch {torch.__version__}, transformers {transformers.__version__}, accelerate {accelerate.__version__}, "
        f"gloo, float32.\nA Llama of 2 layers, width 64, on the bytes of Python's json package: sequences of {SEQ_LEN} "
        f"tokens, 2 a micro-batch, {ACCUMULATED}\nmicro-batches a step; of each sequence's first 0 to 127 tokens "
        f"nothing is learnt. AdamW, clipped at 1. Evaluation: 8 sequences,\n2 a batch.\n\n{table}\n"
    )
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
