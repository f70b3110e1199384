"""A ring beside tensor parallelism and inside of a pipeline's stages: the gradients of one process."""

from __future__ import annotations

import pytest
import torch
from on_ranks_meshes import alone, in_a_pipeline, two_stages_alone, with_tensor_parallel

from ringspun.testing.pool import RankPool

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def eight():
    with RankPool(8) as pool:
        yield pool


@pytest.mark.parametrize("names", [("tp", "ring", "ulysses"), ("ring", "ulysses", "tp"), ("ulysses", "ring", "tp")])
def test_tensor_parallel_heads_on_rings_and_split_heads(eight, names):
    """Who shares a sequence are exactly the mesh's ranks, in its order; heads are split by the mesh and once more."""
    loss, gradients = alone()
    found = eight.run(with_tensor_parallel, names, timeout_s=90)
    apart = names[-1] == "tp"
    assert [ranks for *_, ranks in found] == [[r % 2, r % 2 + 2, r % 2 + 4, r % 2 + 6] if apart else
                                             [r // 4 * 4 + i for i in range(4)] for r in range(8)]  # fmt: skip
    assert sum(share for share, *_ in found) / 2 == pytest.approx(loss, rel=1e-12)  # both tp ranks have the same
    for _, whole, _ in found:
        for name, expected in gradients.items():
            torch.testing.assert_close(whole[name], expected, rtol=1e-11, atol=1e-11 * float(expected.abs().max()))


def test_a_ring_lives_inside_of_a_stage(pools):
    loss, gradients = two_stages_alone()
    found = pools(4).run(in_a_pipeline, timeout_s=90)
    assert sum(share for share, *_ in found) == pytest.approx(loss, rel=1e-12)
    for _, whole, stage in found:
        for name, grad in whole.items():
            expected = gradients[f"{stage}.{name}"]
            torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-11 * float(expected.abs().max()))
