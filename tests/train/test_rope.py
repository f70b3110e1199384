"""Frequencies of rotary embeddings: Transformers' numbers for every type, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from ringspun.errors import ConfigError
from ringspun.train.rope import (
    TYPES,
    Default,
    Dynamic,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    Proportional,
    Rope,
    Yarn,
    from_config,
    from_parameters,
    head_size_of,
)

BAR = 1e-6  # relative. Transformers computes powers in float32; largest seen in 18,000 draws: 6.6e-7
RAMP = 2e-7  # times the factor: what a float32 ramp from 1 to 1 / factor leaves at its lower end; largest seen 8.3e-6

lengths = st.integers(2, 1 << 20)
factors = st.floats(1, 64)
common = {"rope_theta": st.floats(100, 1e8), "partial_rotary_factor": st.sampled_from([0.25, 0.5, 1.0])}


def drawn(**own: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(common | own)


def per_pair(dims: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(1, 64), min_size=dims, max_size=dims)


PARAMETERS = {
    "default": drawn(),
    "linear": drawn(factor=factors),
    "dynamic": drawn(factor=factors),
    "yarn": drawn(
        factor=factors,
        original_max_position_embeddings=lengths,
        beta_fast=st.none() | st.floats(8, 64),
        beta_slow=st.none() | st.floats(0.5, 4),
        attention_factor=st.none() | st.floats(0.5, 2),
        mscale=st.none() | st.floats(0.5, 2),
        mscale_all_dim=st.none() | st.floats(0.5, 2),
        truncate=st.booleans(),
    ),
    "llama3": drawn(
        factor=factors,
        low_freq_factor=st.floats(0.5, 2),
        high_freq_factor=st.floats(3, 8),
        original_max_position_embeddings=lengths,
    ),
    "proportional": drawn(factor=st.floats(1, 8)),
}


def config_of(head_size: int, longest: int, parameters: dict[str, Any]) -> Any:
    return LlamaConfig(
        hidden_size=2 * head_size,
        num_attention_heads=2,
        max_position_embeddings=longest,
        rope_parameters=parameters,
        head_dim=head_size,
    )


def transformers_own(config: Any, seq_len: int) -> tuple[np.ndarray, float]:
    kind = config.rope_parameters["rope_type"]
    function = ROPE_INIT_FUNCTIONS.get(kind, PhiRotaryEmbedding.compute_default_rope_parameters)
    inv_freq, attention_factor = function(config, torch.device("cpu"), seq_len=seq_len)
    return inv_freq.double().numpy(), attention_factor


def compare(config: Any, seq_len: int) -> Rope:
    rope = from_config(config)
    found = rope.inv_freq(head_size_of(config), seq_len=seq_len)
    expected, attention_factor = transformers_own(config, seq_len)
    ramp = RAMP * rope.factor if isinstance(rope, Yarn | Llama3) else 0.0
    np.testing.assert_allclose(found, expected, rtol=BAR + ramp, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-14)
    assert from_parameters(rope.to_parameters()) == rope
    return rope


@pytest.mark.parametrize("kind", PARAMETERS)
@settings(max_examples=40)
@given(st.data())
def test_frequencies_are_those_of_transformers(kind: str, data: st.DataObject) -> None:
    parameters = {k: v for k, v in data.draw(PARAMETERS[kind]).items() if v is not None} | {"rope_type": kind}
    head_size = data.draw(st.sampled_from([16, 64, 80, 128]))
    longest, seq_len = data.draw(st.integers(128, 1 << 17)), data.draw(lengths)
    assert type(compare(config_of(head_size, longest, parameters), seq_len)) is TYPES[kind]


@settings(max_examples=60)
@given(st.data())
def test_longrope_is_that_of_transformers_on_both_sides_of_its_length(data: st.DataObject) -> None:
    """With a factor, an attention factor, or neither; at the original length, and one token more."""
    original, longest = data.draw(st.integers(64, 8192)), data.draw(st.integers(64, 1 << 17))
    given = {"factor": st.none() | factors, "attention_factor": st.none() | st.floats(0.5, 2)}
    parameters = data.draw(drawn(short_factor=per_pair(16), long_factor=per_pair(16), **given))
    parameters |= {"rope_type": "longrope", "original_max_position_embeddings": original, "partial_rotary_factor": 0.5}
    parameters = {k: v for k, v in parameters.items() if v is not None}
    seq_len = data.draw(st.sampled_from([original - 1, original, original + 1, 1 << 20]))
    compare(config_of(64, longest, parameters), seq_len)


def test_every_type_of_transformers_is_here() -> None:
    """And is compared above: a type that a later version brings is found here."""
    assert set(ROPE_INIT_FUNCTIONS) | {"default", "ntk"} == set(TYPES) == {*PARAMETERS, "longrope", "ntk"}


def test_published_configs() -> None:
    """Llama 3.1, theta 500,000: wavelengths below 2,048 kept, beyond 8,192 divided by 8."""
    rope = Llama3(
        theta=500_000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain, found = Default(theta=500_000.0).inv_freq(128), rope.inv_freq(128)
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(found[wavelength < 2048], plain[wavelength < 2048])
    np.testing.assert_allclose(found[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-15)
    between = (wavelength > 2048) & (wavelength < 8192)
    smooth = (8192 / wavelength[between] - 1) / 3
    np.testing.assert_allclose(found[between], (1 - smooth) * plain[between] / 8 + smooth * plain[between], rtol=1e-14)
    assert between.sum() > 3
    assert Yarn(factor=16.0, original_max_position_embeddings=4096).attention_factor == pytest.approx(
        1.2772588722239782
    )


def test_ntk_is_a_larger_theta() -> None:
    """The slowest of D / 2 frequencies is divided by the factor, the first is kept; written as a default type."""
    rope, plain = Ntk(factor=8.0), Default()
    found, before = rope.inv_freq(64), plain.inv_freq(64)
    assert found[0] == before[0] == 1.0 and found[-1] * 8 == pytest.approx(before[-1], rel=1e-12)
    config = LlamaConfig(head_dim=64, **rope.to_config(head_size=64, max_position_embeddings=32_768))
    assert config.max_position_embeddings == 32_768
    np.testing.assert_array_equal(from_config(config).inv_freq(64), found)


@settings(max_examples=40)
@given(factor=factors, original=st.integers(2, 8192), seq_len=lengths)
def test_dynamic_at_a_length_is_a_theta(factor: float, original: int, seq_len: int) -> None:
    rope = Dynamic(factor=factor, original_max_position_embeddings=original)
    fixed = rope.as_default(64, seq_len=seq_len)
    np.testing.assert_array_equal(fixed.inv_freq(64), rope.inv_freq(64, seq_len=seq_len))
    if seq_len <= original:
        np.testing.assert_allclose(fixed.inv_freq(64), Default().inv_freq(64), rtol=1e-12)
    config = LlamaConfig(head_dim=64, **rope.to_config(head_size=64, max_position_embeddings=1 << 20))
    assert from_config(config) == rope


def test_proportional_keeps_the_size_of_the_head() -> None:
    found = Proportional(partial_rotary_factor=0.25).inv_freq(64)
    assert found.shape == (32,) and (found[:8] > 0).all() and not found[8:].any()


def test_older_and_other_ways_of_writing() -> None:
    """`rope_scaling` with `type`, theta beside it; Phi-3's original length beside it; a kind of layer; a mapping."""
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}, "max_position_embeddings": 4096}
    assert from_config(old) == Linear(theta=5e5, factor=4.0)
    assert from_config({"rope_theta": 1e6, "partial_rotary_factor": 0.5}) == Default(
        theta=1e6, partial_rotary_factor=0.5
    )
    phi = {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}
    phi |= {"original_max_position_embeddings": 4096, "max_position_embeddings": 131_072}
    assert from_config(phi) == LongRope(
        short_factor=(1.0,), long_factor=(2.0,), factor=32.0, original_max_position_embeddings=4096
    )
    both = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    both |= {"original_max_position_embeddings": 64}  # the one beside them wins, in Transformers too
    config = LlamaConfig(head_dim=8, original_max_position_embeddings=4096, rope_parameters=both)
    assert isinstance(rope := compare(config, 100), LongRope) and rope.original_max_position_embeddings == 4096
    kinds = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    gemma = Gemma3TextConfig(rope_parameters=kinds)
    assert from_config(gemma, "full_attention") == Linear(theta=1e6, factor=8.0)
    with pytest.raises(ConfigError, match=r"layer_type must be one of sliding_attention, full_attention; got None"):
        from_config(gemma)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "yarm"}, r"rope_type must be one of default, linear, .*; got 'yarm'"),
        ({"rope_type": "axial"}, "rope_type must be one of"),
        ({"rope_type": "linear"}, r"rope_parameters must hold factor for linear; got none"),
        ({"rope_type": "yarn", "factor": 2.0}, "must hold original_max_position_embeddings for yarn"),
        ({"rope_type": "longrope", "factor": 2.0}, "must hold short_factor for longrope"),
        ({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}, "must hold low_freq_factor for llama3"),
        ({"rope_type": "default", "factor": 2.0}, r"must hold what default knows; got factor\. It knows rope_theta, "),
        ({"mrope_section": [8, 4, 4]}, "must hold what default knows; got mrope_section"),
        ({"rope_theta": 0}, "rope_theta must be more than 0; got 0"),
        ({"rope_theta": float("inf")}, "rope_theta must be a number; got inf"),
        ({"rope_theta": "1e6"}, "rope_theta must be a number; got '1e6'"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be at least 1; got 0.5"),
        ({"rope_type": "linear", "factor": True}, "factor must be a number; got True"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor must be more than 1; got 1.0"),
        (YARN | {"beta_fast": 0.5}, "beta_fast must be at least 1; got 0.5"),
        (YARN | {"truncate": 1}, "truncate must be true or false; got 1"),
        (YARN | {"rope_theta": 1.0}, "rope_theta must not be 1 for yarn"),
        (YARN | {"original_max_position_embeddings": 4096.0}, "must be a whole number, at least 1; got 4096.0"),
    ],
)
def test_what_cannot_be_a_rotation_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_parameters(parameters)


def test_a_dynamic_config_that_transformers_would_read_otherwise_is_refused() -> None:
    config = {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048}}
    with pytest.raises(ConfigError, match=r"must be the config's max_position_embeddings, 4096, for dynamic; got 2048"):
        from_config(config | {"max_position_embeddings": 4096})


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rotated dims must be even and at least 2; got 5"):
        Default(partial_rotary_factor=0.5).inv_freq(10)
    with pytest.raises(ConfigError, match=r"rotated dims must be more than 2 for ntk; got 2"):
        Ntk(factor=2.0).inv_freq(2)
    longrope = LongRope(
        short_factor=(1.0,) * 8, long_factor=(2.0,) * 4, factor=2.0, original_max_position_embeddings=64
    )
    longrope.inv_freq(16, seq_len=64)
    with pytest.raises(ConfigError, match=r"long_factor must have 8 numbers, one per pair of dims; got 4"):
        longrope.inv_freq(16, seq_len=65)


@pytest.mark.parametrize("rope", [Dynamic(factor=2.0, original_max_position_embeddings=64)], ids=["dynamic"])
def test_P6_the_length_that_decides_must_be_said(rope: Rope) -> None:
    with pytest.raises(
        ConfigError, match=r"seq_len must be given for dynamic rotations; got None.*partition\.position_count"
    ):
        rope.inv_freq(16)
    assert not Default().needs_length and hash(rope) == hash(Dynamic(factor=2.0, original_max_position_embeddings=64))
