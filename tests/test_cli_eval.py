"""`ringspun eval`: checkpoints, runs and Hugging Face models are asked; what cannot be is told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ringspun.cli.eval import app

RECIPE = """
import torch
from torch import nn

class Model(nn.Module):
    reach = 0

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 8), nn.Linear(8, 257)

    def forward(self, ids, plan, position_ids):
        x = self.embed(ids)[:, None]
        return self.head(plan.attention(x, x, x)[:, 0])

def build_model(config):
    return Model()
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("ringspun.evaluation.job.cores", lambda: 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("models") / "llama"
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=257, initializer_range=0.5)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i, count in enumerate((10, 10, 30)):
        (folder / f"{i}.txt").write_text("the quick brown fox\n" * count)
    return folder


def told(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def asked(*arguments: object):
    return json.loads(told(*arguments, "--json", "-"))


SMALL = ("--depths", 2, "--questions", 4)


def test_all_tasks_in_words_json_and_a_page(llama, text, tmp_path):
    told_json, saved = tmp_path / "out.json", tmp_path / "out.html"
    out = told(
        llama, "--task", "lines,passkey,perplexity", "--seq-len", "256,320", *SMALL, "--data", text, "--sequences", 2,
        "--window", 64, "--json", told_json, "--save", saved,
    )  # fmt: skip
    for words in ("lines: 0 of 8 answers exact", "passkey: 0 of 8 answers exact", "over 256 tokens", "over 320 tokens",
                  "1 of them the beginning of one document, the others of several, joined"):  # fmt: skip
        assert words in " ".join(out.split())
    found = json.loads(told_json.read_text())
    assert [result["task"] for result in found["results"]] == ["lines", "passkey", "perplexity", "perplexity"]
    assert [one["asked_by_depth"] for one in found["results"][1]["lengths"]] == [[2, 2], [2, 2]]
    assert [result["whole_documents"] for result in found["results"][2:]] == [1, 1]
    assert found["asked"]["questions"] == 4 and found["model"] == str(llama)
    assert "Drawn by ringspun from its answers." in saved.read_text()


def test_rotations_that_depend_on_the_length_are_those_of_each_length(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from ringspun.evaluation.subject import Subject, find
    from ringspun.train.rope.fixed_rope import FixedRope

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=257, max_position_embeddings=64, rope_parameters=rope)
                     ).save_pretrained(tmp_path / "dynamic")  # fmt: skip
    subject = Subject.load(find(tmp_path / "dynamic"))
    for seq_len in (128, 256):
        judged = subject.judged(seq_len)
        (fixed,) = [module for module in subject.model.modules() if isinstance(module, FixedRope)]
        assert fixed.seq_len == seq_len and judged.reach is None and judged.chunked is not None


def test_a_table_of_positions_is_not_gone_beyond(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=257, n_positions=200)).save_pretrained(
        tmp_path / "gpt2"
    )
    assert "lines: 0 of 4" in told(tmp_path / "gpt2", "--seq-len", 200, *SMALL)
    words = told(tmp_path / "gpt2", "--seq-len", 201, *SMALL, code=2)
    assert "seq-len must be at most the 200 positions that the model has; got 201." in words


def test_questions_are_shared_out_evenly_among_documents(llama):
    (result,) = asked(llama, "--seq-len", 256, "--depths", 3, "--questions", 7, "--per-document", 3)["results"]
    assert result["lengths"][0]["asked_by_depth"] == [3, 3, 3]  # three documents of three


@pytest.mark.processes
def test_ranks_say_what_one_process_says(llama, text, tmp_path):
    ways = [
        asked(llama, "--task", "lines,perplexity", "--seq-len", 128, *SMALL, "--data", text, "--sequences", 1, *ranks)
        for ranks in ((), ("--ranks", 2), ("--ranks", 3, "--loopback"))
    ]
    one, *others = [way["results"] for way in ways]
    for results in others:
        assert results[0] == one[0]
        assert results[1]["loss"] == pytest.approx(one[1]["loss"], rel=1e-5)


def test_a_run_and_its_checkpoint_whose_model_is_a_recipe(tmp_path, text):
    from ringspun.train.config import load_config
    from ringspun.train.data.text import find_text
    from ringspun.train.launch import Job, launch

    (tmp_path / "own.py").write_text(RECIPE)
    (tmp_path / "run.toml").write_text(
        'recipe = "own.py"\nseq_len = 32\nsteps = 2\nlr = 0.1\nfinal_lr = 0.1\ncheckpoint_every = 1\n'
    )
    config = load_config(tmp_path / "run.toml", output=str(tmp_path / "run"))
    launch(Job(config, find_text(text)))
    numbers = [
        asked(place, "--task", "perplexity", "--data", text, "--seq-len", 64, "--sequences", 1, *more)
        for place, more in (
            (config.output, ()),
            (config.output / "checkpoints" / "step-000002", ("--recipe", tmp_path / "own.py")),
            (config.output / "checkpoints" / "step-000001", ()),
        )
    ]
    newest, same, before = (number["results"][0]["mean_loss"] for number in numbers)
    assert newest == same < before
    assert numbers[2]["model"].endswith("step-000001, step 1")
    (tmp_path / "own.py").unlink()
    words = told(config.output, "--depths", 2, "--seq-len", 128, code=2)
    assert "recipe must be the file whose build_model made" in words and "Give --recipe FILE." in words


def test_a_damaged_checkpoint_is_refused(tmp_path, llama):
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "state.json").write_text("{}")
    assert "must be whole" in told(tmp_path / "step-000001", code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--task", "line"), "task must be one of lines, passkey, perplexity; got 'line'."),
        (("--seq-len", 64), "seq_len must have room for a line of each of 10 depths; got 64"),
        (("--task", "perplexity"), "data must be given for perplexity, and for it alone."),
        (("--data", "."), "data must be given for perplexity, and for it alone."),
        (("--questions", 0), "questions must be at least 1; got 0."),
        (("--task", "lines,passkey", "--save", "x.png"), "save must be an .html for 2 pictures; got 'x.png'."),
        (("--save", "nowhere/x.png"), "save and json must be files in a folder that is there; got nowhere/x.png."),
        (("--save", "x.pdf"), "save's ending must be one of .png, .svg, .html; got '.pdf'."),
        (("--recipe", "r.py", "--seq-len", 256), "recipe must come with a run or a checkpoint of it; got"),
        (("--window", 64), "window must be given for perplexity alone; got 64 for lines."),
        (("--task", "perplexity", "--data", ".", "--window", 7), "window must be even, and not longer than 512"),
        (("--task", "perplexity", "--data", ".", "--window", 1024), "window must be even, and not longer than 512"),
        (("--task", "passkey", "--hard-negatives"), "hard-negatives must be given for lines alone; got passkey."),
        (("--dtype", "float16"), "dtype must be one of float32, bfloat16; got 'float16'."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(llama, arguments, words):
    assert f"ringspun eval: {words}" in told(llama, *arguments, code=2)


def test_a_place_that_holds_no_model(tmp_path):
    assert "model must be a run's folder, a checkpoint's (step-...), or a Hugging Face" in told(tmp_path, code=2)
