"""Hugging Face's Trainer on rings in this process, against Trainer itself, and what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import hf_trainers as hf
import pytest
import torch
from hf_trainers import S
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from ringspun.errors import DataError, UnsupportedByRing
from ringspun.integrations.ring import on_ring
from ringspun.integrations.trainer import RingTrainer, RingTrainerMixin
from ringspun.integrations.trainer_refusals import ARGUMENTS, check_accelerator
from ringspun.torch import ContextParallel, Loopback
from ringspun.train.data.collate import Collator
from ringspun.train.data.stream import PackedStream
from ringspun.train.losses.loss import token_loss


@pytest.fixture(scope="module")
def expected() -> hf.Found:
    return hf.alone()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_losses_norms_gradients_and_evaluation_are_those_of_one_process(size: int, expected: hf.Found) -> None:
    """Micro-batches with unequal targets, clipped, SGD: a mean of means or a factor too many would show."""
    found = hf.on_loopback(size)
    found.close_to(expected)
    assert found.flos == expected.flos and found.epochs == expected.epochs


def test_recomputed_layers_and_bfloat16(expected: hf.Found) -> None:
    hf.on_loopback(2, activation_checkpointing=True).close_to(expected)
    narrow = hf.alone(bf16=True)
    hf.on_loopback(2, bf16=True).close_to(narrow, tolerance=0.05)
    assert narrow.losses != expected.losses


@pytest.mark.parametrize("names", ["q", "k", "v"])
def test_adapters_of_some_projections_alone(names: str) -> None:
    """One layer, whose other projections need no gradient: a backward that counts on all of q, k, v would fail."""

    def adapted() -> Any:
        torch.manual_seed(3)
        targets = [f"{name}_proj" for name in names]
        return get_peft_model(hf.build(layers=1), LoraConfig(r=4, target_modules=targets, init_lora_weights=False))

    found = hf.on_loopback(2, model=adapted(), max_steps=1)
    found.close_to(hf.alone(model=adapted(), max_steps=1))
    assert len(found.gradients[0]) == 2 * len(names)


def test_adapters_are_saved_alone_and_tokens_of_their_own_refused(tmp_path: Path) -> None:
    model = get_peft_model(hf.build(layers=1), LoraConfig(r=2, target_modules=["q_proj"]))
    trainer = RingTrainer(model, hf.settings(str(tmp_path)), context=ContextParallel(Loopback(2)))
    trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").exists() and not (tmp_path / "model.safetensors").exists()
    prompts = get_peft_model(hf.build(layers=1), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedByRing, match="no tokens of its own; got PromptTuningConfig"):
        on_ring(prompts)


def trained(folder: Path, data: str, *, resume: bool = False, **changes: Any) -> hf.Found:
    """Rows: shuffled, 4 steps an epoch. A stream: packed documents, without end."""
    collate = Collator(S, overflow="error")
    stream = PackedStream([row[: 3 + 2 * i] for i, row in enumerate(hf.ROWS)], collate, epochs=None)
    args = hf.settings(
        str(folder), gradient_accumulation_steps=1, optim="adamw_torch", learning_rate=1e-2,
        train_sampling_strategy="random", **changes,
    )  # fmt: skip
    trainer = RingTrainer(
        hf.build(), args, context=ContextParallel(Loopback(2)), data_collator=hf.collate,
        train_dataset=stream if data == "stream" else hf.ROWS[:4],
    )  # fmt: skip
    return hf.run(trainer, hf.Found(), resume_from_checkpoint=resume or None)


@pytest.mark.parametrize(("data", "saved"), [("rows", 5), ("stream", 1)])
def test_resuming_gives_the_same_bits(data: str, saved: int, tmp_path: Path) -> None:
    """Inside of the second epoch, whose order is another; and of a stream, which has none."""
    straight = trained(tmp_path / "straight", data, max_steps=saved + 2)
    trained(tmp_path / "broken", data, max_steps=saved, save_strategy="steps", save_steps=saved)
    resumed = trained(tmp_path / "broken", data, max_steps=saved + 2, resume=True)
    assert resumed.losses == straight.losses and len(set(straight.losses)) == saved + 2
    assert all(torch.equal(x, straight.weights[name]) for name, x in resumed.weights.items())


def test_a_loss_of_ones_own_and_a_model_of_model_init(tmp_path: Path, expected: hf.Found) -> None:
    class Mine(RingTrainer):
        def share_of_loss(self, model: Any, inputs: Any, total: float) -> Any:
            given = {name: inputs[name] for name in ("input_ids", "position_ids", "ringspun_plan")}
            outputs = model(**given)
            return token_loss(outputs.logits, inputs["shift_labels"], total_targets=total), outputs

    trainer = Mine(
        args=hf.settings(str(tmp_path)), model_init=lambda: hf.build(), context=ContextParallel(Loopback(2)),
        data_collator=hf.collate, train_dataset=hf.ROWS, eval_dataset=None,
    )  # fmt: skip
    found = hf.run(trainer, hf.Found())
    trainer.eval_dataset = {"five": hf.ROWS[:5], "one": hf.ROWS[:1]}
    metrics = trainer.evaluate()
    found.evaluated, found.evaluated_by_tokens = metrics["eval_five_loss"], metrics["eval_five_token_loss"]
    found.close_to(expected)
    assert metrics["eval_one_loss"] != found.evaluated


def test_a_mixin_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must come before Trainer .* Write class Wrong\(RingTrainerMixin"):
        type("Wrong", (Trainer, RingTrainerMixin), {})


REFUSED = {
    "remove_unused_columns": True,
    "train_sampling_strategy": "group_by_length",
    "average_tokens_across_devices": False,
    "label_smoothing_factor": 0.1,
    "label_names": ["targets"],
    "neftune_noise_alpha": 5.0,
    "use_cache": True,
    "include_for_metrics": ["loss"],
    "auto_find_batch_size": True,
    "include_num_input_tokens_seen": "non_padding",
    "torch_compile": True,
    "optim": "lomo",
    "accelerator_config": {"split_batches": True},
}


def refusal(folder: Path, arguments: dict[str, Any], **given: Any) -> str:
    with pytest.raises(UnsupportedByRing) as raised:
        RingTrainer(hf.build(), hf.settings(str(folder), **arguments), data_collator=hf.collate, **given)
    return str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_a_ring_does_not_honour_is_refused(name: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, {name: REFUSED[name]})
    assert ("split_batches" if name == "accelerator_config" else name) in said and "must" in said and "got" in said


@pytest.mark.parametrize("name", ["compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func"])
def test_a_function_that_would_see_a_shard_is_refused(name: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, {}, **{name: lambda *_, **__: {}}).startswith(f"{name} must be None; got")


def test_all_that_is_refused_is_said_at_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, {"remove_unused_columns": True, "use_cache": True}, compute_metrics=lambda _: {})
    assert [line.split()[0] for line in said.splitlines()[1:]] == [
        "remove_unused_columns", "use_cache", "compute_metrics",
    ]  # fmt: skip


def test_every_refused_argument_has_the_name_that_transformers_gives_it() -> None:
    """One that was renamed would be refused no longer."""
    others = {"group_by_length": "before 5", "predict_with_generate": "of Seq2SeqTrainingArguments"}
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert {setting.name for setting in ARGUMENTS} - known == set(others)


def test_an_accelerator_that_cuts_sequences_too_is_refused() -> None:
    from accelerate import Accelerator, ParallelismConfig

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    with pytest.raises(UnsupportedByRing, match="gradient_accumulation_steps must be 1; got 4"):
        check_accelerator(accelerator)

    @dataclasses.dataclass
    class Other:
        distributed_type: str = "FSDP"
        mixed_precision: str = "fp16"
        gradient_accumulation_steps: int = 1
        parallelism_config: Any = None

    with pytest.raises(UnsupportedByRing, match=r"(?s)got FSDP.*got 'fp16'.*got \{'cp_size': 2\}"):
        check_accelerator(Other(parallelism_config=ParallelismConfig(cp_size=2)))


def test_what_asks_for_logits_or_has_no_labels_is_refused(tmp_path: Path) -> None:
    trainer = RingTrainer(hf.build(), hf.settings(str(tmp_path)), data_collator=lambda rows: {"input_ids": rows})
    with pytest.raises(UnsupportedByRing, match="predict must not be called on a ring"):
        trainer.predict(hf.ROWS)
    with pytest.raises(DataError, match="batch must hold labels; got input_ids"):
        trainer.ring.inputs(trainer.model, {"input_ids": torch.zeros(1, 8, dtype=torch.long)})
    with pytest.raises(DataError, match="rows by index and a length, or be a PackedStream; got generator"):
        trainer.get_eval_dataloader(row for row in hf.ROWS)
