"""Figures as one HTML page that needs nothing else: no network, no build step; its own policy forbids every request.

The page holds the figures as JSON and draws them in the browser (`assets/`). It counts nothing that they do not hold.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from ringspun.core.wire import Payload
from ringspun.errors import ConfigError
from ringspun.pictures.figures.base import Figure
from ringspun.pictures.palette import ITEM_WORDS

SCRIPTS = (
    "base.js",
    "ring.js",
    "matrix.js",
    "schedule.js",
    "still.js",
    "timeline.js",
    "compare.js",
    "run.js",
    "evaluation.js",
    "main.js",
)
_NAMES = {Payload.KV: "KV", Payload.DKV: "dKV", Payload.QUERIES: "Q", Payload.DQ: "dQ", Payload.HEADS: "heads"}


def page(figures: Sequence[Figure], title: str | None = None) -> str:
    """One self-contained HTML page of some figures, in their order.

    A schedule becomes a slider through the steps of the ring: blocks move between ranks, the score matrix fills up.
    With the layout figure of the same scene on its page, its matrix shows at its edges who holds which tokens.

    Args:
        figures: of any kind. title: of the page; default that of the first figure.
    Raises:
        ConfigError: no figure.
    """
    if not figures:
        raise ConfigError("figures must be at least one; got none. Give what `ringspun.pictures.figures` makes.")
    return _filled(_asset("page.html"), {
        "TITLE": html.escape(title or figures[0].title),
        "SOURCE": figures[0].source,
        "STYLE": _asset("page.css"),
        "SCRIPT": "\n".join(map(_asset, SCRIPTS)),
        "DATA": _as_script(page_data(figures)),
    })  # fmt: skip


def page_data(figures: Sequence[Figure]) -> dict[str, Any]:
    """What a page holds as JSON: the figures as they are, and what payloads and the items of memory are called."""
    names = {str(int(payload)): name for payload, name in _NAMES.items()}
    return {"figures": [figure.as_dict() for figure in figures], "payloads": names, "items": ITEM_WORDS}


def _as_script(data: dict[str, Any]) -> str:
    """JSON that no HTML parser takes for the end of its element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _filled(template: str, parts: dict[str, str]) -> str:
    """A template with ``@NAME@`` replaced; what is put in is not looked at again."""
    head, *rest = template.split("@")
    return head + "".join(parts.get(piece, piece) for piece in rest)


def _asset(name: str) -> str:
    return files("ringspun.pictures").joinpath("assets", name).read_text(encoding="utf-8")
