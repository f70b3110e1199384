"""The tokens of a run: bytes, or a tokenizer's; and whether its model knows them all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringspun.errors import ConfigError
from ringspun.train.data.text import END_OF_DOCUMENT, VOCAB_SIZE
from ringspun.train.init import check_init, tokenizer_files

if TYPE_CHECKING:
    from ringspun.train.config import TrainConfig
    from ringspun.train.data.samples import Encoder


@dataclass(frozen=True)
class Vocabulary:
    """What is known of the tokens before they are read.

    Args:
        size: how many token numbers there are; None: rows bring their own. end: the token that ends a document.
    """

    size: int | None
    end: int | None


def vocabulary_of(config: TrainConfig) -> Vocabulary:
    """The tokens of a run's data.

    Raises:
        ConfigError: the tokenizer cannot be loaded.
    """
    if config.data.format == "bytes":
        return Vocabulary(VOCAB_SIZE, END_OF_DOCUMENT)
    folder = tokenizer_folder(config)
    if folder is None:
        return Vocabulary(None, None)
    tokenizer = load_tokenizer(folder)
    return Vocabulary(len(tokenizer), tokenizer.eos_token_id)


def tokenizer_folder(config: TrainConfig) -> Path | None:
    """Where a run's tokenizer is: where the data says, or in the checkpoint that it starts from."""
    given = config.data.tokenizer
    return config.init if given is None and tokenizer_files(config.init) else given


def model_vocabulary(config: TrainConfig) -> int | None:
    """How many token numbers a run's model knows.

    Raises:
        ConfigError: fewer than the data's tokens, or nothing says how many; bytes for a checkpoint with a tokenizer.
    """
    size = vocabulary_of(config).size
    if config.init is not None:
        return _of_checkpoint(config, config.init, size)
    given = None if config.model is None else config.model.vocab_size
    if size is None and given is None and config.model is not None:
        raise ConfigError("model.vocab_size must be given for rows of tokens. Or set data.tokenizer.")
    if size is not None and given is not None and given < size:
        raise ConfigError(f"model.vocab_size must be at least the {size} tokens of the data; got {given}. Raise it.")
    return given or size


def _of_checkpoint(config: TrainConfig, folder: Path, size: int | None) -> int | None:
    if config.data.format == "bytes" and tokenizer_files(folder):
        raise ConfigError(
            f"data.format must not be 'bytes' with init = {folder}, whose tokenizer knows other tokens. Set 'text', or "
            "what the data is."
        )
    values = check_init(folder)
    known = values.get("vocab_size") or (values.get("text_config") or {}).get("vocab_size")
    own = tokenizer_folder(config) == folder  # which may know tokens of pictures, say, that rows of text do not have
    if size is not None and isinstance(known, int) and known < size and not own:
        raise ConfigError(
            f"init must know the {size} tokens of the data; {folder} has {known}. Give its own tokenizer."
        )
    return known


@lru_cache(maxsize=4)
def load_tokenizer(folder: Path) -> Any:
    """A Hugging Face tokenizer of a local folder; nothing is downloaded, no code of the folder is run.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ConfigError(f"tokenizer must be a folder with a Hugging Face tokenizer; got {folder}.")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as problem:  # it raises what it likes
        reason = str(problem).partition("\n")[0].rstrip(" .:")
        raise ConfigError(
            f"tokenizer must be loadable from {folder}; {type(problem).__name__}: {reason}. Give a folder that "
            "save_pretrained wrote."
        ) from None


def encoder_of(folder: Path | None, *, vocab_size: int | None = None) -> Encoder:
    """How rows become tokens: texts begin as the tokenizer begins them, and end with its end-of-text token."""
    from ringspun.train.data.samples import Encoder

    if folder is None:
        return Encoder(vocab_size=vocab_size)
    tokenizer = load_tokenizer(folder)
    empty = list(tokenizer("")["input_ids"])
    begins = empty[:1] == [tokenizer.bos_token_id]
    return Encoder(tokenizer, begin=tokenizer.bos_token_id if begins else None, vocab_size=vocab_size)
