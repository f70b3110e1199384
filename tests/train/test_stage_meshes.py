"""Stages on meshes of their own, over processes: the run of one process, and bit for bit the run that was ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import stage_meshes as sm
from training_runs import losses, write_text

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def test_data_ring_heads_and_fsdp_take_turns_in_stages(pools, tmp_path: Path) -> None:
    """DDP over sequences, then FSDP2 over 2 rings of 2, then on a ring whose heads are split; ended in the second."""
    write_text(tmp_path / "text")
    evaluate = {"evaluate": {"sequences": 1}, "data": {"held_out": 0.5}, "checkpoint_every": 0}
    alone, _ = sm.trained(sm.config_of(tmp_path / "alone", **evaluate), tmp_path / "text")
    whole = sm.config_of(tmp_path / "whole", sm.ON_FOUR, **evaluate)
    expected = pools(4).run(sm.trained_on, whole, tmp_path / "text")
    assert alone and losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "alone"), rel=2e-5)
    again = sm.config_of(tmp_path / "run", sm.ON_FOUR, **evaluate)
    assert {said for _, said in pools(4).run(sm.trained_on, again, tmp_path / "text", 3)} == {"Stop: "}
    assert pools(4).run(sm.trained_on, again, tmp_path / "text") == expected
