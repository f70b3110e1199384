"""From the `[data]` table of a config to what a run trains on; every file is read once, so that a bad one is found
before any rank starts and a changed one when the run goes on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringspun.errors import ConfigError, DataError, MissingExtra
from ringspun.train.data.contents import Contents, read_whole
from ringspun.train.data.text import Corpus, TrainingData, find_text, prefixed
from ringspun.train.data.views import Renamed, Some, held_out

if TYPE_CHECKING:
    from ringspun.train.config import TrainConfig
    from ringspun.train.data.config import DataConfig
    from ringspun.train.data.sources import Source

_SUFFIXES = {"jsonl": ".jsonl", "parquet": ".parquet"}


def open_data(config: TrainConfig, paths: Sequence[Path] = ()) -> TrainingData:
    """What a run trains on.

    Args:
        config: the run. paths: instead of its `data.path`.
    Raises:
        ConfigError: no path, or a tokenizer that is missing or cannot be loaded. DataError: naming the file (and line)
            that is missing, empty or cannot be read. MissingExtra: pyarrow or datasets is needed.
    """
    paths = tuple(paths) or config.data.path
    if not paths:
        raise ConfigError("data must be given. Write --data PATH, or path = ... in the config's [data].")
    if config.data.format == "bytes":
        return _bytes(config.data, paths)
    return _packed(config, paths)


def _bytes(data: DataConfig, paths: Sequence[Path]) -> Corpus:
    corpus = _text(data, paths)
    if isinstance(data.held_out, Path):
        held = _text(data, [data.held_out])
        _refuse_both(_paths_of(corpus), _paths_of(held))
        return replace(corpus, held=held)
    if not data.held_out:
        return corpus
    chosen = held_out(len(corpus.names), data.held_out)
    return replace(corpus.some(~chosen), held=corpus.some(chosen))


def _text(data: DataConfig, paths: Sequence[Path]) -> Corpus:
    return Corpus.joined([find_text(one, suffixes=data.suffixes, skip_folders=data.skip_folders) for one in paths])


def _paths_of(corpus: Corpus) -> list[Path]:
    return [corpus.path(i) for i in range(len(corpus.names))]


def _packed(config: TrainConfig, paths: Sequence[Path]) -> TrainingData:
    from ringspun.train.data.packed import PackedData  # heavy: torch
    from ringspun.train.data.vocabulary import model_vocabulary, tokenizer_folder

    data, folder = config.data, tokenizer_folder(config)
    if data.format == "text" and folder is None:
        raise ConfigError("data.tokenizer must be given with format = 'text'. A folder; or set format = 'bytes'.")
    source, files = _source(data, paths, folder is not None)
    vocab_size = model_vocabulary(config)
    held: Source | None = None
    others: dict[Path, Contents] = {}
    if isinstance(data.held_out, Path):
        held, others = _source(data, [data.held_out], folder is not None)
        _refuse_both(files, others)
    elif data.held_out:
        chosen = held_out(len(source), data.held_out)
        source, held = Some(source, ~chosen), Some(source, chosen)
    return PackedData(
        source,
        _named(files) | prefixed("held out", _named(others)) | _tokenizer_files(folder),
        held,
        folder,
        vocab_size,
        overflow=data.overflow,
        overflow_conversations=data.overflow_conversations,
        pool_documents=data.pool_documents,
    )


def _source(data: DataConfig, paths: Sequence[Path], has_tokenizer: bool) -> tuple[Source, dict[Path, Contents]]:
    """The documents, and what was in each of their files."""
    from ringspun.train.data import sources

    if data.format == "text":
        corpus = _text(data, paths)
        return sources.TextFiles(corpus), dict(zip(_paths_of(corpus), corpus.contents, strict=True))
    files: dict[Path, Contents]
    if data.format == "dataset":
        source, files = _data_set(paths)
    else:
        found = _files(paths, _SUFFIXES[data.format])
        if data.format == "jsonl":
            lines = sources.JsonLines(found)
            source, files = lines, dict(zip(found, lines.contents, strict=True))
        else:
            source, files = sources.Parquet(found), {path: read_whole(path) for path in found}
    if data.text_field is not None or data.messages_field is not None:
        source = Renamed(source, text=data.text_field, messages=data.messages_field)
    _look_at(source, rows=len(source) if data.format == "jsonl" else 1, has_tokenizer=has_tokenizer)
    return source, files


def _files(paths: Sequence[Path], suffix: str) -> list[Path]:
    """The files of one kind, sorted: all in folders that are called so, and others whatever they are called."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"data must exist; got {path}. Give a file or a folder.")
        inside = sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"data must hold {suffix} files; {path} has none. Give another folder, or set data.format.")
        found += inside
    seen: set[Path] = set()
    for path in found:
        if not path.is_file():
            raise DataError(f"{path}: data must be a regular file. Remove it, or give files by name.")
        if path.resolve() in seen:
            raise DataError(f"data must name each file once; got {path} twice. Leave one out.")
        seen.add(path.resolve())
    return sorted(found, key=os.path.abspath)


def _data_set(paths: Sequence[Path]) -> tuple[Source, dict[Path, Contents]]:
    from ringspun.train.data.sources import DataSet

    try:
        import datasets
    except ImportError as problem:
        raise MissingExtra("data sets must find datasets; install it: pip install 'ringspun[data]'.") from problem
    parts = []
    for path in sorted(paths, key=os.path.abspath):
        try:
            part = datasets.load_from_disk(str(path))
        except Exception as problem:  # it raises what it likes
            raise DataError(f"{path}: data must be a folder of datasets' save_to_disk; {problem}") from None
        if isinstance(part, datasets.DatasetDict):
            first = path / next(iter(part))
            raise DataError(f"{path}: data must be one split; it has {', '.join(part)}. Give {first}, say.")
        parts.append(part)
    rows: Any = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    if len(rows) == 0:
        raise DataError(f"data must hold at least one row; got none in {', '.join(map(str, paths))}.")
    files = sorted(file for path in paths for file in path.rglob("*") if file.is_file())
    return DataSet(rows), {file: read_whole(file) for file in files}


def _look_at(source: Source, *, rows: int, has_tokenizer: bool) -> None:
    """Reads rows once, of lines all, so that a wrong one does not end a run of days."""
    from ringspun.train.data.samples import INPUT_IDS, kind_of

    for index, row in enumerate(islice(source, rows)):
        try:
            kind = kind_of(row)
        except DataError as problem:
            raise DataError(
                f"{source.where(index)}: {problem} Or name the key: data.text_field, data.messages_field."
            ) from None
        if kind != INPUT_IDS and not has_tokenizer:
            raise ConfigError(f"data.tokenizer must be given for rows of {kind}; {source.where(index)} is one.")


def _refuse_both(trained: Iterable[Path], held: Iterable[Path]) -> None:
    both = {path.resolve() for path in trained} & {path.resolve() for path in held}
    if both:
        raise DataError(f"held_out must be files that are not trained on; {min(both)} is in both. Move it out of one.")


def _named(files: Mapping[Path, Contents]) -> dict[str, Contents]:
    """By names that stay the same when everything moves: relative to the folder that the files have in common."""
    if not files:
        return {}
    paths = [os.path.abspath(path) for path in files]
    root = os.path.commonpath(paths) if len(paths) > 1 else os.path.dirname(paths[0])
    return {Path(path).relative_to(root).as_posix(): one for path, one in zip(paths, files.values(), strict=True)}


def _tokenizer_files(folder: Path | None) -> dict[str, Contents]:
    """A tokenizer that changed means other tokens; the weights beside it do not matter."""
    from ringspun.train.init import tokenizer_files

    return prefixed("tokenizer", {path.name: read_whole(path) for path in tokenizer_files(folder)})
