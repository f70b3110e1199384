"""Reading what people write: TOML and JSON files, names, and what is wrong with them, in their terms."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ringspun.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


class Entry(BaseModel):
    """What every record of the planner is: frozen, and strict about names and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def read(path: Path, what: str) -> Mapping[str, Any]:
    """The table that a TOML or JSON file (by its ending) holds.

    Raises:
        ConfigError: there is none, or it is neither.
    """
    parse: Callable[[str], Any] = json.loads if path.suffix == ".json" else tomllib.loads
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ConfigError(f"{what} must be a readable file; got {path}: {reason}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{what} must hold a table; got {path}, which holds a {type(values).__name__}.")
    return values


def checked(kind: type[M], values: Mapping[str, Any], where: str) -> M:
    """A record made of `values`.

    Raises:
        ConfigError: one line for each value that is wrong, missing or unknown.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as problem:
        lines = [f"{where}: {_explain(kind, error)}" for error in problem.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from None


def _explain(kind: type[BaseModel], error: Any) -> str:
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{name} must be given. {kind.model_fields[name].description or ''}".rstrip()
    if error["type"] == "extra_forbidden":
        return unknown("key", name, kind.model_fields)
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{name}: {message}" if name else str(message)
    return f"{name} must be right: {message[0].lower()}{message[1:]}; got {error['input']!r}."


def squeezed(name: str) -> str:
    """A name without case, blanks and dashes: people write H100, h100 and h-100."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """What to say to a name that nobody knows: the nearest, or all."""
    names = list(known)
    by_squeezed = {squeezed(n): n for n in names}
    near = [by_squeezed[n] for n in difflib.get_close_matches(squeezed(name), by_squeezed, 3, 0.5)]
    offer = f"The nearest: {', '.join(near)}." if near else f"Known: {', '.join(names)}."
    return f"{what} must be a known one; got {name[:80]!r}. {offer}"
