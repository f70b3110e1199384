"""Tables of a TOML file as frozen values, and what is wrong with one in the user's terms."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from ringspun.errors import ConfigError

C = TypeVar("C", bound=BaseModel)


class Section(BaseModel):
    """A table of a config: frozen, nothing unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def validated(kind: type[C], values: Mapping[str, Any], *, source: str) -> C:
    """A config of that kind, with every fault of `values` said in the user's terms.

    Raises:
        ConfigError: naming `source` and the dotted key, and for an unknown key the nearest known one.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as problem:
        lines = [_explain(error, kind) for error in problem.errors(include_url=False)]
        raise ConfigError("\n".join(f"{source}: {line}" for line in lines)) from None


def _explain(error: Any, root: type[BaseModel]) -> str:
    """One of pydantic's errors in the user's terms."""
    keys = [str(part) for part in error["loc"]]
    name = ".".join(keys)
    if error["type"] == "extra_forbidden":
        return _unknown(keys, root, is_table=isinstance(error["input"], dict))
    if error["type"] == "missing":
        field = _section(keys[:-1], root).model_fields[keys[-1]]
        return f"key {name!r} must be given. {field.description or ''}".rstrip()
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{name}: {message}" if name else str(message)
    return f"{name}: {message[0].lower()}{message[1:]}; got {error['input']!r}."


def _unknown(keys: list[str], root: type[BaseModel], *, is_table: bool) -> str:
    """Names the nearest key, or the nearest table for a table; all of them where none is near."""
    fields = _section(keys[:-1], root).model_fields
    known = [k for k, f in fields.items() if _is_section(f.annotation) == is_table]
    near = difflib.get_close_matches(keys[-1], known, 1)
    what, name = "table" if is_table else "key", ".".join(keys)
    if near:
        return f"unknown {what} {name!r}; the nearest is {'.'.join([*keys[:-1], *near])!r}. Rename or remove it."
    place = f" of [{'.'.join(keys[:-1])}]" if keys[:-1] else ""
    return f"unknown {what} {name!r}; the {what}s{place} are: {', '.join(known) or 'none'}. Rename or remove it."


def _is_section(kind: Any) -> bool:
    """Whether a field is a table, perhaps one that may be left out."""
    return isinstance(_bare(kind), type) and issubclass(_bare(kind), BaseModel)


def _bare(kind: Any) -> Any:
    """The one table among the members of an optional field's union; else the kind itself."""
    tables = [member for member in get_args(kind) if isinstance(member, type) and issubclass(member, BaseModel)]
    return tables[0] if isinstance(kind, UnionType) and len(tables) == 1 else kind


def _section(keys: list[str], root: type[BaseModel]) -> type[BaseModel]:
    section: Any = root
    for key in keys:  # a number: an entry of a list of tables
        section = get_args(section)[0] if key.isdigit() else _bare(section.model_fields[key].annotation)
    return section  # type: ignore[no-any-return]
