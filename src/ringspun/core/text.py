"""Masks and layouts from their strings, for the command line and for people: ``causal & window(4096)``, ``zigzag``.

The strings are Python expressions of names, calls, ``&`` and ``|``; Python's own parser reads them and nothing is ever
evaluated but literals and the names listed here.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from ringspun.core import layout as layouts
from ringspun.core import mask as masks
from ringspun.errors import LayoutError, MaskError, RingspunError

V = TypeVar("V")

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
    )
}
LAYOUTS: Mapping[str, type[layouts.Layout]] = {
    c.__name__.lower(): c for c in (layouts.Contiguous, layouts.Zigzag, layouts.Striped)
}


def parse_mask(text: str) -> masks.Mask:
    """The mask that `text` writes, e.g. ``causal & (window(64) | anchors(4))``; ``parse_mask(str(m)) == m``.

    Raises:
        MaskError: naming the column at which the text cannot be read.
    """
    return _parse("mask", text, MASKS, MaskError)


def parse_layout(text: str) -> layouts.Layout:
    """The layout that `text` writes: ``contiguous``, ``zigzag``, ``striped`` or ``striped(128)``."""
    return _parse("layout", text, LAYOUTS, LayoutError)


def _parse(kind: str, text: str, names: Mapping[str, type[V]], error: type[RingspunError]) -> V:
    text = text.strip()

    def fail(message: str, column: int) -> RingspunError:
        return error(f"{kind} must be readable; {message} at column {column + 1} of {text!r}.")

    def value(node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError:
            return build(node)

    def build(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
            left, right = build(node.left), build(node.right)
            try:
                return left & right if isinstance(node.op, ast.BitAnd) else left | right
            except TypeError:
                raise fail(f"a {kind} does not combine", node.col_offset) from None
        call = node if isinstance(node, ast.Call) else None
        name = call.func if call is not None else node
        if not isinstance(name, ast.Name):
            raise fail("expected a name", node.col_offset)
        if name.id.lower() not in names:
            near = difflib.get_close_matches(name.id.lower(), names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(names))}"
            raise fail(f"{name.id!r} is no {kind}{hint}", name.col_offset)
        try:
            args = [value(a) for a in call.args] if call else []
            kwargs = {str(k.arg): value(k.value) for k in call.keywords} if call else {}
            return names[name.id.lower()](*args, **kwargs)
        except (TypeError, ValueError) as problem:
            if isinstance(problem, error) and f" of {text!r}" in str(problem):
                raise
            raise fail(f"{name.id}: {problem}", name.col_offset) from None

    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as problem:
        raise fail(problem.msg or "syntax error", max((problem.offset or 1) - 1, 0)) from None
    return build(tree)  # type: ignore[no-any-return]
