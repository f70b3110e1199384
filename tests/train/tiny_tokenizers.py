"""Tokenizers of bytes and a few special tokens, made here: nothing is downloaded."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""No marks: turns are found by rendering."""

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}"
)

FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if loop.last %}{{ message['content'] }}"
    "{% else %}{{ message['content'].split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Strips the reasoning of all turns but the last, as some templates do."""


def byte_tokenizer(chat_template: str | None = None, **more: Any) -> Any:
    """A token a byte, and SPECIAL after them; the first ends documents. It has no pad token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[0], chat_template=chat_template, **more
    )
