"""`Plan.show`: the pictures of a plan, from its own schedules."""

from __future__ import annotations

import html

import pytest
import torch

from ringspun import Causal, Contiguous, Documents, Window
from ringspun.errors import ConfigError
from ringspun.torch import ContextParallel, Loopback


def test_a_plan_shows_what_it_computes():
    cp = ContextParallel(Loopback(3), layout=Contiguous(), backward="queries")
    plan = cp.plan(17, Window(4) & Documents([9, 8]))
    shown = plan.show("schedule", "balance")
    schedule, _ = shown.figures
    assert schedule.words == "window(4) & documents([9, 8]) over 17 tokens, contiguous on 3 ranks, ring"
    assert schedule.backward.travels == "queries"
    assert schedule.forward.pairs == tuple(tuple(s.forward.pairs.tolist()) for s in plan.schedules)
    assert schedule.words in str(shown) and "bytes of a link" in repr(shown)
    page = shown._repr_html_()
    assert page.startswith("<iframe srcdoc=") and schedule.words in html.unescape(page)


def test_tensors_say_how_large_messages_are(tmp_path):
    ring = Loopback(2)
    plan = ContextParallel(ring).plan(16, Causal())
    q, k, v = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
    (balance,) = plan.show("balance", like=(q, k, v)).figures
    plan.attention(q, k, v)
    assert sum(link[2] for link in balance.links) == sum(ring.counts.bytes.values())
    plan.show().save(tmp_path / "ring.html")
    assert (tmp_path / "ring.html").stat().st_size > 10_000


def test_a_split_of_heads_counts_the_heads_of_its_ring():
    plan = ContextParallel(Loopback(4), ulysses=2).plan(16, Causal())
    like = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
    (balance,) = plan.show("balance", like=like).figures
    assert sum(balance.forward.sent_bytes) == plan.explain(*like).ring.sent_bytes
    assert sum(balance.forward.flops) == 4 * 8 * 2 * (16 * 17 // 2)  # 2 of the 4 heads


@pytest.mark.parametrize("options", [{"ulysses": 2}, {"deterministic": "across_rings"}, {"block_size": 3}], ids=str)
def test_every_kind_of_plan_can_be_shown(options):
    plan = ContextParallel(Loopback(4), **options).plan(40, [Causal(), Window(7)])
    text = str(plan.show(like=tuple(torch.randn(2, 4, 40, 8) for _ in range(3))))
    assert "batch row 0 of 2" in text and text.count("batch rows have masks of their own") == 2  # schedule, balance


def test_another_name_is_refused():
    with pytest.raises(ConfigError, match="pictures must be of schedule, layout"):
        ContextParallel(Loopback(2)).plan(8, Causal()).show("sketch")
