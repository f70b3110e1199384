"""What a run writes into a checkpoint, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringspun.train.checkpoints import checkpointing
from ringspun.train.checkpoints.resume import stages_of
from ringspun.train.checkpoints.sharded import save_sharded
from ringspun.train.checkpoints.shards import Whole, is_cut
from ringspun.train.data.vocabulary import tokenizer_folder
from ringspun.train.init import tokenizer_files
from ringspun.train.parallel.ranks import Mesh

if TYPE_CHECKING:
    from ringspun.train.loop import Run, TrainState


def is_checkpoint(run: Run, step: int) -> bool:
    """Whether there is one after a step: every so many, and at the end of each stage."""
    every = run.config.checkpoint_every
    return step == run.config.steps or (every > 0 and step % every == 0)


def generators_of(ranks: Mesh) -> dict[str, Tensor]:
    """The states of PyTorch's generators as they are stored: the first rank's, and those that are other than it, as
    where dropout drew for shares of other sizes. Collective."""
    first, *others = [torch.tensor(row, dtype=torch.uint8) for row in ranks.gather(torch.get_rng_state().tolist())]
    unlike = {f"cpu/{rank}": one for rank, one in enumerate(others, 1) if not torch.equal(one, first)}
    return {"cpu": first, **unlike}


def save_run(run: Run, state: TrainState) -> None:
    """Writes the checkpoint of the steps that are done. Collective.

    Those that stages ended with are kept beside the newest ones.

    Raises:
        CheckpointError: it cannot be written.
    """
    values: dict[str, Any] = {
        "step": state.step,
        "model": state.model,
        "optimizer": state.optimizer,
        "state": {
            "position": state.position,
            "data": run.corpus.digest,
            "stage": run.stage.number,
            "config": run.config.model_dump(mode="json"),
            "stages": stages_of(run.legs),
            "recipe": run.recipe.digest,
        },
        "keep": run.config.keep_checkpoints,
        "spare": [leg.last_step for leg in run.legs[:-1]],
        "beside": tokenizer_files(tokenizer_folder(run.config)),
        "before_publish": run.hooks.before_publish,
    }
    if run.config.checkpoints == "sharded":
        save_sharded(run.checkpoints, ranks=run.mesh, **values)
        return
    first = run.mesh.rank == 0
    generators = generators_of(run.mesh)
    whole = Whole.of(state.model, state.optimizer, keep=first) if is_cut(state.model) else None
    if first:
        checkpointing.save(run.checkpoints, whole=whole, generators=generators, **values)
