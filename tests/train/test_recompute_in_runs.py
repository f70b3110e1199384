"""`checkpointing` and `kept_hops` in a config of `ringspun train`."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import losses, same_bits, tiny_config, write_text

from ringspun import Zigzag
from ringspun.core.route import Ring
from ringspun.errors import ConfigError
from ringspun.torch import ContextParallel, Loopback
from ringspun.train.config import TrainConfig
from ringspun.train.loop import Run, train
from ringspun.train.model import route_of
from ringspun.train.sections import validated


def test_a_run_has_the_same_bits_by_every_policy_and_may_change_it(tmp_path: Path) -> None:
    corpus = write_text(tmp_path / "text")

    def run(name: str, **changes: object) -> None:
        config = tiny_config(tmp_path / name, ranks=3, **changes)
        context = ContextParallel(Loopback(3, seed=0), layout=Zigzag(), route=route_of(config), backward="keys")
        train(Run(config, corpus, context))

    run("none", steps=4)
    for policy, kept in (("layer", 0), ("attention", 0), ("ring_step", 1)):
        run(policy, steps=4, checkpointing=policy, kept_hops=kept)
        assert same_bits(tmp_path / "none", tmp_path / policy), policy
    run("layer", checkpointing="ring_step", kept_hops=2)  # goes on to step 6
    run("none")
    assert losses(tmp_path / "layer") == losses(tmp_path / "none")


def test_kept_hops_belong_to_ring_step(tmp_path: Path) -> None:
    plain = tiny_config(tmp_path, ranks=3)
    assert plain.checkpointing == "none" and route_of(plain) == Ring()
    assert route_of(tiny_config(tmp_path, ranks=3, checkpointing="ring_step", kept_hops=2)) == Ring(kept_hops=2)
    for policy, kept in (("ring_step", 0), ("attention", 1), ("none", 2)):
        with pytest.raises(ConfigError, match=rf"kept_hops must be at least 1 with .* got {kept} with '{policy}'"):
            validated(TrainConfig, {**plain.model_dump(), "checkpointing": policy, "kept_hops": kept}, source="x")
    for sizes in ({"ranks": 1}, {"ranks": 2, "ulysses": 2}):
        values = {**plain.model_dump(), **sizes, "checkpointing": "ring_step", "kept_hops": 1}
        with pytest.raises(ConfigError, match=r"must not be 'ring_step' in a ring of 1, which has no hops"):
            validated(TrainConfig, values, source="x")
