"""Held-out documents as sequences of one length, for the loss by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringspun.errors import DataError
from ringspun.evaluation.exam import Tokens, bytes_of
from ringspun.train.data.samples import Encoder
from ringspun.train.data.sources import open_source
from ringspun.train.data.text import END_OF_DOCUMENT


class ByteTokenizer:
    """Bytes as tokens, and the end of a document, as the models of a config have them."""

    eos_token_id = END_OF_DOCUMENT

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Sequence[int]:
        """A token a byte."""
        return bytes_of(text)


def held_out(data: Path, tokenizer: Any, *, seq_len: int, sequences: int, seed: int) -> tuple[list[Tokens], int]:
    """Sequences of exactly `seq_len` tokens, and how many of them are the beginning of one document.

    Documents that are long enough come first, in an order drawn from the seed, each cut to its first `seq_len` tokens.
    Where there are too few, the others are joined, one behind the other, and cut.

    Args:
        data: a text, JSON lines or Parquet file, or a folder of them. tokenizer: as `Encoder` takes it.
    Raises:
        DataError: too few tokens, or data that cannot be read.
    """
    source, encoder = open_source(data), Encoder(tokenizer)
    whole: list[Tokens] = []
    rest: list[Tokens] = []
    for index in source.order([seed]).tolist():
        ids = np.asarray(encoder.named(source[index], source.where(index)).fields["input_ids"], np.int64)
        if len(ids) >= seq_len:
            whole.append(ids[:seq_len])
        elif sum(map(len, rest)) < sequences * seq_len:
            rest.append(ids)
        if len(whole) == sequences:
            return whole, sequences
    joined = np.concatenate([np.zeros(0, np.int64), *rest])
    missing = sequences - len(whole)
    if len(joined) < missing * seq_len:
        raise DataError(
            f"data must hold {sequences} sequences of {seq_len:,} tokens; {data} has {len(whole)} of that length "
            f"and {len(joined):,} tokens in shorter documents. Give more data, fewer sequences or a shorter length."
        )
    return whole + list(joined[: missing * seq_len].reshape(missing, seq_len)), len(whole)
