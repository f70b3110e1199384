"""A conversation as tokens, and which of them the assistant wrote: by the tokenizer's own chat template.

Templates that mark what is generated (``{% generation %}``) say it themselves. For others the conversation is rendered
up to before and after each of the assistant's turns. That is right only where each rendering begins with the one
before, which is checked: a template that writes earlier turns otherwise once more follow (some strip the assistant's
reasoning from them) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.errors import DataError

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"
_CUT = ("truncation", "max_length")
_SET_HERE = ("tokenize", "return_dict", "return_tensors", "add_generation_prompt", "return_assistant_tokens_mask")


def conversation(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template: Any
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The tokens of a conversation, and which of them belong to the assistant's turns.

    A turn's tokens are those that the template marks as generated; without marks, all after the prompt for generation
    up to the turn's end as the template writes it.

    Args:
        tokenizer: Hugging Face's, with a chat template. messages: ``[{"role": ..., "content": ...}, ...]``.
        template: more arguments of `apply_chat_template`.
    Returns:
        tokens int64 ``[n]``, and bool ``[n]``.
    Raises:
        DataError: arguments that cut or are set here, no chat template, messages that it cannot render, or one that
            writes earlier turns otherwise later.
    """
    check_template(template)
    if isinstance(messages, str) or not isinstance(messages, Sequence | np.ndarray) or len(messages) == 0:
        raise DataError(f"messages must be a list of at least one message; got {messages!r}.")
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    if None in roles:
        raise DataError(
            f"messages must be dicts with 'role' and 'content'; got {messages[roles.index(None)]!r}. Rename their keys."
        )
    turns = [i for i, role in enumerate(roles) if role == ASSISTANT]
    if _MARK.search(_template(tokenizer, template)):
        return _by_marks(tokenizer, messages, bool(turns), template)
    return _by_rendering(tokenizer, list(messages), turns, template)


def check_template(arguments: Mapping[str, Any]) -> None:
    """Refuses arguments of `apply_chat_template` that would cut conversations in silence, or that are set here."""
    for name in arguments:
        if name in _CUT:
            raise DataError(
                f"template must not have {name!r}, which cuts conversations in silence; got {arguments[name]!r}. Leave "
                "it out: overflow_conversations of the Collator says what becomes of long ones."
            )
        if name in _SET_HERE:
            raise DataError(
                f"template must not have {name!r}, which is set here; got {arguments[name]!r}. Leave it out."
            )


def _template(tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    given = arguments.get("chat_template")
    try:
        return str(tokenizer.get_chat_template(given, tools=arguments.get("tools")))
    except (AttributeError, ValueError) as problem:
        raise DataError(
            f"conversations must have a tokenizer with a chat template; {problem}. "
            "Set tokenizer.chat_template, or write Encoder(..., template={'chat_template': ...})."
        ) from None


def _by_marks(
    tokenizer: Any, messages: Sequence[Any], has_turns: bool, template: Mapping[str, Any]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    made = _render(tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True, **template)
    learnt = np.asarray(made["assistant_masks"], np.bool_)
    if has_turns and not learnt.any():
        raise DataError("chat template must mark the assistant's turns as generated; it marks none of these. Mend it.")
    return np.asarray(made["input_ids"], np.int64), learnt


def _by_rendering(
    tokenizer: Any, messages: list[Any], turns: list[int], template: Mapping[str, Any]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    def tokens(count: int, prompt: bool) -> list[int]:
        made = _render(tokenizer, messages[:count], add_generation_prompt=prompt, return_dict=True, **template)
        return list(made["input_ids"])

    whole = tokens(len(messages), False)
    learnt = np.zeros(len(whole), np.bool_)
    for turn in turns:
        if turn == 0:
            raise DataError(
                "messages must not begin with the assistant's, unless the chat template marks what it says."
            )
        before, after = tokens(turn, True), tokens(turn + 1, False)
        if whole[: len(after)] != after or after[: len(before)] != before:
            raise DataError(
                f"chat template must write message {turn} alike whether others follow or not; it does not, so which "
                "tokens the assistant wrote is unknown. Mark them in the template with "
                "{% generation %} ... {% endgeneration %}, or cut the conversation after that message."
            )
        learnt[len(before) : len(after)] = True
    return np.array(whole, np.int64), learnt


def _render(tokenizer: Any, messages: Sequence[Any], **arguments: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=True, **arguments)
    except Exception as problem:  # templates raise what they like
        raise DataError(f"chat template must render these messages; {type(problem).__name__}: {problem}") from problem
