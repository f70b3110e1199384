"""What becomes of one document: separators, labels, fields, and which tokens of a conversation are learnt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_tokenizers import CHATML, FORGETFUL, MARKED, byte_tokenizer

from ringspun.errors import DataError
from ringspun.train.data.conversations import conversation
from ringspun.train.data.samples import Encoder, Sample
from ringspun.train.losses.loss import IGNORED

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Uno."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Dos."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def learnt_text(tokenizer, messages, **template) -> str:
    tokens, learnt = conversation(tokenizer, messages, **template)
    return tokenizer.decode(tokens[learnt])


def test_a_text_gets_the_tokenizers_end_and_nothing_else(tokenizer):
    sample = Encoder(tokenizer)("abc ü")
    assert tokenizer.decode(sample.fields["input_ids"]) == "abc ü<|end|>"
    assert np.array_equal(sample.fields["labels"], sample.fields["input_ids"]) and not sample.whole
    assert np.array_equal(
        Encoder(tokenizer)({"text": "abc ü", "url": "x"}).fields["input_ids"], sample.fields["input_ids"]
    )


def test_separators_are_those_asked_for(tokenizer):
    bare = Encoder(tokenizer, end=None)("ab").fields["input_ids"].tolist()
    assert Encoder(tokenizer, begin=5, end=6)("ab").fields["input_ids"].tolist() == [5, *bare, 6]
    assert Encoder(begin=5)([1, 2]).fields["input_ids"].tolist() == [5, 1, 2]
    assert Encoder()(np.array([1, 2], np.uint16)).fields["input_ids"].tolist() == [1, 2]
    assert Encoder()(torch.tensor([1, 2])).fields["input_ids"].tolist() == [1, 2]
    assert len(Encoder(tokenizer)("")) == len(Encoder(tokenizer)([])) == 0
    assert Encoder(tokenizer)({"input_ids": [1, 2]}).fields["input_ids"].tolist() == [1, 2]  # taken as it is


def test_a_tokenizer_needs_no_pad_token(tokenizer):
    assert tokenizer.pad_token_id is None and Encoder(tokenizer).pad_id == 0 == Encoder().pad_id
    assert Encoder(byte_tokenizer(pad_token="<|im_end|>")).pad_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_every_field_of_a_row_comes_along_or_is_refused():
    encoder = Encoder(fields={"kinds": 0})
    row = {"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3], "loss_weights": [1, 0.5, 2], "kinds": [7, 8, 9]}
    piece = encoder(row | {"url": "x", "score": 0.5, "meta": {"a": [1]}, "other": None}).cut(1, 3)
    assert {name: values.tolist() for name, values in piece.fields.items()} == {
        "input_ids": [2, 3], "labels": [2, 3], "loss_weights": [0.5, 2], "kinds": [8, 9]
    }  # fmt: skip
    with pytest.raises(DataError, match=r"ends must be declared .*fields=\{'ends': <its value on padding>\}"):
        encoder(row | {"ends": [0, 0, 1]})
    with pytest.raises(DataError, match="got one without 'kinds'"):
        encoder({"input_ids": [1]})
    with pytest.raises(DataError, match="kinds must have one value for each of the 3 tokens"):
        encoder(row | {"kinds": [1, 2]})
    with pytest.raises(DataError, match="fields must not be called 'labels'"):
        Encoder(fields={"labels": 0})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (3, "documents must be strings, lists of tokens or dicts; got int"),
        ({"txt": "a"}, r"exactly one of 'input_ids', 'messages' and 'text'; got \['txt'\]"),
        ({"text": "a", "input_ids": [1]}, "exactly one"),
        ({"text": [1, 2]}, "text must be a string; got list"),
        ({"text": "a", "labels": [1]}, "labels must come with input_ids, whose tokens they are of; got text"),
        ({"messages": [], "loss_weights": [1.0]}, "loss_weights must come with input_ids"),
        ("a text", "encoder must have a tokenizer for strings"),
        ([0.5], "input_ids must be one list of integers; got float64"),
        ([[1], [2]], r"got int64, shape \(2, 1\)"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "attention_mask must be all ones"),
        ({"input_ids": [1, 2], "position_ids": [1, 2]}, "position_ids must be left out, or count from 0"),
        ({"input_ids": [1, 2], "loss_weights": [1, float("nan")]}, "loss_weights must be finite"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels must have one value for each of the 2 tokens"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_row_that_cannot_be_read_is_named(row, words):
    with pytest.raises(DataError, match=words):
        Encoder()(row)


def test_what_tokenizers_give_along_does_no_harm(tokenizer):
    made = tokenizer("abc")
    assert Encoder()({"position_ids": [0, 1, 2], **made}).fields.keys() == {"input_ids", "labels"}


@pytest.mark.parametrize(("template", "after"), [(CHATML, "\n"), (MARKED, "")], ids=["rendered", "marked"])
def test_the_assistants_turns_alone_are_learnt(tokenizer, template, after):
    """Each whole turn with the token that ends it, without the words that ask for it."""
    expected = f"Uno.<|im_end|>{after}Dos.<|im_end|>{after}"
    assert learnt_text(tokenizer, TALK, chat_template=template) == expected
    sample = Encoder(byte_tokenizer(template))({"messages": TALK})
    targets = sample.fields["labels"] != IGNORED
    assert sample.whole and tokenizer.decode(sample.fields["labels"][targets]) == expected
    text = tokenizer.decode(sample.fields["input_ids"])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n") and "<|end|>" not in text
    assert learnt_text(tokenizer, TALK[:2], chat_template=template) == ""  # nobody has answered yet


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    """It would write the first answer without its reasoning: no token of the whole tells where that answer begins."""
    thinking = [dict(m, content=f"<think>hm</think>{m['content']}") if m["role"] == "assistant" else m for m in TALK]
    with pytest.raises(DataError, match="chat template must write message 2 alike whether others follow or not"):
        conversation(tokenizer, thinking, chat_template=FORGETFUL)
    assert learnt_text(tokenizer, thinking[:3], chat_template=FORGETFUL) == "<think>hm</think>Uno.<|im_end|>\n"


def test_bad_conversations_are_named(tokenizer):
    with pytest.raises(DataError, match="must have a tokenizer with a chat template"):
        conversation(tokenizer, TALK)
    with pytest.raises(DataError, match="must have a tokenizer with a chat template"):
        Encoder()({"messages": TALK})
    for messages in ([], "hello", None):
        with pytest.raises(DataError, match="messages must be a list of at least one message"):
            conversation(tokenizer, messages, chat_template=CHATML)
    with pytest.raises(DataError, match=r"messages must be dicts with 'role' and 'content'; got \{'from'"):
        conversation(tokenizer, [{"from": "user"}], chat_template=CHATML)
    with pytest.raises(DataError, match="messages must not begin with the assistant's"):
        conversation(tokenizer, TALK[2:], chat_template=CHATML)
    assert learnt_text(tokenizer, TALK[2:3], chat_template=MARKED) == "Uno.<|im_end|>"
    marks_nothing = MARKED.replace("'assistant'", "'bot'")
    with pytest.raises(DataError, match="must mark the assistant's turns as generated; it marks none"):
        conversation(tokenizer, TALK, chat_template=marks_nothing)
    with pytest.raises(DataError, match="chat template must render these messages; TemplateError: no system"):
        conversation(tokenizer, TALK, chat_template="{{ raise_exception('no system') }}")


def test_more_arguments_reach_the_template(tokenizer):
    template = CHATML.replace("Be brief", "")
    noisy = "{% if loud %}LOUD{% endif %}" + template
    tokens, _ = conversation(tokenizer, TALK, chat_template=noisy, loud=True)
    assert tokenizer.decode(tokens).startswith("LOUD<|im_start|>")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"truncation": True}, "'truncation', which cuts conversations in silence; got True.*overflow_conversations"),
        ({"max_length": 9}, "'max_length', which cuts conversations in silence; got 9"),
        ({"return_dict": False}, "'return_dict', which is set here"),
        ({"return_tensors": "pt"}, "'return_tensors', which is set here"),
        ({"add_generation_prompt": True}, "'add_generation_prompt', which is set here"),
        ({"tokenize": False}, "'tokenize', which is set here"),
        ({"return_assistant_tokens_mask": True}, "'return_assistant_tokens_mask', which is set here"),
    ],
    ids=str,
)
def test_arguments_that_cut_or_break_what_is_read_are_refused(tokenizer, template, words):
    with pytest.raises(DataError, match=words):
        Encoder(tokenizer, template=template)
    with pytest.raises(DataError, match=words):
        conversation(tokenizer, TALK, chat_template=CHATML, **template)


def test_encoders_that_make_other_tokens_are_told_apart(tokenizer):
    names = [Encoder(tokenizer), Encoder(tokenizer, end=3), Encoder(byte_tokenizer(CHATML)), Encoder()]
    assert len({str(one.identity()) for one in names}) == 4
    assert Encoder(tokenizer).identity() == Encoder(byte_tokenizer()).identity()
    with pytest.raises(DataError, match="labels must have one value"):
        Sample({"input_ids": np.arange(3), "labels": np.arange(2)})


@pytest.mark.parametrize("name", ["sequences", "counts", "state", "document_lengths", "shift_labels"])
def test_fields_that_a_batch_would_write_over_are_refused(name):
    with pytest.raises(DataError, match=f"fields must not be called {name!r}"):
        Encoder(fields={name: 0})
