"""The TOML config: what it accepts, and how it says what is wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ringspun.errors import ConfigError
from ringspun.train.config import TrainConfig, load_config

GOOD = """
seq_len = 64
steps = 10
[model]
layers = 2
hidden_size = 32
intermediate_size = 64
heads = 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def fault(folder: Path, text: str, **overrides: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), **overrides)
    return str(caught.value)


def test_defaults_and_overrides(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD), ranks=4, output=None)
    assert (config.ranks, config.layout, config.dtype, config.model.head_size) == (
        4,
        "zigzag",
        "bfloat16",
        16,
    )
    assert isinstance(config, TrainConfig)


def test_every_field_is_described() -> None:
    for section in (TrainConfig, *(f.annotation for f in TrainConfig.model_fields.values())):
        for name, field in getattr(section, "model_fields", {}).items():
            assert field.description or hasattr(field.annotation, "model_fields"), name


def test_unknown_key_names_file_path_and_nearest(tmp_path: Path) -> None:
    text = GOOD.replace("heads = 2", "heads = 2\nkv_head = 1")
    message = fault(tmp_path, text)
    assert "run.toml" in message
    assert "unknown key 'model.kv_head'; the nearest is 'model.kv_heads'" in message
    assert "the nearest is 'steps'" in fault(tmp_path, "stpes = 3\n" + GOOD)


def test_missing_key_and_missing_file(tmp_path: Path) -> None:
    assert "key 'steps' must be given" in fault(tmp_path, GOOD.replace("steps = 10", ""))
    with pytest.raises(ConfigError, match=r"nowhere\.toml: config must be a readable file"):
        load_config(tmp_path / "nowhere.toml")


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    message = fault(tmp_path, GOOD.replace("seq_len = 64", 'seq_len = "64"').replace("steps = 10", "steps = -1"))
    assert "seq_len" in message and "'64'" in message
    assert "steps" in message and "-1" in message


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("heads = 2", "heads = 3", "hidden_size must be a multiple of 2 * heads"),
        ("heads = 2", "heads = 4\nkv_heads = 3", "kv_heads must divide heads"),
        ("steps = 10", 'steps = 10\nlayout = "zigzga"', "zigzag"),
        ("steps = 10", "steps = 10\nwarmup_steps = 10", "warmup_steps must be less than steps"),
        ("steps = 10", "steps = 10\ncheckpoint_every = 11", "checkpoint_every must be at most steps"),
        ("steps = 10", "steps = 10\nlr = 1e-3\nfinal_lr = 1e-2", "final_lr must be at most lr"),
        ("steps = 10", "steps = ", "config must be TOML"),
        ("steps = 10", "steps = " + "[" * 5000, "config must be TOML; it is nested too deeply"),
        ("seq_len = 64", "seq_len = 3\nranks = 7", "every rank must hold a token; got seq_len = 3, ranks = 7"),
        (
            "seq_len = 64",
            'seq_len = 64\nranks = 2\nlayout = "striped(128)"',
            "every rank must hold a token; got seq_len = 64, ranks = 2, layout = 'striped(128)'",
        ),
        ("steps = 10", "steps = 10\nranks = 99999999999", "ranks: input should be less than or equal to 4096"),
        (
            "steps = 10",
            "steps = 10\nseed = 18446744073709551616",
            "seed: input should be less than 18446744073709551616",
        ),
        ("steps = 10", "steps = 10\nlr = inf", "lr: input should be a finite number; got inf"),
        ("steps = 10", "steps = 10\nlr = nan", "lr: input should be"),
        ("steps = 10", "steps = 10\nweight_decay = inf", "weight_decay: input should be a finite number"),
        ("heads = 2", "heads = 2\nrope_theta = inf", "model.rope_theta: input should be a finite number"),
        ("steps = 10", 'steps = 10\noutput = ""', "output must name a folder; got ''"),
        ("steps = 10", 'steps = 10\noutput = "a\\u0000b"', "output must name a folder"),
        ("[model]", "[x]\n[model]", "unknown table 'x'; the tables are: model, data, evaluate."),
        ("[model]", "[dat]\n[model]", "unknown table 'dat'; the nearest is 'data'"),
        ("heads = 2", "heads = 2\n[model.x]", "unknown table 'model.x'; the tables of [model] are: none."),
        ("heads = 2", "heads = 2\nx = 1", "unknown key 'model.x'; the keys of [model] are: layers, hidden_size"),
    ],
)
def test_values_must_hold_together(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert words in fault(tmp_path, GOOD.replace(old, new, 1))


def test_what_is_allowed_at_the_bounds(tmp_path: Path) -> None:
    text = GOOD.replace("seq_len = 64", "seq_len = 5").replace("steps = 10", "steps = 10\nclip_norm = inf")
    config = load_config(write(tmp_path, text), ranks=5, layout="striped", seed=2**64 - 1)
    torch.manual_seed(config.seed)
    assert np.random.default_rng([config.seed, 0]).permutation(3).size == 3


def test_the_example_is_a_config() -> None:
    config = load_config(Path(__file__).parents[2] / "examples" / "stdlib.toml")
    assert config.seq_len == 16_384 and config.ranks == 4
