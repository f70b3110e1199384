"""The pages for users and contributors keep their word: code blocks run, tables and commands are true."""

from __future__ import annotations

import re
import runpy
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer.main

import ringspun
from ringspun.core.geometry import Geometry
from ringspun.core.route import Ring
from ringspun.core.route.base import Action, MessageColumn
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.kernels import KERNELS, ON_REQUEST

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "docs/models.md", "docs/migration.md")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


def printed(page: str, block: str) -> str:
    """What the page says that a block prints: the text block right after it."""
    rest = read(page).partition(f"```python\n{block}```\n")[2]
    said = re.match(r"\n```text\n(.*?)^```$", rest, re.MULTILINE | re.DOTALL)
    return said.group(1) if said else ""


@pytest.mark.parametrize("page, number", [(page, i) for page in PAGES for i in range(len(blocks(page, "python")))])
def test_every_python_block_runs(page, number, monkeypatch, tmp_path, capsys):
    """An example that no longer works, or prints something else. Process groups are of this process alone."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    example = tmp_path / "example.py"
    block = blocks(page, "python")[number]
    example.write_text(block, encoding="utf-8")
    try:
        runpy.run_path(str(example), run_name="example")
        assert capsys.readouterr().out == printed(page, block)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_blocks_are_found():
    """A fence that the pattern misses is a block that never runs."""
    for page in PAGES:
        assert len(blocks(page, "python")) == read(page).count("```python") > 0


def test_the_layout_table_is_what_schedules_say():
    """Figures that were true once."""
    rows = re.findall(r"^\| `([^`]+)` \| ([\d., ]+) \| ([\d., ]+) \| ([\d., ]+) \|$", read("README.md"), re.MULTILINE)
    assert len(rows) == 4
    layouts = (ringspun.Contiguous(), ringspun.Zigzag(), ringspun.Striped())
    for mask, *cells in rows:
        for layout, cell in zip(layouts, cells, strict=True):
            geometry = Geometry(8, tuple(range(8)), layout, Ring())
            schedules = geometry.schedule(ringspun.parse_mask(mask), 8192)
            pairs = np.stack([s.forward.pairs for s in schedules])
            wait = pairs.max(axis=0).sum() * 8 / pairs.sum()
            messages = np.concatenate([s.forward.messages for s in schedules])
            sent = int((messages[:, MessageColumn.ACTION] == Action.SEND).sum())
            tiles = sum(len(s.forward.tiles) for s in schedules)
            assert cell.split(", ") == [f"{wait:.2f}", str(sent), str(tiles)], (mask, str(layout))


def test_the_support_table_names_everything_and_nothing_else():
    """A mask, layout or kernel that the table forgets, or invents."""
    page = read("README.md")
    for base, row in ((ringspun.Mask, "masks"), (ringspun.Layout, "layouts")):
        (line,) = re.findall(rf"^\| {row} \| (.*) \|$", page, re.MULTILINE)
        exported = [getattr(ringspun, name) for name in ringspun.__all__]
        real = {x.__name__ for x in exported if isinstance(x, type) and issubclass(x, base) and x is not base}
        assert set(re.findall(r"`([A-Z]\w+)`", line)) == real
    (line,) = re.findall(r"^\| kernels \| (.*) \|$", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", line)) == {kernel.name for kernel in (*KERNELS, *ON_REQUEST)}


def test_every_row_of_the_mask_table_is_that_mask():
    """A recipe that no longer runs, or means something else than its left column says."""
    rows = dict(re.findall(r"^\| ([^|]+) \| `([^`]+)` \|$", mask_section(), re.MULTILINE))
    s, w, n, c = 1000, 7, 5, 9
    q, k = np.arange(s)[:, None], np.arange(s)[None, :]
    d, first = q - k, np.array([n, 3])
    number = np.repeat([0, 1], [700, 300])
    together = number[:, None] == number[None, :]
    within = np.concatenate([np.arange(700), np.arange(300)])
    leads = within < first[number]
    padded = np.arange(s) >= 10
    causal, table = d >= 0, np.random.default_rng(5).random((8, 8)) < 0.4
    means = {
        "causal": causal,
        "sliding window, causal": causal & (d < w),
        "window to both sides": (d <= 4) & (d >= -2),
        "packed sequences": causal & together,
        "left padding": causal & padded[:, None] & padded[None, :],
        "flash-attention's": causal & together,
        "`position_ids`": causal & together,
        "prefix-LM": causal | ((q < n) & (k < n)),
        "prefix-LM, one n": together & (causal | (leads[:, None] & leads[None, :])),
        "StreamingLLM": causal & ((d < w) | (k < n)),
        "Llama 4": causal & (q // c == k // c),
        "a block mask": causal & table[q // 128, k // 128],
        "cross-attention: the encoder's padding": padded[None, :] & (q >= 0),
        "cross-attention of packed pairs": number[:, None] == np.repeat([0, 1], [400, 600])[None, :],
    }
    names = {name: getattr(ringspun, name) for name in ringspun.__all__}
    names |= {"w": w, "n": n, "n0": n, "n1": 3, "c": c, "left": 4, "right": 2, "docs": ringspun.Documents([700, 300])}
    names |= {"table": table, "lengths": [700, 300], "key_lengths": [400, 600]}
    names |= {"cu_seqlens": torch.tensor([0, 700, 1000]), "position_ids": torch.from_numpy(within)[None]}
    names |= {"attention_mask": torch.from_numpy(padded.astype(np.int64))[None].expand(2, -1)}
    names |= {"encoder_mask": names["attention_mask"]}
    assert len(rows) == len(means)
    x, ring = torch.randn(1, 1, s, 4), ContextParallel(Loopback(3))
    for have, code in rows.items():
        expected = means[max((m for m in means if have.startswith(m)), key=len)]
        mask = eval(code.replace("\\|", "|"), names)
        assert np.array_equal(mask.as_array(s), expected), have
        assert ringspun.parse_mask(str(mask)) == mask
        part = ring.plan(s, mask).partition
        out, lse = part.plan(mask).attention(*[part.shard(x, dim=2)] * 3, return_lse=True)
        blank = torch.from_numpy(~expected.any(axis=1))
        assert torch.equal(part.gather(lse, dim=2)[0, 0].isneginf(), blank), have
        dense = F.scaled_dot_product_attention(x, x, x, torch.from_numpy(expected))
        torch.testing.assert_close(part.gather(out, dim=2)[:, :, ~blank], dense[:, :, ~blank])


def mask_section() -> str:
    return read("README.md").partition("## Masks\n")[2].partition("\n## ")[0]


def test_every_shown_command_exists():
    """A command or an option that was renamed. `make` targets too."""
    from ringspun.cli import app

    root = typer.main.get_command(app)
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    shown = [line.split("#")[0].split() for line in lines if line.startswith(("ringspun ", "make "))]
    assert len(shown) >= 5
    targets = set(re.findall(r"^(\w+):", read("Makefile"), re.MULTILINE))
    for program, *words in shown:
        if program == "make":
            assert {w for w in words if "=" not in w} <= targets, words
            continue
        context, command = typer.Context(root), root
        while words and hasattr(command, "get_command") and not words[0].startswith("-"):
            command = command.get_command(context, words.pop(0))
            assert command is not None, (program, words)
        options = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
        assert {w for w in words if w.startswith("--")} <= options, (command.name, words)


def test_links_lead_somewhere():
    """A file that was moved."""
    for page in (*PAGES, "CHANGELOG.md", "docs/devlog.md", "docs/train-config.md", "docs/testing.md"):
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", read(page)):
            assert (ROOT / page).parent.joinpath(link).exists(), (page, link)
