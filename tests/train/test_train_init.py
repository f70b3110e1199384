"""Runs that start from a Hugging Face checkpoint, and what they end with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_stages import LONG, SHORT, Stop, evaluations, no_profiler, run, staged, stop_in  # noqa: F401
from tiny_tokenizers import byte_tokenizer
from training_runs import losses, same_bits, write_text

from ringspun.errors import ConfigError, RingspunError
from ringspun.train.checkpoints.export import export_newest
from ringspun.train.checkpoints.resume import find_checkpoint
from ringspun.train.config import TrainConfig
from ringspun.train.data.opening import open_data
from ringspun.train.data.vocabulary import model_vocabulary
from ringspun.train.launch import Job, check


def tiny(folder: Path, kind: str = "Llama", **more: Any) -> Path:
    """A checkpoint of a small model of bytes."""
    import transformers

    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "head_dim": 8}
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes | more))
    model.save_pretrained(folder)
    return folder


def from_checkpoint(output: Path, init: Path, *stages: dict[str, Any], **changes: Any) -> TrainConfig:
    values = staged(output, *stages, **changes).model_dump()
    for name in ("seq_len", "steps", "warmup_steps", "final_lr", "decay", "decay_steps"):
        values.pop(name)
    return TrainConfig.model_validate(values | {"model": None, "init": init})


def test_it_starts_from_the_weights_and_ends_as_a_checkpoint_with_rotations_and_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    init, long = tiny(tmp_path / "init", tie_word_embeddings=True), LONG | {"rope": 4e5}
    byte_tokenizer().save_pretrained(init)
    data = {"format": "text", "held_out": 0.2}
    config = from_checkpoint(tmp_path / "run", init, SHORT | {"lr": 1e-12}, long, evaluate={"sequences": 1}, data=data)
    write_text(tmp_path / "text")
    state = run(config, tmp_path / "text", ring=2)
    before = AutoModelForCausalLM.from_pretrained(init)
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-000003" / "model")
    for (name, old), new in zip(before.named_parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(new, old, atol=1e-9, rtol=1e-6, msg=name)
    export_newest(tmp_path / "run", tmp_path / "exported")
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert (last.config.rope_parameters["rope_theta"], last.config.max_position_embeddings) == (4e5, 48)
    for name, parameter in state.model.named_parameters():
        assert torch.equal(last.get_parameter(name), parameter), name
    text = "a b"
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").encode(text) == byte_tokenizer().encode(text)
    assert evaluations(tmp_path / "run")[0]["step"] == 0, "what the checkpoint knew already"


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Qwen2", {}),
        ("Mistral", {"sliding_window": 9}),
        ("Gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    ],
)
def test_models_of_other_families_train_alike_on_any_ring(tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    """Windows, logits with a cap, rotations that follow the length."""
    init = tiny(tmp_path / "init", kind, **more)
    long = LONG if "rope_parameters" not in more else {k: v for k, v in LONG.items() if k != "rope"}
    for name, ring in (("one", 1), ("three", 3)):
        run(from_checkpoint(tmp_path / name, init, SHORT, long), tmp_path / "text", ring=ring)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


def test_the_first_loss_is_transformers_own(tmp_path: Path) -> None:
    """Of the checkpoint as it is loaded elsewhere, on the first sequence; with the stage's rotations."""
    from transformers import AutoModelForCausalLM

    init = tiny(tmp_path / "init")
    corpus = write_text(tmp_path / "text", lengths=(200,))
    run(from_checkpoint(tmp_path / "run", init, {**LONG, "steps": 1}, checkpoint_every=0), tmp_path / "text", ring=3)
    packed = corpus.sequences(seq_len=48, seed=3).at({})
    model = AutoModelForCausalLM.from_pretrained(init, rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    ids = torch.from_numpy(packed.ids)[None]
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=ids).loss)
    assert losses(tmp_path / "run")[0] == pytest.approx(expected, rel=1e-5)


def test_bytes_are_refused_where_the_checkpoint_has_a_tokenizer(tmp_path: Path) -> None:
    init = tiny(tmp_path / "init")
    byte_tokenizer().save_pretrained(init)
    with pytest.raises(
        ConfigError, match=r"data\.format must not be 'bytes' with init = .*, whose tokenizer knows other"
    ):
        check(Job(from_checkpoint(tmp_path / "run", init), write_text(tmp_path / "text")))


def test_an_interrupted_run_from_a_checkpoint_is_the_uninterrupted_one(tmp_path: Path) -> None:
    init = tiny(tmp_path / "init")
    torch.manual_seed(0)
    run(from_checkpoint(tmp_path / "whole", init), tmp_path / "text", ring=2)
    torch.manual_seed(0)
    with pytest.raises(Stop):
        run(from_checkpoint(tmp_path / "run", init), tmp_path / "text", ring=2, hooks=stop_in(5))
    run(from_checkpoint(tmp_path / "run", init), tmp_path / "text", ring=2)
    assert same_bits(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            r"init must be a folder with a Hugging Face checkpoint; got",
        ),
        (lambda folder: (folder / "config.json").write_text("{}"), "init must have a config.json with a model_type"),
        (lambda folder: (folder / "model.safetensors").unlink(), "init must have its weights in safetensors files"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "init must be loadable by from_pretrained"),
        (lambda folder: _change(folder, num_hidden_layers=3), r"init must have all weights of its config; .* lacks"),
        (lambda folder: _change(folder, architectures=["BertForMaskedLM"]), "init must be a causal language model"),
    ],
    ids=["no config", "empty config", "no weights", "torn weights", "a layer less", "no causal model"],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, spoil: Any, words: str) -> None:
    init = tiny(tmp_path / "init")
    spoil(init)
    with pytest.raises(ConfigError, match=words):
        run(from_checkpoint(tmp_path / "run", init), tmp_path / "text")


def _change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "attn_pdrop": 0.0}
GEMMA3 = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("kind", "model", "stage", "words"),
    [
        ("GPT2LMHeadModel", GPT2 | {"vocab_size": 300}, {}, "at most the 32 positions .* of; got 48"),
        (
            "Gemma3ForCausalLM",
            GEMMA3 | {"num_attention_heads": 4},
            {"rope": 1e5},
            "rope must be None for a model whose layers",
        ),
    ],
)
def test_what_a_late_stage_would_refuse_is_refused_before_the_first(
    tmp_path: Path, kind: str, model: dict[str, Any], stage: dict[str, Any], words: str
) -> None:
    import transformers

    made: Any = getattr(transformers, kind)
    made(made.config_class(**model)).save_pretrained(tmp_path / "init")
    stages = [SHORT, {"seq_len": 48, "steps": 3} | stage]
    config = TrainConfig.model_validate({"init": tmp_path / "init", "output": tmp_path / "run", "stages": stages})
    with pytest.raises(RingspunError, match=words):
        check(Job(config, write_text(tmp_path / "text")))


def test_a_model_that_transformers_does_not_know_is_refused_without_its_weights_being_read(tmp_path: Path) -> None:
    _change(tiny(tmp_path / "init"), model_type="nobody")
    with pytest.raises(ConfigError, match=r"init must be loadable by from_pretrained; .*`nobody`"):
        check(Job(from_checkpoint(tmp_path / "run", tmp_path / "init"), write_text(tmp_path / "text")))


def test_a_checkpoints_own_tokenizer_may_know_more_tokens_than_its_model(tmp_path: Path) -> None:
    """As Gemma 3's of text alone, which knows one of pictures."""
    tokenizer = byte_tokenizer()
    init = tiny(tmp_path / "init", vocab_size=len(tokenizer))
    tokenizer.add_special_tokens({"pad_token": "<unknown to the model>"})
    tokenizer.save_pretrained(init)
    write_text(tmp_path / "text")
    config = from_checkpoint(tmp_path / "run", init, SHORT, data={"format": "text"})
    packed = open_data(config, [tmp_path / "text"]).sequences(seq_len=16, seed=0)
    assert model_vocabulary(config) == len(tokenizer) - 1 >= packed.at({}).ids.max()


def test_a_run_goes_on_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where paths of the same config, from that folder on, read otherwise."""
    tiny(tmp_path / "init")
    (tmp_path / "a").mkdir()
    text = write_text(tmp_path / "text")
    once = SHORT | {"steps": 1}
    monkeypatch.chdir(tmp_path)
    run(from_checkpoint(tmp_path / "run", Path("init"), once, checkpoint_every=0), tmp_path / "text")
    monkeypatch.chdir(tmp_path / "a")
    found = find_checkpoint(
        from_checkpoint(tmp_path / "run", Path("../init"), once, checkpoint_every=0), text, warn=print
    )
    assert found is not None and found.step == 1
