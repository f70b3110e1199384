"""Schedules of growing context: edges of stages, presets, text, and what is refused."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun.errors import ConfigError, RingspunWarning
from ringspun.train.context_schedule import PRESETS, ContextSchedule, Stage, lwm_text, progressive_1m
from ringspun.train.rope import Default, Linear, LongRope, Yarn, from_parameters

THREE = ContextSchedule.of(seq_len=[4096, 16_384, 65_536], steps=[1000, 2000, 500], rope=[1e4, 1e5, 1e6])


@pytest.mark.parametrize(
    ("step", "seq_len", "first"),
    [
        *((step, 4096, 0) for step in (0, 999)),
        *((step, 16_384, 1000) for step in (1000, 2999)),
        *((step, 65_536, 3000) for step in (3000, 3499, 3500, 10**9)),
    ],
)
def test_edges_of_stages(step: int, seq_len: int, first: int) -> None:
    stage = THREE.at(step)
    assert (stage.seq_len, stage.first_step) == (seq_len, first)
    assert THREE.steps == 3500 and stage.rope.theta == {4096: 1e4, 16_384: 1e5, 65_536: 1e6}[seq_len]


lrs = st.none() | st.floats(1e-9, 1)
ropes = st.one_of(
    st.floats(1, 1e9).map(lambda theta: Default(theta=theta)),
    st.floats(1, 64).map(lambda factor: Linear(factor=factor)),
    st.just(Yarn(factor=4.0, original_max_position_embeddings=4096, truncate=False)),
    st.just(LongRope(short_factor=(1.0, 2.5), long_factor=(1e-5, 3.0), factor=1.5, original_max_position_embeddings=9)),
)
amounts = st.one_of(
    st.fixed_dictionaries({"steps": st.integers(1, 9)}),
    st.fixed_dictionaries({"steps": st.integers(1, 9), "tokens": st.integers(1, 10**12)}),
    st.fixed_dictionaries({"steps": st.integers(1, 9), "batch_tokens": st.integers(100, 10**7)}),
    st.fixed_dictionaries({"tokens": st.integers(1, 500), "batch_tokens": st.integers(100, 10**7)}),
)
meshes = st.dictionaries(st.sampled_from(["ring", "data_2", "tp"]), st.integers(1, 9), max_size=3)
stages = st.builds(
    lambda amount, more: amount | more,
    amounts,
    st.fixed_dictionaries({"rope": ropes, "lr": lrs, "mesh": meshes, "seq_len": st.integers(2, 100)}),
)
schedules = st.lists(stages, min_size=1, max_size=5).map(
    lambda all_: ContextSchedule.read({"stages": sorted(all_, key=lambda stage: stage["seq_len"])})
)


@given(schedules)
def test_a_schedule_s_text_parses_back(schedule: ContextSchedule) -> None:
    again = ContextSchedule.parse(str(schedule))
    assert again == schedule and hash(again) == hash(schedule) and str(again) == str(schedule)


@given(schedules)
def test_every_step_is_in_one_stage(schedule: ContextSchedule) -> None:
    """As many steps of each as it has, in order, and none left."""
    found = [schedule.at(step).first_step for step in range(schedule.steps)]
    expected = [stage.first_step for stage in schedule.stages for _ in range(stage.step_count)]
    assert found == expected == sorted(found) and schedule.at(schedule.steps) == schedule.stages[-1]


@given(tokens=st.integers(1, 10**6), batch_tokens=st.integers(2, 10**4))
def test_steps_of_tokens_are_enough_and_not_one_more(tokens: int, batch_tokens: int) -> None:
    stage = Stage(seq_len=2, tokens=tokens, batch_tokens=batch_tokens)
    assert (stage.step_count - 1) * batch_tokens < tokens <= stage.step_count * batch_tokens
    assert stage.total_tokens == tokens
    assert Stage(seq_len=2, steps=3, batch_tokens=batch_tokens).total_tokens == 3 * batch_tokens
    assert Stage(seq_len=2, steps=3).total_tokens is None


def test_progressive_1m() -> None:
    schedule = progressive_1m()
    assert [s.seq_len for s in schedule.stages] == [4096, 16_384, 65_536, 262_144, 1_048_576]
    thetas = [s.rope.theta for s in schedule.stages]
    assert thetas[0] == 10_000 and thetas[-1] == 50_000_000 and thetas == sorted(set(thetas))
    assert [schedule.at(n).seq_len for n in (999, 1000, 2999, 3000)] == [4096, 16_384, 16_384, 65_536]
    assert progressive_1m([1] * 5).steps == 5


def test_lwm_text() -> None:
    """Table 11 of the paper."""
    schedule = lwm_text()
    found = [(s.seq_len, s.rope, s.tokens, s.steps, s.warmup_steps, s.mesh) for s in schedule.stages]

    def row(power: int, theta: float, billions: float, steps: int, warmup: int, tp: int, sp: int) -> tuple[Any, ...]:
        mesh = (("dp", 1), ("fsdp", -1), ("tp", tp), ("sp", sp))
        return 2**power, Default(theta=theta), round(billions * 1e9), steps, warmup, mesh

    assert found == [
        row(15, 1e6, 4.8, 1200, 100, 4, 1),
        row(17, 10e6, 12, 3000, 200, 8, 1),
        row(18, 10e6, 12, 3000, 200, 16, 1),
        row(19, 25e6, 3, 720, 50, 16, 2),
        row(20, 50e6, 1.8, 450, 25, 16, 4),
    ]
    assert {s.lr for s in schedule.stages} == {4e-5} and schedule.steps == 8370
    assert [s.first_step for s in schedule.stages] == [0, 1200, 4200, 7200, 7920]
    assert all(3.9e6 < (s.tokens or 0) / s.step_count < 4.2e6 for s in schedule.stages)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_texts_too(name: str) -> None:
    schedule = PRESETS[name]()
    assert ContextSchedule.parse(str(schedule)) == schedule
    assert ContextSchedule.read(tomllib.loads(str(schedule))) == schedule


def test_the_learning_rate_warms_up_at_the_beginning_of_a_stage() -> None:
    schedule = ContextSchedule.of(seq_len=[8, 16], steps=[10, 10], lr=[1.0, 2.0], warmup_steps=[0, 4])
    assert [schedule.at(n).lr_at(n) for n in (0, 9, 10, 11, 12, 13, 14, 25)] == [1, 1, 0.5, 1, 1.5, 2, 2, 2]
    with pytest.raises(ConfigError, match="lr must be given to ask for it; the stage of 4096 tokens has none"):
        THREE.at(0).lr_at(0)


def test_a_stage_taken_into_another_schedule_begins_there() -> None:
    last = THREE.stages[-1]
    other = ContextSchedule(stages=(THREE.stages[1], last))
    assert [s.first_step for s in other.stages] == [0, 2000] and last.first_step == 3000
    with pytest.raises(ValueError, match="frozen"):
        last.seq_len = 5  # type: ignore[misc]


def test_a_stage_in_text_may_have_any_scaling() -> None:
    text = """
    [[stages]]
    seq_len = 8192
    steps = 5
    [stages.rope]
    rope_type = "yarn"
    factor = 2
    original_max_position_embeddings = 4096
    rope_theta = 5e5
    """
    rope = ContextSchedule.parse(text).stages[0].rope
    assert rope == Yarn(theta=5e5, factor=2.0, original_max_position_embeddings=4096)
    assert from_parameters(rope.to_parameters()) == rope


def test_contexts_that_shrink_are_a_warning() -> None:
    with pytest.warns(RingspunWarning, match="seq_len should grow from stage to stage; got 8 after 16"):
        ContextSchedule.of(seq_len=[16, 8], steps=[1, 1])
    ContextSchedule.of(seq_len=[16, 16], steps=[1, 1])  # another rate, say


def one(**fields: Any) -> dict[str, Any]:
    return {"stages": [{"seq_len": 8, "steps": 5} | fields]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "key 'stages' must be given"),
        ({"stages": []}, r"stages: stages must hold at least one stage; got none"),
        (one(seq_len=None), r"context schedule: stages\.0\.seq_len: input should be a valid integer; got None"),
        (one(seq_len=1), r"stages\.0\.seq_len: input should be greater than 1; got 1"),
        (one(seqlen=3), r"unknown key 'stages\.0\.seqlen'; the nearest is 'stages\.0\.seq_len'"),
        (one(steps=None), r"stages\.0: steps must be given, or tokens and batch_tokens; got none"),
        (one(steps=None, tokens=5), "got tokens alone"),
        (one(steps=None, batch_tokens=9), "got batch_tokens alone"),
        (one(tokens=5, batch_tokens=9), "must not all be given; leave one out"),
        (one(steps=0), r"stages\.0\.steps: input should be greater than 0"),
        (one(batch_tokens=7), "batch_tokens must be at least seq_len; got 7 and 8"),
        (one(warmup_steps=6, lr=1.0), "warmup_steps must be at most the stage's steps; got 6 of 5"),
        (one(warmup_steps=2), "warmup_steps must be 0 without lr; got 2"),
        (one(lr=float("nan")), r"stages\.0\.lr: input should be"),
        (one(mesh={"ring": 0}), "mesh must have sizes of at least 1, one of them perhaps -1; got {'ring': 0}"),
        (one(mesh={"ring": -1, "data": -1}), "mesh must have sizes of at least 1"),
        (one(mesh={"a b": 1}), r"mesh must name each axis once, by letters, digits and _; got \['a b'\]"),
        (one(mesh=(("a", 1), ("a", 2))), "mesh must name each axis once"),
        (one(rope={"rope_type": "yarm"}), r"stages\.0\.rope: rope_type must be one of .*; got 'yarm'"),
        (one(rope=0), r"stages\.0\.rope: rope_theta must be more than 0; got 0"),
        (one(rope="1e6"), r"stages\.0\.rope: input should be an instance of Rope; got '1e6'"),
        (one(rope=True), r"stages\.0\.rope: input should be an instance of Rope; got True"),
        (one(first_step=3), r"unknown key 'stages\.0\.first_step'"),
    ],
)
def test_what_is_no_schedule_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ContextSchedule.read(values)


def test_unequal_lists_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lists must have one entry per stage; got seq_len 3, steps 2, rope 3"):
        ContextSchedule.of(seq_len=[1, 2, 3], steps=[1, 2], rope=[1e4] * 3)
    with pytest.raises(ConfigError, match="seq_len 5, steps 4"):
        progressive_1m([1000] * 4)
    with pytest.raises(ConfigError, match="at least one stage"):
        ContextSchedule.of()


def test_steps_and_texts_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="step must be at least 0; got -1"):
        THREE.at(-1)
    with pytest.raises(ConfigError, match="context schedule must be TOML"):
        ContextSchedule.parse("[[stages]")


def test_a_stage_asked_before_its_beginning_has_a_rate():
    later = ContextSchedule.of(seq_len=[8, 16], steps=[2, 2], lr=[0.5, 0.25]).stages[1]
    assert later.lr_at(0) == later.lr_at(2) == 0.25
