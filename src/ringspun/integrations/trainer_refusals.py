"""What of Trainer and Accelerate cannot be honoured on a ring, all of it told at once, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ringspun.errors import UnsupportedByRing


@dataclass(frozen=True)
class Setting:
    """One argument, what it may be, and why it may be nothing else. Versions without it have nothing to refuse."""

    name: str
    allowed: tuple[Any, ...]
    why: str

    def refused(self, given: Any) -> str | None:
        """Why what is given cannot be honoured, if so."""
        value = getattr(given, self.name, self.allowed[0])
        if value in self.allowed:
            return None
        wanted = " or ".join(map(repr, self.allowed[:2]))
        return f"{self.name} must be {wanted}; got {_brief(value)}. {self.why}"


_OWN_LOADER = "Sequences are dealt out by this package's loader."
ARGUMENTS = (
    Setting("remove_unused_columns", (False,), "Collators read columns that the model's forward does not name."),
    Setting("train_sampling_strategy", ("random", "sequential"), "Each rank would deal rows out by itself."),
    Setting("group_by_length", (False,), "Each rank would deal rows out by itself."),
    Setting("average_tokens_across_devices", (True,), "The mean is over the targets of all ranks."),
    Setting("label_smoothing_factor", (0,), "Labels would be shifted inside of a shard."),
    Setting("label_names", (None, ["labels"]), "Batches have labels."),
    Setting("neftune_noise_alpha", (None, 0), "Its noise grows as a shard is shorter than the sequence."),
    Setting("use_liger_kernel", (False,), "Its loss shifts labels inside of a shard."),
    Setting("use_cache", (False,), "A ring has no cache."),
    Setting("predict_with_generate", (False,), "A ring generates no tokens."),
    Setting("include_for_metrics", ([],), "No rank holds a sequence's logits: evaluate gives the loss."),
    Setting("batch_eval_metrics", (False,), "No rank holds a sequence's logits: evaluate gives the loss."),
    Setting("include_num_input_tokens_seen", ("no", "all", False, True), "A shard's padding is not told apart."),
    Setting("auto_find_batch_size", (False,), "A rank that runs out of memory would begin anew alone."),
    Setting("torch_compile", (False,), "A compiled Trainer was not tried on a ring: compile the model yourself."),
    Setting("fp16", (False,), "Use bf16=True, or float32."),
    Setting("fp16_full_eval", (False,), "Use bf16=True, or float32."),
    Setting("deepspeed", (None, ""), "Its engine sums gradients in a way that is not known."),
    Setting(
        "fsdp",
        (None, "", [], False),
        "Trainer's FSDP was not tried: ringspun.train.parallel.wrapping, in your own loop.",
    ),
    Setting("parallelism_config", (None,), "Accelerate would share sequences out too. Give mesh= instead."),
)
TRAINER = (
    Setting("compute_metrics", (None,), "No rank holds a sequence's logits: evaluate gives the loss."),
    Setting("preprocess_logits_for_metrics", (None,), "No rank holds a sequence's logits."),
    Setting("compute_loss_func", (None,), "It would get a shard's labels, to be shifted: override share_of_loss."),
)
LOADERS = (
    Setting("split_batches", (False,), _OWN_LOADER),
    Setting("dispatch_batches", (None, False), _OWN_LOADER),
)
KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")
PARALLEL = ("cp_size", "sp_size", "tp_size", "dp_shard_size", "dp_replicate_size")


def check_trainer(trainer: Any) -> None:
    """Refuses a Trainer, made already, whose settings a ring would not honour.

    Raises:
        UnsupportedByRing: naming all of them.
    """
    args = trainer.args
    found = [*_refused(ARGUMENTS, args), *_refused(TRAINER, trainer)]
    found += _refused(LOADERS, getattr(args, "accelerator_config", None))
    if "lomo" in str(getattr(args, "optim", "")).lower():
        found.append(f"optim must not step inside of backward; got {args.optim}. Each rank would step by its share.")
    if args.n_gpu > 1:
        found.append(f"n_gpu must be at most 1 a process; got {args.n_gpu}. Start the ranks by torchrun.")
    if not found:
        found += of_accelerator(trainer.accelerator)
    _raise(found)


def check_accelerator(accelerator: Any) -> None:
    """Refuses an `Accelerator` whose settings a ring would not honour.

    Raises:
        UnsupportedByRing: naming all of them.
    """
    _raise([*of_accelerator(accelerator)])


def of_accelerator(accelerator: Any) -> Iterator[str]:
    """What of it cannot be honoured; some comes from the environment, as `accelerate launch` sets it."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in KINDS:
        yield f"distributed_type must be {', '.join(KINDS)}; got {kind}. Models are bare or in DDP."
    if accelerator.mixed_precision not in ("no", "bf16"):
        yield f"mixed_precision must be 'no' or 'bf16'; got {accelerator.mixed_precision!r}."
    config = getattr(accelerator, "parallelism_config", None)
    sizes = {name: getattr(config, name, 1) or 1 for name in PARALLEL}
    if shared := {name: size for name, size in sizes.items() if size > 1}:
        yield (
            f"parallelism_config must be None; got {shared}. Accelerate's context parallelism and this ring would both "
            "cut the sequence. Give mesh= instead."
        )
    if accelerator.gradient_accumulation_steps != 1:
        yield (
            f"gradient_accumulation_steps must be 1; got {accelerator.gradient_accumulation_steps}. Accelerate would "
            "divide losses by it that are over the targets of all micro-batches. Give backward their list."
        )


def _refused(settings: tuple[Setting, ...], given: Any) -> Iterator[str]:
    for setting in settings if given is not None else ():
        if (why := setting.refused(given)) is not None:
            yield why


def _raise(found: list[str]) -> None:
    if len(found) > 1:
        raise UnsupportedByRing("settings must be those that a ring can honour; got:\n  " + "\n  ".join(found))
    if found:
        raise UnsupportedByRing(found[0])


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
