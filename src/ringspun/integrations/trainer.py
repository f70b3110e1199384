"""Hugging Face's `Trainer` on a ring, by its public hooks.

    trainer = RingTrainer(model, args, data_collator=Collator(4096, overflow="split"), train_dataset=documents)
    trainer.train()                                         # started by torchrun: all ranks are one ring

What Trainer does on D data-parallel ranks is right on a ring but for these, which are replaced:

| hook | Trainer's | on a ring |
|---|---|---|
| `get_train_dataloader`, `get_eval_dataloader` | other rows for every rank | the same for all ranks of a ring |
| `get_batch_samples` | counts targets of whole sequences | cuts the micro-batches of a step, counts each target once |
| `compute_loss` | the loss times the ranks | a share of the mean, times what DDP divides by |
| `training_step` | the rank's own number | the whole's, the same on all ranks |
| `prediction_step` | of the rank's rows | of the batch of all rings, the same on all ranks |
| `evaluation_loop` | a mean of batches' means, `eval_loss` | the same; and `eval_token_loss`, over all targets |
| `get_cp_size` | Accelerate's | ranks that hold one sequence, for batch sizes and rates |

DDP, clipping, schedules, logging, checkpoints (written by rank 0), resuming and callbacks are Trainer's own. Read for
this: Transformers 5.24.0 and Accelerate 1.15.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from ringspun.errors import MissingExtra, UnsupportedByRing
from ringspun.integrations.loaders import RingLoader
from ringspun.integrations.ring import RingBatches, on_ring
from ringspun.integrations.trainer_refusals import check_trainer

try:
    from transformers import Trainer
except ImportError as problem:
    raise MissingExtra(
        "Trainer must find transformers and accelerate; install them: pip install 'ringspun[trainer]'."
    ) from problem

if TYPE_CHECKING:
    from ringspun.torch import ContextParallel
    from ringspun.train.data.collate import MaskRule
    from ringspun.train.parallel.meshes import JobMesh

__all__ = ["RingTrainer", "RingTrainerMixin"]

Inputs = dict[str, Any]


class RingTrainerMixin:
    """What makes a ring of a Trainer; for a subclass of your own: ``class Mine(RingTrainerMixin, MyTrainer)``.

    Args:
        context: this rank's ring; default: that of the mesh, or of all ranks. mesh: of
            `ringspun.train.parallel.meshes.make_mesh`, where several rings read different sequences. mask: what the
            full layers see within a document (default: causal).
        args, kwargs: of the Trainer. Its model is prepared, if it was not; its `data_collator` makes whole sequences:
            see `RingBatches.inputs`. Data sets: rows by index, or a `PackedStream`.
    Raises:
        UnsupportedByRing: settings that would not be honoured; all of them at once. PlanError: ranks without a ring.
    """

    loss_is_scaled_for_ga = True  # by the targets of all micro-batches

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(RingTrainerMixin):
            raise TypeError(
                f"RingTrainerMixin must come before Trainer among the bases of {cls.__name__}; it comes after, and "
                f"would do nothing. Write class {cls.__name__}(RingTrainerMixin, ...)."
            )

    def __init__(
        self,
        *args: Any,
        context: ContextParallel | None = None,
        mesh: JobMesh | None = None,
        mask: MaskRule | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        me: Any = self
        check_trainer(self)
        on_ring(me.model)
        me.model_accepts_loss_kwargs = True  # how Transformers 5.0 asks for what is said above
        self.ring = RingBatches(context, mesh=mesh, mask=mask)
        self._evaluated: list[tuple[float, float]] = []

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; of a model that was evaluated before, too.

        Accelerate 1.15 marks a model that it prepared for evaluation as prepared, and then never wraps it in DDP.
        """
        above: Any = super()
        me: Any = self
        vars(me.model).pop("_is_accelerate_prepared", None)
        return above.train(*args, **kwargs)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The model of `model_init`, prepared."""
        above: Any = super()
        return on_ring(above.call_model_init(trial))

    def get_train_dataloader(self) -> RingLoader:
        """Whole sequences, the same for all ranks of a ring; the order of an epoch is a function of `data_seed` (or
        `seed`) and its number."""
        me: Any = self
        if me.train_dataset is None:
            raise ValueError("train_dataset must be given to train; got None.")
        args = me.args
        return self._loader(
            me.train_dataset,
            batch_size=args.train_batch_size,
            shuffle=getattr(args, "train_sampling_strategy", "random") == "random",
            seed=args.seed if args.data_seed is None else args.data_seed,
            persistent_workers=args.dataloader_persistent_workers,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> RingLoader:
        """The same in the data's own order."""
        me: Any = self
        data = me.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = me.eval_dataset[data]
        if data is None:
            raise ValueError("eval_dataset must be given to evaluate; got None.")
        return self._loader(data, batch_size=me.args.eval_batch_size)

    def _loader(self, data: Any, **options: Any) -> RingLoader:
        me: Any = self
        args = me.args
        return self.ring.loader(
            data,
            me.data_collator,
            drop_last=args.dataloader_drop_last,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            prefetch_factor=args.dataloader_prefetch_factor,
            **options,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Mapping[str, Any]], num_batches: int, device: Any
    ) -> tuple[list[Inputs], float | None]:
        """The shards and plans of the next micro-batches, and the targets of all ranks in all of them. Collective."""
        me: Any = self
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        inputs = [self.ring.inputs(me.model, batch) for batch in batches]
        return inputs, self.ring.mean.count(inputs).total if inputs else None

    def share_of_loss(self, model: nn.Module, inputs: Mapping[str, Any], total: float) -> tuple[Tensor, Any]:
        """This rank's share of the mean loss, and the model's outputs; to be overridden for a loss of your own.

        Args:
            inputs: this rank's shard, with `shift_labels` and the plans. total: targets that the mean is over.
        """
        return self.ring.share(model, inputs, total)

    def compute_loss(
        self, model: nn.Module, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The share, times what the wrapper divides gradients by: `ringspun.train.parallel.scaling.gradient_scale`."""
        if num_items_in_batch is None:
            raise UnsupportedByRing("num_items_in_batch must be the targets of all ranks; got None.")
        share, outputs = self.share_of_loss(model, inputs, float(num_items_in_batch))
        loss = share * self.ring.scale(model)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        """Backward of a micro-batch; its part of the step's mean loss, the same on every rank. Collective.

        What Trainer logs, and filters where it is not finite, is then the whole's loss on every rank.
        """
        above: Any = super()
        share: Tensor = above.training_step(model, inputs, num_items_in_batch)
        return self.ring.mean.whole(share / self.ring.scale(model))

    def prediction_step(
        self, model: nn.Module, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        """The mean loss of one batch of all rings, the same on every rank. Collective."""
        me: Any = self
        local = self.ring.inputs(me.model, inputs)
        total = self.ring.mean.count([local]).total
        with torch.no_grad(), me.compute_loss_context_manager():
            share, _ = self.share_of_loss(model, local, total)
        whole = self.ring.mean.whole(share)
        whole = whole if total else torch.full_like(whole, torch.nan)  # 0 / 0, as in one process
        self._evaluated.append((float(whole), total))
        return whole, None, None

    def evaluation_loop(
        self, dataloader: RingLoader, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        """Trainer's, and one metric more: `eval_token_loss`, the mean over all targets, whatever batches they were
        read in. (`eval_loss` is Trainer's: the mean of the batches' means, each weighed by its rows.)"""
        above: Any = super()
        me: Any = self
        self._evaluated = []
        output = above.evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self._evaluated:
            losses, targets = np.array(self._evaluated).T
            rows = np.array([dataloader.rows_in(k) for k in range(len(losses))])
            if me.args.logging_nan_inf_filter and np.isfinite(losses).any():
                rows = rows * np.isfinite(losses)
            output.metrics[f"{metric_key_prefix}_loss"] = float(np.sum(losses * rows, where=rows > 0) / rows.sum())
            summed = np.sum(losses * targets, where=targets > 0)
            output.metrics[f"{metric_key_prefix}_token_loss"] = float(summed / (targets.sum() or 1))
        return output

    def predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: no rank holds a sequence's logits.

        Raises:
            UnsupportedByRing: always.
        """
        raise UnsupportedByRing(
            "predict must not be called on a ring: no rank holds a sequence's logits. Use evaluate."
        )

    get_test_dataloader = predict

    def get_cp_size(self) -> int:
        """Ranks that hold one sequence together."""
        return self.ring.processes_of_ring


class RingTrainer(RingTrainerMixin, Trainer):  # type: ignore[misc]  # Transformers has no types
    """`transformers.Trainer` on a ring; see `RingTrainerMixin` for what it takes besides."""
