"""The `[data]` table of a training config: what is read, and how it becomes tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ringspun.train.data.packing import Overflow
from ringspun.train.sections import Section

Format = Literal["bytes", "text", "jsonl", "parquet", "dataset"]
_FILES = ("suffixes", "skip_folders")
_TOKENS = ("tokenizer", "overflow", "pool_documents")
_ROWS = ("text_field", "messages_field", "overflow_conversations")
_READ_BY: dict[Format, tuple[str, ...]] = {
    "bytes": _FILES,
    "text": _FILES + _TOKENS,
    "jsonl": _TOKENS + _ROWS,
    "parquet": _TOKENS + _ROWS,
    "dataset": _TOKENS + _ROWS,
}
"""Which keys have an effect; the others have one in every format."""


def _paths(given: Any) -> Any:
    """One path or several."""
    several = given if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(one, str | Path) for one in several):
        raise ValueError(f"path must be a text or a list of texts; got {given!r}.")
    return tuple(map(Path, several))


def _share_or_path(given: Any) -> Any:
    """A number as it is, a text as a path."""
    if isinstance(given, bool) or not isinstance(given, int | float | str | Path):
        raise ValueError(f"held_out must be a share of at least 0 and below 1, or a path; got {given!r}.")
    return given if isinstance(given, Path) else Path(given) if isinstance(given, str) else float(given)


class DataConfig(Section):
    """The `[data]` table. Its paths are from the config's folder on."""

    path: Annotated[tuple[Path, ...], BeforeValidator(_paths)] = Field(
        default=(), strict=False, description="Files or folders, one or several; `--data` replaces them."
    )
    format: Format = Field(
        default="bytes",
        description="bytes, text: text files, a document each, as bytes or by `tokenizer`. jsonl, parquet: a document "
        "a line or row. dataset: a folder written by Hugging Face's `save_to_disk`. See "
        "[from the command line](data.md#from-the-command-line).",
    )
    tokenizer: Path | None = Field(
        default=None,
        strict=False,
        description="Folder of a Hugging Face tokenizer. Rows that are tokens already need none.",
    )
    text_field: str | None = Field(
        default=None, min_length=1, description="Key of the rows' text. Default: `text`, where a row has it."
    )
    messages_field: str | None = Field(
        default=None,
        min_length=1,
        description="Key of the rows' conversations, of which the assistant's turns are learnt. Default: `messages`, "
        "where a row has it.",
    )
    overflow: Overflow = Field(
        default="split",
        description="What becomes of a document longer than a sequence; see "
        "[what does not fit](data.md#what-does-not-fit).",
    )
    overflow_conversations: Overflow = Field(
        default="error", description="What becomes of a conversation longer than a sequence."
    )
    held_out: Annotated[float | Path, BeforeValidator(_share_or_path)] = Field(
        default=0.0,
        description="What is never trained on but evaluated: a share of the documents, below 1, whatever the seed; "
        "or a path.",
    )
    pool_documents: int = Field(
        default=256,
        gt=0,
        description="Documents to choose from where sequences are packed by best fit; each rank keeps their tokens.",
    )
    suffixes: tuple[str, ...] = Field(
        default=(".md", ".py", ".txt"),
        strict=False,
        min_length=1,
        description="Endings of the text files to read in a folder; a single file is read whatever its name.",
    )
    skip_folders: tuple[str, ...] = Field(
        default=("__pycache__",),
        strict=False,
        description="Names of folders to leave out, wherever they are. Hidden folders always are.",
    )

    @field_validator("held_out")
    @classmethod
    def _is_a_share(cls, value: float | Path) -> float | Path:
        if isinstance(value, float) and not 0 <= value < 1:
            raise ValueError(f"held_out must be a share of at least 0 and below 1, or a path; got {value}.")
        return value

    @model_validator(mode="after")
    def _every_key_has_an_effect(self) -> Self:
        for name in sorted({name for names in _READ_BY.values() for name in names} - set(_READ_BY[self.format])):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                formats = " or ".join(repr(kind) for kind, names in _READ_BY.items() if name in names)
                raise ValueError(
                    f"{name} must not be given with format = {self.format!r}, where it has no effect; got "
                    f"{str(value) if isinstance(value, Path) else value!r}. Remove it, or set format = {formats}."
                )
        return self
