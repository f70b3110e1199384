"""The conformance suite: what attention must get right, as named cases grouped by property. Plain data, no framework.

A property is what somebody needs or not ("sliding window", "sinks"); its cases are the inputs that tell it from its
usual mistakes. Every case of a property but `together` asks for nothing else that a plain kernel may lack: heads are
not grouped, value heads are as large as key heads, every query sees a key, nobody uses lse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ringspun.core.layout import Contiguous
from ringspun.core.mask import Anchors, Band, Blocks, Causal, Chunks, Documents, Full, Mask, Prefix, Window
from ringspun.testing.cases import Arguments, Case, Shape
from ringspun.testing.yardstick import DTYPES

PROPERTIES = {
    "full attention": "every query sees every key",
    "causal": "a query sees itself and what came before",
    "sliding window": "only so many keys back",
    "two-sided window": "so many keys to either side, the query itself perhaps not among them",
    "chunks": "causal within chunks of equal size (Llama 4)",
    "prefix": "a prefix seen by all (prefix-LM)",
    "anchors": "the first tokens stay visible beside a window (StreamingLLM)",
    "documents": "packed sequences do not see each other",
    "block mask": "a table of blocks",
    "rows without keys": "padding, or a mask that hides a whole row: out is 0, lse is -inf, gradients are 0",
    "padding is never read": "NaN in queries that see nothing and in keys that nobody sees changes nothing",
    "short sequences": "one, two or three tokens: fewer than ranks",
    "long sequences": "lengths beyond a kernel's own blocks, divisible by nothing",
    "grouped heads": "fewer key/value heads than query heads (GQA, MQA)",
    "head size": "very small and odd head sizes",
    "value size": "value heads smaller or larger than key heads (MLA)",
    "cross-attention": "keys of another sequence or length; positions are given, never taken from shapes",
    "rows of a batch": "each batch row has its own mask",
    "scale": "a scale of the scores that is not the usual one",
    "large scores": "scores far beyond the range of exp",
    "softcap": "bounded scores (Gemma 2)",
    "sinks": "a logit per head in the denominator, once per row (gpt-oss)",
    "bias": "ALiBi, a table of relative positions (T5), a function of positions",
    "lse gradient": "lse is right in its derivative too (not in bfloat16: there is no bar for it)",
    "together": "many of these at once",
}
"""Every property and what it means, in the order of reports."""

PLAIN = Shape(batch=2, heads=3, kv_heads=3, head_size=8, value_size=8)
LENGTH = 37
DOCUMENTS = Documents([13, 1, 2, 7, 14])
PADDED = Documents([13, 1, 2, 7], [0, 13, 15, 20])
"""With padding between documents and after the last."""


@dataclass(frozen=True)
class NamedCase:
    """A case of the suite.

    Args:
        property: one of `PROPERTIES`. name: which of its cases. case: the case, not dealt to a ring: whoever runs it
            on one says how many ranks and which layout.
    """

    property: str
    name: str
    case: Case


def suite(dtype: str = "float64", properties: Iterable[str] | None = None) -> tuple[NamedCase, ...]:
    """The cases of some properties, in a dtype.

    Args:
        dtype: "float64", "float32" or "bfloat16". properties: names of `PROPERTIES`; default all.
    Raises:
        ValueError: an unknown dtype or property.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    wanted = list(PROPERTIES) if properties is None else list(properties)
    for name in wanted:
        if name not in PROPERTIES:
            raise ValueError(f"properties must be among {', '.join(PROPERTIES)}; got {name!r}.")
    return tuple(case for case in _cases(dtype) if case.property in wanted)


def _cases(dtype: str) -> Iterator[NamedCase]:
    for name, mask in _masks().items():
        kind, _, which = name.partition(": ")
        yield _named(kind, which or str(mask), mask, dtype)
    for name, more in _arguments(dtype).items():
        kind, _, which = name.partition(": ")
        mask = more.pop("mask", Causal())
        yield _named(kind, which, mask, dtype, **more)


def _named(kind: str, which: str, mask: Any, dtype: str, **more: Any) -> NamedCase:
    given: dict[str, Any] = {"seq_len": LENGTH, "shape": PLAIN, "lse_gradient": False, **more}
    return NamedCase(kind, which, Case(ranks=1, mask=mask, layout=Contiguous(), dtype=dtype, **given))


def _masks() -> dict[str, Mask]:
    """Cases that are a mask over `LENGTH` tokens and nothing else, as "property: name"."""
    inner = PADDED & (Causal() | Prefix(2, documents=PADDED))
    return {
        "full attention: full": Full(),
        "causal: causal": Causal(),
        "sliding window: of 5": Window(5),
        "sliding window: of 1": Window(1),
        "sliding window: of 13": Causal() & Window(13),
        "sliding window: longer than the sequence": Window(50),
        "two-sided window: 4 back, 2 ahead": Band(4, 2),
        "two-sided window: all back, 3 ahead": Band(None, 3),
        "chunks: of 8": Causal() & Chunks(8),
        "chunks: of 36": Causal() & Chunks(36),
        "prefix: of 7": Causal() | Prefix(7),
        "prefix: of 7 in a window": Window(11) | Prefix(7),
        "anchors: 3 and a window of 6": Causal() & (Window(6) | Anchors(3)),
        "documents: both ways": DOCUMENTS,
        "documents: causal": Causal() & DOCUMENTS,
        "documents: causal, window of 5": Causal() & DOCUMENTS & Window(5),
        "block mask: of 8": Blocks([[0, 4], [0, 1], [1], [1, 3, 4], [0, 2, 3]], 8),
        "rows without keys: padding": Causal() & PADDED,
        "rows without keys: padding, both ways": PADDED,
        "rows without keys: padding, prefixes": inner,
        "rows without keys: keys before the query only": Band(9, -1),
        "rows without keys: no pair at all": Documents([]),
        "rows without keys: empty rows of blocks": Blocks([[1], [], [2, 0], [], [4]], 8),
    }


def _arguments(dtype: str) -> dict[str, dict[str, Any]]:
    """Cases that change more than the mask, as "property: name", and the fields of `Case` that they set."""
    spoiled = {"spoiled": True}
    mqa, pairs = Shape(2, 6, 1, 8, 8), Shape(2, 6, 3, 8, 8)
    cross = {"seq_len": 19, "key_len": LENGTH}
    later = {"seq_len": 5, "key_len": LENGTH, "query_start": 32}
    # beyond what exp takes in float64, 709, and in float32, 88; no larger, because lse rounds at the size of the scores
    large = {"offset": 750.0 if dtype == "float64" else 120.0}
    everything = Arguments(scale=0.3, softcap=3.0, sinks=True, bias="table")
    return {
        "padding is never read: between documents": {"mask": PADDED, **spoiled},
        "padding is never read: causal": {"mask": Causal() & PADDED, **spoiled},
        "padding is never read: keys out of reach": {"mask": Band(-3, 9), **spoiled},
        **{f"short sequences: {n} causal": {"seq_len": n} for n in (1, 2, 3)},
        **{f"short sequences: {n} full": {"seq_len": n, "mask": Full()} for n in (1, 2, 3)},
        "long sequences: causal": {"seq_len": 613, "shape": Shape(1, 2, 2, 4, 4)},
        "long sequences: window of 200": {"seq_len": 613, "shape": Shape(1, 2, 2, 4, 4), "mask": Window(200)},
        "grouped heads: 6 over 3": {"shape": pairs},
        "grouped heads: 6 over 1": {"shape": mqa},
        "grouped heads: 6 over 3, documents": {"shape": pairs, "mask": Causal() & DOCUMENTS},
        "head size: 1": {"shape": Shape(2, 3, 3, 1, 1)},
        "head size: 13": {"shape": Shape(2, 3, 3, 13, 13)},
        "head size: 64": {"shape": Shape(1, 2, 2, 64, 64)},
        "value size: smaller": {"shape": Shape(2, 3, 3, 8, 5)},
        "value size: larger": {"shape": Shape(2, 3, 3, 8, 11)},
        "cross-attention: fewer queries, full": {**cross, "mask": Full()},
        "cross-attention: fewer queries, from position 0": cross,
        "cross-attention: last queries": later,
        "cross-attention: last queries, window of 9": {**later, "mask": Window(9)},
        "cross-attention: more queries than keys": {"key_len": 11},
        "rows of a batch: three masks": {"mask": (Causal(), Window(4), Full()), "shape": Shape(3, 2, 2, 8, 8)},
        "rows of a batch: other documents": {"mask": (DOCUMENTS, Causal() & Documents([30, 7]))},
        "scale: 1": {"arguments": Arguments(scale=1.0)},
        "scale: 0.05": {"arguments": Arguments(scale=0.05)},
        "large scores: causal": large,
        "large scores: full": {"mask": Full(), **large},
        "softcap: 2": {"arguments": Arguments(softcap=2.0)},
        "softcap: 0.7, documents": {"mask": DOCUMENTS, "arguments": Arguments(softcap=0.7)},
        "sinks: causal": {"arguments": Arguments(sinks=True)},
        "sinks: rows without keys": {"mask": PADDED, "arguments": Arguments(sinks=True)},
        **{f"bias: {kind}": {"arguments": Arguments(bias=kind)} for kind in ("alibi", "table", "function")},
        "bias: alibi, full": {"mask": Full(), "arguments": Arguments(bias="alibi")},
        "lse gradient: causal": {"lse_gradient": True},
        "lse gradient: rows without keys": {"mask": PADDED, "lse_gradient": True},
        "lse gradient: value size": {"shape": Shape(2, 3, 3, 8, 5), "lse_gradient": True},
        "together: plain scores": {
            "mask": Causal() & PADDED & Window(9), "shape": Shape(), "arguments": Arguments(scale=0.3, sinks=True),
            "lse_gradient": True, **spoiled,
        },
        "together: all arguments": {
            "mask": Causal() & PADDED, "shape": Shape(), "arguments": everything, "lse_gradient": True, **spoiled,
        },
        "together: cross-attention": {
            "seq_len": 9, "key_len": LENGTH, "query_start": 21, "mask": PADDED | Window(4), "shape": Shape(),
            "arguments": Arguments(sinks=True, bias="alibi"),
        },
    }  # fmt: skip
