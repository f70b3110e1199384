"""What is in a checkpoint's folder: size and SHA-256 of every file, written last, compared before it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST, STATE, SHARDS = "manifest.json", "state.json", "shards"
REQUIRED = (STATE, "model/model.safetensors", "optimizer.safetensors", "rng.safetensors")
"""What one that rank 0 wrote must have; one that all ranks wrote has `SHARDS` instead of the last three."""


def files(path: Path) -> Iterator[Path]:
    """All that is in a checkpoint but its folders and its manifest; links too, wherever they lead."""
    found = (file for file in sorted(path.rglob("*")) if file.is_symlink() or not file.is_dir())
    return (file for file in found if file != path / MANIFEST)


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def write_manifest(path: Path) -> None:
    """Of all that is there."""
    entries = {file.relative_to(path).as_posix(): _entry(file) for file in files(path)}
    (path / MANIFEST).write_text(json.dumps(entries, indent=1))


def manifest_fault(path: Path, entries: Any) -> str | None:
    """What does not fit a manifest's `entries`, or None."""
    if not isinstance(entries, dict):
        return f"its {MANIFEST} is no list of files by name"
    found = [file.relative_to(path).as_posix() for file in files(path)]
    shared = any(name.startswith(f"{SHARDS}/") for name in entries)
    for name in (*((STATE,) if shared else REQUIRED), *entries, *found):
        if name not in entries:
            return f"{name} is not in its {MANIFEST}"
        if not (path / name).is_file():
            return f"{name} is missing"
        if name not in found:
            return f"{name}, in its {MANIFEST}, is no file of it"
    return next((fault for name in found if (fault := _file_fault(path / name, name, entries[name]))), None)


def _file_fault(file: Path, name: str, entry: Any) -> str | None:
    try:
        return None if _entry(file) == entry else f"{name} is not what its {MANIFEST} says"
    except PermissionError:
        raise
    except OSError as problem:  # a bad sector, say
        return f"{name} cannot be read ({problem.strerror or problem})"
