"""Masks, layouts and routes from their strings, for the command line and for people: ``causal & window(4096)``,
``zigzag``, ``double_ring(4)``.

The strings are Python expressions of names, calls, ``&`` and ``|``; Python's own parser reads them and nothing is ever
evaluated but literals and the names listed here.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ringspun.core import layout as layouts
from ringspun.core import mask as masks
from ringspun.core import route as routes
from ringspun.errors import LayoutError, MaskError, PlanError, RingspunError

V = TypeVar("V")
_SHOWN = 80
"""Characters of a text that an error repeats."""

MASKS: Mapping[str, type[masks.Mask]] = {
    c.__name__.lower(): c
    for c in (
        masks.Full,
        masks.Causal,
        masks.Window,
        masks.Band,
        masks.Documents,
        masks.Prefix,
        masks.Anchors,
        masks.Chunks,
        masks.Keys,
        masks.DocumentPairs,
        masks.Blocks,
    )
}
LAYOUTS: Mapping[str, type[layouts.Layout]] = {
    c.__name__.lower(): c
    for c in (layouts.Contiguous, layouts.Zigzag, layouts.Striped, layouts.DocumentZigzag, layouts.Balanced)
}
ROUTES: Mapping[str, type[routes.Route]] = {
    "ring": routes.Ring,
    "direct": routes.Direct,
    "bidirectional": routes.Bidirectional,
    "double_ring": routes.DoubleRing,
    "all_gather": routes.AllGather,
}


def parse_mask(text: str) -> masks.Mask:
    """The mask that `text` writes, e.g. ``causal & (window(64) | anchors(4))``; ``parse_mask(str(m)) == m``.

    Raises:
        MaskError: naming the column at which the text cannot be read.
    """
    return _parse("mask", text, MASKS, MaskError)


def parse_layout(text: str) -> layouts.Layout:
    """The layout that `text` writes: ``zigzag``, ``striped(128)``, ``balanced(speeds=[1.0, 2.0])``, ...;
    ``parse_layout(str(x)) == x``.

    Raises:
        LayoutError: naming the column at which the text cannot be read.
    """
    return _parse("layout", text, LAYOUTS, LayoutError)


def parse_route(text: str) -> routes.Route:
    """The route that `text` writes: ``ring``, ``direct``, ``bidirectional``, ``double_ring(4)``, ``all_gather``;
    ``parse_route(str(x)) == x``.

    Raises:
        PlanError: naming the column at which the text cannot be read.
    """
    return _parse("route", text, ROUTES, PlanError)


def _parse(kind: str, text: str, names: Mapping[str, type[V]], error: type[RingspunError]) -> V:
    if not isinstance(text, str):
        raise error(f"{kind} must be readable; expected a string, got {text!r}.")
    text = text.strip()
    try:
        return _Reader(kind, names)(_tree(text))  # type: ignore[no-any-return]
    except _Unreadable as problem:
        message, column = _brief(problem.message), _column(text, problem)
    except (RecursionError, MemoryError):  # Python's parser raises either
        message, column = "it is nested too deeply", 0
    raise error(f"{kind} must be readable; {message} at column {column + 1} of {_around(text, column)!r}.")


class _Unreadable(Exception):
    """What is wrong, and where: a line (from 1) and an offset in its UTF-8 bytes, as Python's parser counts."""

    def __init__(self, message: str, line: int, offset: int) -> None:
        self.message, self.line, self.offset = message, line, offset

    @classmethod
    def at(cls, node: ast.expr, message: str) -> _Unreadable:
        return cls(message, node.lineno, node.col_offset)


def _tree(text: str) -> ast.expr:
    head, sign, _ = text.partition("#")
    if sign:  # Python would read on as if nothing stood there
        *lines, last = head.split("\n")
        raise _Unreadable("a comment cannot be part of it", len(lines) + 1, len(last.encode(errors="replace")))
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as problem:  # its offset counts characters, from 1
        line, offset = problem.lineno or 1, max((problem.offset or 1) - 1, 0)
        before = (text.split("\n")[line - 1 : line] or [""])[0][:offset]
        raise _Unreadable(problem.msg or "syntax error", line, len(before.encode(errors="replace"))) from None
    except ValueError as problem:  # a NUL, or half a surrogate pair
        raise _Unreadable(str(problem), 1, 0) from None


@dataclass(frozen=True)
class _Reader:
    """Builds what a tree says, of the classes in `names`."""

    kind: str
    names: Mapping[str, Any]

    def __call__(self, node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
            return self._combined(node, isinstance(node.op, ast.BitAnd))
        call = node if isinstance(node, ast.Call) else None
        name = call.func if call is not None else node
        if not isinstance(name, ast.Name):
            raise _Unreadable.at(node, "expected a name")
        known = self._known(name)
        try:
            args = [self._value(a) for a in call.args] if call else []
            return known(*args, **(self._keywords(name, call) if call else {}))
        except (TypeError, ValueError, OverflowError) as problem:
            raise _Unreadable.at(name, f"{name.id}: {problem}") from None

    def _combined(self, node: ast.BinOp, both: bool) -> Any:
        left, right = self(node.left), self(node.right)
        try:
            return left & right if both else left | right
        except TypeError:
            raise _Unreadable.at(node, f"a {self.kind} does not combine") from None

    def _known(self, name: ast.Name) -> Any:
        if name.id.lower() in self.names:
            return self.names[name.id.lower()]
        near = difflib.get_close_matches(name.id.lower(), self.names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(self.names))}"
        raise _Unreadable.at(name, f"{_brief(name.id)!r} is no {self.kind}{hint}")

    def _keywords(self, name: ast.Name, call: ast.Call) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise _Unreadable.at(name, f"{name.id}: arguments must be written out; got **")
            if keyword.arg in found:  # Python's compiler refuses this; its parser does not
                raise _Unreadable.at(name, f"{name.id}: {keyword.arg} is given twice")
            found[keyword.arg] = self._value(keyword.value)
        return found

    def _value(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError:
            return self(node)


def _column(text: str, problem: _Unreadable) -> int:
    """The column in characters of the whole text, from 0."""
    lines = text.encode(errors="replace").split(b"\n")
    before = b"\n".join([*lines[: problem.line - 1], lines[min(problem.line, len(lines)) - 1][: problem.offset]])
    return len(before.decode(errors="ignore"))


def _around(text: str, column: int) -> str:
    """At most `_SHOWN` characters of `text`, from either side of `column`."""
    if len(text) <= _SHOWN:
        return text
    start = max(0, min(column - _SHOWN // 2, len(text) - _SHOWN))
    stop = start + _SHOWN
    return ("..." if start else "") + text[start:stop] + ("..." if stop < len(text) else "")


def shown(value: Any, limit: int = 120) -> str:
    """What an error shows of a value: a mask, layout or documents as they write themselves, an array's shape, anything
    else as Python does; the beginning of it."""
    if getattr(value, "shape", None) is not None:
        text = f"{type(value).__name__} of shape {tuple(value.shape)}"
    elif isinstance(value, masks.Mask | masks.RowMasks):
        text = value.text
    else:
        text = str(value) if isinstance(value, layouts.Layout) else repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _brief(text: str) -> str:
    """A message whose middle is cut if it repeats a long input."""
    return text if len(text) <= 4 * _SHOWN else f"{text[: 2 * _SHOWN]} ... {text[-2 * _SHOWN :]}"
