"""Hardware and models as data, and what people write wrong."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspun.planner
from ringspun.core.links import Link, Links
from ringspun.errors import ConfigError
from ringspun.planner.hardware import Hardware, cluster
from ringspun.planner.models import from_config, known_models, model

WANTED = [
    *("A100-40", "A100-80", "H100", "H200", "B200", "GB200", "MI250X", "MI300X", "MI355X"),
    *("TPU-v3", "TPU-v4", "TPU-v5e", "TPU-v5p", "TPU-v6e", "Ironwood"),
]
PARAMETERS = {
    "llama-7b": 6_738_415_616,
    "llama-65b": 65_285_660_672,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_241_732_096,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}
"""As their publishers' own weights have them."""


def test_every_entry_has_its_source():
    known = Hardware.load()
    assert list(known.devices) == WANTED
    for entry in (*known.devices.values(), *known.links.values()):
        assert entry.source and entry.date
    for device in known.devices.values():
        assert device.flops > device.matmul > device.attention
        assert known.link(device.near) and known.link(device.far)


@pytest.mark.parametrize(
    ("written", "name"), [("h100", "H100"), ("TPU v5e", "TPU-v5e"), ("a100", "A100-80"), ("v4", "TPU-v4")]
)
def test_names_are_read_as_people_write_them(written, name):
    assert Hardware.load().device(written).name == name


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: cluster("H1000", 8), "device must be a known one; got 'H1000'. The nearest: H100"),
        (lambda: cluster("H100", 8, far="infinibandd"), "link must be a known one; got 'infinibandd'"),
        (lambda: cluster("H100", 0), "devices must be at least 1 and at most 1,048,576; got 0"),
        (lambda: cluster("H100", 10**12), "devices must be at least 1 and at most 1,048,576; got 1,000,000,000,000"),
        (lambda: cluster("H100", 8, node=0), "node must be at least 1 device; got 0"),
        (lambda: model("lama-3-8b"), "model must be a known one; got 'lama-3-8b'. The nearest: llama-3-8b"),
        (lambda: model("/nowhere/config.json"), "config must be a readable file; got /nowhere/config.json"),
    ],
)
def test_what_nobody_knows_is_told_with_the_nearest(ask, words):
    with pytest.raises(ConfigError) as told:
        ask()
    assert words in str(told.value)


@given(st.sampled_from(sorted(Hardware.load().links)), st.integers(1, 1 << 36), st.integers(1, 1 << 30))
def test_longer_messages_take_longer_and_none_beats_the_link(name, n_bytes, more):
    spec = Hardware.load().links[name]
    link = spec.link()
    assert spec.latency_s < link.seconds(n_bytes) <= link.seconds(n_bytes + more)
    assert n_bytes / link.seconds(n_bytes) <= spec.bytes_per_s
    assert link.seconds(n_bytes, together=False) <= link.seconds(n_bytes)


def test_links_reach_what_was_measured():
    """A key/value hop of 16.4 MB in 627 us: arXiv 2411.01783 table 5; shared links are slower while all send."""
    assert Hardware.load().links["ib-ndr"].link().seconds(16_400_000) == pytest.approx(627e-6, rel=0.1)
    assert Hardware.load().links["tcp-10"].link().shared == pytest.approx(8, rel=0.01)


def test_a_device_file_adds_and_replaces(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[devices.Toy]\nflops = 1e12\nmemory_gib = 4\nmemory_bytes_per_s = 1e11\nnear = "wire"\nnode = 2\n'
        'source = "me"\ndate = "2026"\n'
        '[links.wire]\nbytes_per_s = 1e9\nlatency_s = 1e-3\nsource = "me"\ndate = "2026"\n'
    )
    known = Hardware.load(path)
    assert cluster("toy", 2, hardware=known).near.seconds(10**9) == pytest.approx(1.0, rel=0.01)
    with pytest.raises(ConfigError, match="far must name the link between nodes"):
        cluster("toy", 4, hardware=known)
    assert known.device("H100").flops == 989e12


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[devices.X]\nflops = 1", "devices.X: memory_gib must be given. Its memory (GiB)."),
        ("[device.X]\n", "table must be a known one; got 'device'. The nearest: devices."),
        ("devices = 3", "devices must be tables [devices.NAME]; got 3"),
        ("[links.X]\nbytes_per_s = -1.0\nlatency_s = 0\nsource='x'\ndate='2026'", "bytes_per_s must be right"),
        ("[links.X]\nbytes_pers = 1.0", "key must be a known one; got 'bytes_pers'. The nearest: bytes_per_s"),
        (
            "[devices.X]\nflops = 1e12\nmatmul_flops = 1e15\nmemory_gib = 1\nmemory_bytes_per_s = 1e12\n"
            "near = 'nvlink4'\nnode = 8\nsource = 'me'\ndate = '2026'",
            "devices.X: matmul_flops must be at most flops, the peak",
        ),
        ("[links.X]\nbytes_per_s = 1e-300\nlatency_s = 0\nsource='x'\ndate='2026'", "bytes_per_s must be right"),
        ("[devices.X]\nflops = 1e-300", "flops must be right: input should be greater than or equal to 1000"),
        ("[devices.X]\nmemory_gib = 1e300", "memory_gib must be right: input should be less than or equal to 1000000"),
        ("[devices.X]\nflops = nan", "flops must be right"),
        ("[links", "device-file must be a readable file"),
    ],
)
def test_a_device_file_that_is_wrong_is_told(tmp_path, text, words):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as told:
        Hardware.load(path)
    assert words in str(told.value)


def test_a_measured_profile_is_taken_as_it_is():
    near = Link((1024, 1 << 20), (1e-5, 1e-3), (1e-5, 2e-3))
    found = cluster("H100", 4, measured=Links(4, near))
    assert found.near is near and found.link(4) is near


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters_are_counted_to_the_last(name, count):
    assert model(name).parameters == count


def test_a_config_json_is_named_by_its_folder(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.chdir(folder)
    assert [model(name).name for name in ("config.json", ".", str(folder))] == ["mine"] * 3


def test_a_name_longer_than_any_file_is_unknown():
    with pytest.raises(ConfigError, match="model must be a known one"):
        model("a" * 5000)


def test_sliding_layers():
    assert model("mistral-7b").full_layers == 0
    assert (model("gemma-2-9b").full_layers, model("gemma-2-9b").layers) == (21, 42)
    assert all(m.full_layers == m.layers for m in known_models().values() if m.window is None)


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def config(tmp_path, **values):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in {**LLAMA_8B, **values}.items() if v is not ...}))
    return from_config(path)


def test_a_config_json_is_read(tmp_path):
    assert config(tmp_path).parameters == model("llama-3-8b").parameters
    assert model(str(tmp_path)) == config(tmp_path)
    layers = ["sliding_attention", "full_attention"] * 16
    slid = config(tmp_path, sliding_window=512, layer_types=layers)
    assert (slid.window, slid.full_layers) == (512, 16)
    assert config(tmp_path, sliding_window=512, use_sliding_window=False).window is None
    assert config(tmp_path, layer_types=["full_attention"] * 32, sliding_window=512).window is None
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257})
    )
    gpt = model(str(tmp_path))
    assert gpt.parameters == PARAMETERS["gpt2"]


PLAIN = {
    "gpt_neox": (
        6_857_302_016,  # Pythia 6.9B
        {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "num_hidden_layers": 32,
         "vocab_size": 50432},
    ),
    "gpt_bigcode": (
        15_517_456_384,  # StarCoder
        {"n_embd": 6144, "n_inner": 24576, "n_head": 48, "n_layer": 40, "vocab_size": 49152, "n_positions": 8192,
         "multi_query": True},
    ),
    "opt": (
        6_658_473_984,
        {"hidden_size": 4096, "ffn_dim": 16384, "num_attention_heads": 32, "num_hidden_layers": 32,
         "vocab_size": 50272, "max_position_embeddings": 2048},
    ),
    "starcoder2": (
        3_030_371_328,
        {"hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 24, "num_key_value_heads": 2,
         "num_hidden_layers": 30, "vocab_size": 49152},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLAIN)
def test_kinds_without_a_gate_have_two_matrices(tmp_path, kind):
    """Counted as their publishers' own weights have them."""
    parameters, values = PLAIN[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **values}))
    assert model(str(tmp_path)).parameters == parameters


@pytest.mark.parametrize(
    ("values", "window", "full"),
    [
        ({"layer_types": ["full_attention"] * 20 + ["sliding_attention"] * 12}, 512, 20),
        ({"model_type": "qwen2"}, None, 32),  # slides only where it is told to
        ({"model_type": "qwen2", "use_sliding_window": True}, 512, 28),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 8}, 512, 8),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 99}, 512, 32),
        ({"model_type": "gemma3_text"}, 512, 5),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 4}, 512, 8),
        ({"model_type": "gemma2"}, 512, 16),
        ({"model_type": "mistral"}, 512, 0),
    ],
)
def test_layers_slide_as_their_kind_has_it(tmp_path, values, window, full):
    found = config(tmp_path, sliding_window=512, **values)
    assert (found.window, found.full_layers) == (window, full)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_key_value_heads": 5}, "kv_heads must divide heads; got 5 and heads = 32"),
        ({"num_attention_heads": 33, "num_key_value_heads": 33}, "heads must divide hidden, or head_size be given"),
        ({"hidden_size": -4096, "head_dim": 128}, "hidden must be right: input should be greater than 0; got -4096"),
        ({"vocab_size": ...}, "vocab must be given"),
        ({"num_local_experts": 8}, "model must be dense; got a mixture of 8 experts"),
        ({"layer_types": ["linear_attention"]}, "layers must be full or sliding attention; got linear_attention"),
        ({"num_hidden_layers": "many"}, "layers must be right"),
        ({"kv_lora_rank": 256}, "Latent attention is not planned for"),
        ({"hidden_size": 10**400, "head_dim": 128}, "hidden must be right: input should be less than or equal to"),
        ({"layer_types": 5}, "layer_types must be a list; got 5"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must name each of 32 layers; got 3"),
    ],
)
def test_a_config_json_that_cannot_be_is_told(tmp_path, values, words):
    with pytest.raises(ConfigError) as told:
        config(tmp_path, **values)
    assert words in str(told.value)


def test_the_planner_loads_no_framework():
    """It runs where neither is installed."""
    folder = Path(ringspun.planner.__file__).parent
    modules = ", ".join(f"ringspun.planner.{p.stem}" for p in folder.glob("[a-z]*.py"))
    program = f"import sys; import {modules}; print(*(m for m in ('torch', 'jax', 'transformers') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("path", sorted(Path(ringspun.planner.__file__).parent.glob("*.py")), ids=lambda p: p.name)
def test_the_planner_imports_the_core_and_small_libraries_alone(path):
    allowed = {"numpy", "pydantic", "ringspun.core", "ringspun.errors", "ringspun.planner"} | set(
        sys.stdlib_module_names
    )
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert {name.split(".")[0], ".".join(name.split(".")[:2])} & allowed, f"{path.name} imports {name}"
