"""Small trainings by Hugging Face's Trainer: in one process, on a loopback, on processes. Started ones import this."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from ringspun.errors import RingspunError
from ringspun.integrations.trainer import RingTrainer
from ringspun.testing.jobs import as_job
from ringspun.torch import ContextParallel, Loopback
from ringspun.train.parallel.meshes import make_mesh

S, VOCAB = 23, 61
ROWS = [torch.randint(0, VOCAB, (S,), generator=torch.manual_seed(i)).tolist() for i in range(7)]


def build(layers: int = 2) -> Any:
    """A Llama whose scores are far from uniform, the same each time."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=layers, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model


def collate(rows: list[list[int]]) -> dict[str, Tensor]:
    """Whole rows, with prompts of different lengths, of which nothing is learnt: means of means would be others."""
    ids = torch.tensor(rows)
    labels = ids.clone()
    for label, row in zip(labels, rows, strict=True):
        label[: row[0] % 20] = -100
    return {"input_ids": ids, "labels": labels}


def settings(folder: str, **changes: Any) -> TrainingArguments:
    """SGD, for Adam hides a wrong scale; clipped always."""
    values: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(output_dir=folder, **values | changes)


@dataclass
class Found(TrainerCallback):  # type: ignore[misc]
    """What a training came to; as a callback, it keeps every step's gradients."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    evaluated: float = 0.0
    evaluated_by_tokens: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    flos: float = 0.0
    epochs: list[float] = field(default_factory=list)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        named = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
        self.gradients.append({name: grad.clone() for name, grad in named if grad is not None})

    def close_to(self, expected: Found, *, tolerance: float = 1e-5) -> None:
        """Losses, norms and every gradient, relative to the largest of its kind."""
        assert self.losses and len(self.losses) == len(expected.losses) == len(self.gradients)
        for mine, theirs in ((self.losses, expected.losses), (self.norms, expected.norms)):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=tolerance, atol=0)
        assert abs(self.evaluated_by_tokens - expected.evaluated_by_tokens) <= tolerance * expected.evaluated_by_tokens
        if self.evaluated:  # by Trainer, as a mean of batches' means
            assert abs(self.evaluated - expected.evaluated) <= tolerance * expected.evaluated
        for mine, theirs in zip(self.gradients, expected.gradients, strict=True):
            assert mine.keys() == theirs.keys() and mine
            for name, grad in theirs.items():
                assert float((mine[name] - grad).abs().max()) <= tolerance * float(grad.abs().max()), name


def run(trainer: Any, found: Found, **how: Any) -> Found:
    """Trains, evaluates; everything that is compared."""
    trainer.add_callback(found)
    trainer.train(**how)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    found.losses = [entry["loss"] for entry in steps]
    found.norms = [entry["grad_norm"] for entry in steps]
    found.epochs = [entry["epoch"] for entry in steps]
    metrics = trainer.evaluate() if trainer.eval_dataset is not None else {}
    found.evaluated = metrics.get("eval_loss", 0.0)
    found.evaluated_by_tokens = metrics.get("eval_token_loss", 0.0)
    found.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    found.flos = trainer.state.total_flos
    return found


def alone(*, model: Any = None, folder: str | None = None, evaluated: int = 5, **changes: Any) -> Found:
    """By Transformers' own Trainer, in one process, the model by its own attention."""
    with tempfile.TemporaryDirectory() as temporary:
        trainer = Trainer(
            model or build(), settings(folder or temporary, **changes), data_collator=collate, train_dataset=ROWS
        )
        trainer.eval_dataset = ROWS[:evaluated]
        found = run(trainer, Found())
    whole, targets = 0.0, 0
    for row in ROWS[:evaluated]:
        batch = collate([row])
        count = int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            whole += count * float(trainer.model(**batch).loss)
        targets += count
    found.evaluated_by_tokens = whole / targets
    assert abs(found.evaluated_by_tokens - found.evaluated) > 1e-3  # else they need not be told apart
    return found


def on_loopback(size: int, *, model: Any = None, **changes: Any) -> Found:
    """On a ring in this process."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = RingTrainer(
            model or build(),
            settings(folder, **changes),
            context=ContextParallel(Loopback(size)),
            data_collator=collate,
            train_dataset=ROWS,
            eval_dataset=ROWS[:5],
        )
        return run(trainer, Found())


def on_ranks(ring_rank: int, sizes: dict[str, int], **changes: Any) -> Found:
    """On a mesh of processes."""
    with as_job(), tempfile.TemporaryDirectory() as folder:
        trainer = RingTrainer(
            build(),
            settings(folder, per_device_eval_batch_size=2 // sizes.get("dp_replicate", 1), **changes),
            mesh=make_mesh(**sizes),
            data_collator=collate,
            train_dataset=ROWS,
            eval_dataset=ROWS[:5],
        )
        trainer.evaluate()  # before anything is trained: Accelerate then takes the model for prepared
        return run(trainer, Found())


def interrupted(ring_rank: int, folder: str) -> tuple[Found, Found]:
    """Four steps, and the same with an end after two."""
    with as_job(), tempfile.TemporaryDirectory() as other:

        def trained(where: str, steps: int, *, resume: bool = False) -> Found:
            args = settings(where, max_steps=steps, save_strategy="steps", save_steps=2, optim="adamw_torch")
            trainer = RingTrainer(build(), args, data_collator=collate, train_dataset=ROWS)
            return run(trainer, Found(), resume_from_checkpoint=resume or None)

        straight = trained(other, 4)
        trained(folder, 2)
        return straight, trained(folder, 4, resume=True)


def unlike(ring_rank: int) -> tuple[str, str]:
    """What training says where each rank has other rows."""
    with as_job(), tempfile.TemporaryDirectory() as folder:
        trainer = RingTrainer(build(), settings(folder), data_collator=collate, train_dataset=ROWS[ring_rank:])
        try:
            trainer.train()
        except RingspunError as problem:
            return type(problem).__name__, str(problem)
    return "nothing", ""
