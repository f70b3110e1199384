"""One document as tokens: what an `Encoder` makes of a string, a list of tokens, a row of a data set or a conversation.

Every field has one value per token. Labels are *not* shifted: the label of a token is the token itself, or -100 where
nothing shall be learnt from predicting it. The shift comes later, inside documents (`Partition.shard_batch`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ringspun.errors import DataError
from ringspun.train.data.conversations import check_template, conversation
from ringspun.train.losses.loss import IGNORED

INPUT_IDS, LABELS, LOSS_WEIGHTS, MESSAGES, TEXT = "input_ids", "labels", "loss_weights", "messages", "text"
_MADE_HERE = (INPUT_IDS, LABELS, LOSS_WEIGHTS, MESSAGES, TEXT, "position_ids", "attention_mask")
_MADE_LATER: tuple[str, ...] = ("document_lengths", "schedules", "counts", "sequences", "state")  # of a batch
_MADE_LATER += ("shift_labels", "shift_loss_weights", "num_items_in_batch", "total_loss_weight")  # of a shard
_PROBE = "The quick brown fox, 0123456789;\n\tdef f(x): return x ** 2  # Übergrößen, 素早い茶色の狐"


@dataclass(frozen=True)
class Sample:
    """One document, or a piece of one.

    Args:
        fields: arrays ``[n]`` of one length: `input_ids` and `labels` (int64), and perhaps `loss_weights` (float32) and
            declared ones. whole: a conversation, which is cut only by a policy of its own.
    Raises:
        DataError: fields of different lengths.
    """

    fields: Mapping[str, NDArray[Any]]
    whole: bool = False

    def __post_init__(self) -> None:
        for name, values in self.fields.items():
            if values.shape != (len(self),):
                raise DataError(
                    f"{name} must have one value for each of the {len(self)} tokens of input_ids; "
                    f"got shape {values.shape}."
                )

    def __len__(self) -> int:
        return len(self.fields[INPUT_IDS])

    def cut(self, start: int, stop: int) -> Sample:
        """Tokens [start, stop)."""
        return Sample({name: values[start:stop] for name, values in self.fields.items()}, self.whole)


@dataclass(frozen=True)
class Encoder:
    """Turns rows into samples. A row is a string, a list or array of tokens, or a dict with one of these keys:

    - `text`: a string. - `messages`: a conversation (`ringspun.train.data.conversations`). - `input_ids`: tokens; then
    also `labels` (-100: no target), `loss_weights` (of predicting the token) and the fields declared here.

    Args:
        tokenizer: Hugging Face's, or anything with ``encode(text, add_special_tokens=False)``; for strings. It needs no
            pad token.
        begin, end: separators, put before and after every string and list of tokens (a dict with `input_ids` and a
            conversation are taken as they are). `end` defaults to the tokenizer's `eos_token_id`; None: none.
        fields: other fields of rows with `input_ids` that have one value per token, each with its value on padding.
            Undeclared ones are refused; strings, numbers and dicts beside the tokens are metadata and left out.
            `loss_weights` may be declared too: every batch then has them, 1 where a row has none.
        template: more arguments of the tokenizer's `apply_chat_template` (`tools`, `chat_template`, ...), none that
            cuts (`truncation`, `max_length`) or says what it returns.
        vocab_size: how many token numbers the model knows; others are then refused.
    Raises:
        DataError: a field's name that is taken, an argument of the template that is refused.
    """

    tokenizer: Any = None
    begin: int | None = None
    end: int | Literal["eos"] | None = "eos"
    fields: Mapping[str, float] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        taken = [name for name in self.fields if name in _MADE_HERE + _MADE_LATER and name != LOSS_WEIGHTS]
        if taken:
            raise DataError(f"fields must not be called {taken[0]!r}, which is made here. Rename it in the data.")
        check_template(self.template)
        if self.end == "eos":
            object.__setattr__(self, "end", getattr(self.tokenizer, "eos_token_id", None))

    @property
    def pad_id(self) -> int:
        """The tokenizer's pad token, or 0 where it has none or the model does not know it: padding belongs to no
        document, so any token does."""
        token = int(getattr(self.tokenizer, "pad_token_id", None) or 0)
        return token if self.vocab_size is None or token < self.vocab_size else 0

    def identity(self) -> list[str]:
        """Says whether rows become the same tokens elsewhere; a tokenizer is judged by what it makes of a text."""
        probe = [] if self.tokenizer is None else self._tokens(_PROBE).tolist()
        chat = getattr(self.tokenizer, "chat_template", None)
        return [f"{self.begin} {self.end} {dict(self.fields)} {dict(self.template)}", f"{probe}", f"{chat}"]

    def __call__(self, row: Any) -> Sample:
        """The sample of one row.

        Raises:
            DataError: a row that is none of the above, an undeclared field, or a string without a tokenizer.
        """
        if isinstance(row, Sample):
            return row
        if isinstance(row, Mapping):
            return self._of_mapping(row)
        return self._separated(self._tokens(row) if kind_of(row) == TEXT else _integers(INPUT_IDS, row))

    def named(self, row: Any, where: str) -> Sample:
        """The sample of one row, whose name, such as ``document 3 (a.jsonl, line 4)``, begins its errors.

        Raises:
            DataError: as where it is called; also for what numpy or the tokenizer cannot read.
        """
        try:
            return self._known(self(row))
        except DataError as problem:
            raise DataError(f"{where}: {problem}") from problem
        except (TypeError, ValueError, OverflowError) as problem:
            raise DataError(f"{where}: it must be readable; {type(problem).__name__}: {problem}") from problem

    def _known(self, sample: Sample) -> Sample:
        tokens = sample.fields[INPUT_IDS]
        odd = tokens[(tokens < 0) | (tokens >= self.vocab_size)] if self.vocab_size is not None else tokens[:0]
        if len(odd):
            raise DataError(
                f"{INPUT_IDS} must be at least 0 and below the model's {self.vocab_size}; got {odd[0]}. Give the "
                "tokenizer's model, or a larger vocab_size."
            )
        return sample

    def _tokens(self, text: str) -> NDArray[np.int64]:
        if self.tokenizer is None:
            raise DataError("encoder must have a tokenizer for strings; got none. Write Encoder(tokenizer).")
        return _integers(INPUT_IDS, self.tokenizer.encode(text, add_special_tokens=False))

    def _separated(self, tokens: NDArray[np.int64]) -> Sample:
        """A document with its separators; an empty one stays empty."""
        if len(tokens):
            before, after = ([] if one is None else [one] for one in (self.begin, self.end))
            tokens = np.concatenate([np.array(before, np.int64), tokens, np.array(after, np.int64)])
        return Sample({INPUT_IDS: tokens, LABELS: tokens})

    def _of_mapping(self, row: Mapping[str, Any]) -> Sample:
        kind = kind_of(row)
        for name in (LABELS, LOSS_WEIGHTS, *self.fields):
            if kind != INPUT_IDS and _is_sequence(row.get(name)):
                raise DataError(f"{name} must come with input_ids, whose tokens they are of; got {kind}. Leave it out.")
        if kind == TEXT:
            return self(row[TEXT]) if isinstance(row[TEXT], str) else _refuse_text(row[TEXT])
        if kind == MESSAGES:
            tokens, learnt = conversation(self.tokenizer, row[MESSAGES], **self.template)
            return Sample({INPUT_IDS: tokens, LABELS: np.where(learnt, tokens, IGNORED)}, whole=True)
        return self._of_tokens(row)

    def _of_tokens(self, row: Mapping[str, Any]) -> Sample:
        tokens = _integers(INPUT_IDS, row[INPUT_IDS])
        made: dict[str, NDArray[Any]] = {INPUT_IDS: tokens}
        made[LABELS] = tokens if row.get(LABELS) is None else _integers(LABELS, row[LABELS])
        if row.get(LOSS_WEIGHTS) is not None:
            made[LOSS_WEIGHTS] = np.asarray(row[LOSS_WEIGHTS], np.float32)
            if not np.isfinite(made[LOSS_WEIGHTS]).all():
                raise DataError("loss_weights must be finite numbers; got NaN or Inf.")
        for name, values in row.items():
            if name in self.fields and name != LOSS_WEIGHTS:
                made[name] = np.asarray(values)
            elif name not in _MADE_HERE and _is_sequence(values):
                raise DataError(
                    f"{name} must be declared to be packed with the tokens; it was not. "
                    f"Write Encoder(..., fields={{{name!r}: <its value on padding>}}), or remove it from the rows."
                )
        missing = [name for name in self.fields if name not in made and name != LOSS_WEIGHTS]
        if missing:
            raise DataError(f"every row must have the declared fields; got one without {missing[0]!r}.")
        _check_left_out(row, len(tokens))
        return Sample(made)


def kind_of(row: Any) -> str:
    """What a row is: `INPUT_IDS`, `MESSAGES` or `TEXT`.

    Raises:
        DataError: none of these, or several.
    """
    if isinstance(row, Mapping):
        kinds = [key for key in (INPUT_IDS, MESSAGES, TEXT) if row.get(key) is not None]
        if len(kinds) == 1:
            return kinds[0]
        raise DataError(
            f"a row must have exactly one of {INPUT_IDS!r}, {MESSAGES!r} and {TEXT!r}; got {sorted(row)}. "
            "Rename or remove columns."
        )
    if isinstance(row, str) or _is_sequence(row):
        return TEXT if isinstance(row, str) else INPUT_IDS
    raise DataError(
        f"documents must be strings, lists of tokens or dicts; got {type(row).__name__}. "
        f"A dict has {TEXT!r}, {MESSAGES!r} or {INPUT_IDS!r}."
    )


def _refuse_text(value: Any) -> Sample:
    raise DataError(f"text must be a string; got {type(value).__name__}. A list of tokens is called {INPUT_IDS!r}.")


def _check_left_out(row: Mapping[str, Any], tokens: int) -> None:
    """Tokenizers give an attention mask along; ours is the documents, which know no padding inside and no holes."""
    mask = row.get("attention_mask")
    if mask is not None and not (np.shape(mask) == (tokens,) and bool(np.all(np.asarray(mask) == 1))):
        raise DataError("attention_mask must be all ones: a document has no padding. Cut the padding off.")
    positions = row.get("position_ids")
    if positions is not None and not np.array_equal(np.asarray(positions), np.arange(tokens)):
        raise DataError("position_ids must be left out, or count from 0: the collator makes them. Remove the column.")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray | Tensor) and not isinstance(value, str | bytes)


def _integers(name: str, values: Any) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{name} must be one list of integers; got {array.dtype}, shape {array.shape}.")
    return array.astype(np.int64)
