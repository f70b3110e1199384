"""docs/train-config.md is written from the fields of the config. Write it again after a change:

python tests/test_train_config_page.py
"""

from __future__ import annotations

import json
import re
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from ringspun.train.checkpoints import resume
from ringspun.train.config import EvaluateConfig, ModelConfig, TrainConfig
from ringspun.train.data.config import DataConfig
from ringspun.train.rope import Rope
from ringspun.train.stages import TrainStage

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "train-config.md"
TABLES = ("model", "stages", "data", "evaluate")
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
KINDS = {int: "integer", float: "number", str: "text", Path: "path", tuple: "list of texts"}

TEXT = """# Keys of a training config

<!-- Written by tests/test_train_config_page.py from the fields in src/ringspun/train/config.py. Do not edit. -->

`ringspun train CONFIG --data PATH` reads one TOML file; [`examples/stdlib.toml`](../examples/stdlib.toml) is a whole
one. An unknown key is an error. `--ranks` and `--output` replace the file's.

Without a tokenizer tokens are the text's bytes, and one more ends each document (257 in all). The mask is always causal
within documents. The optimizer is AdamW, unless a recipe has another. What `ulysses`, `dp_replicate`, `dp_shard`,
`shard` and `checkpoints` mean: [training on a mesh](distributed.md); `init`, `recipe`, `[[stages]]` and `[evaluate]`:
[a context extended](extending.md).

## At the top

{top}

## `[model]`

{model}

## `[[stages]]`

Once for each stage, in order. `seq_len`, `steps` and what else is said of a stage is then not given at the top; what a
stage does not say is as at the top.

{stages}

## `[data]`

{data}

## `[evaluate]`

{evaluate}

## Going on

A run that goes on from its checkpoint may have other values of
{may_change}.
A stage that is over keeps its steps, and one that has begun its `seq_len`, `rope`, `batch_size` and rates; those that
have not begun may be any. The rest must be as it was, and so must the data and the tokenizer, wherever they are now.

## The smallest config

```toml
{smallest}```
"""

SMALLEST = """seq_len = 1024
steps = 100

[model]
layers = 2
hidden_size = 64
intermediate_size = 256
heads = 2
"""


def page() -> str:
    """The whole page."""
    changing = [f"`{name}`" for name in TrainConfig.model_fields if name in resume.MAY_CHANGE]
    return TEXT.format(
        top=_table(TrainConfig, leave_out=TABLES),
        model=_table(ModelConfig),
        stages=_table(TrainStage),
        evaluate=_table(EvaluateConfig),
        data=_table(DataConfig),
        may_change=", ".join(changing),
        smallest=SMALLEST,
    )


def _table(section: type[Any], leave_out: tuple[str, ...] = ()) -> str:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        if name not in leave_out:
            assert field.description, f"{section.__name__}.{name} has no description"
            rows.append(f"| `{name}` | {_value(field)} | {_default(field.default)} | {field.description} |")
    return "\n".join(rows)


def _value(field: Any) -> str:
    """Kind and bounds, in words."""
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if typing.get_origin(kind) is typing.Literal:
            return " or ".join(f"`{x}`" for x in typing.get_args(kind))
    if any(kind is Rope or typing.get_args(kind)[:1] == (Rope,) for kind in _kinds(field)):
        return "number or table"
    if field.annotation == tuple[tuple[str, int], ...]:
        return "table of integers"
    kinds = [typing.get_origin(kind) or kind for kind in (field.annotation, *typing.get_args(field.annotation))]
    words = [KINDS[kind] for kind in kinds if kind in KINDS]
    kind = words[0] if typing.get_origin(field.annotation) is tuple else " or ".join(words)
    bounds = [f"{sign} {_number(getattr(m, n))}" for m in field.metadata for n, sign in BOUNDS.items() if hasattr(m, n)]
    return f"{kind} {', '.join(bounds)}".strip()


def _kinds(field: Any) -> tuple[Any, ...]:
    return (field.annotation, *typing.get_args(field.annotation))


def _number(bound: float) -> str:
    return "2^64" if bound == 1 << 64 else str(bound)


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "must be given"
    if value is None or value == ():
        return "none"
    if isinstance(value, Rope):
        return "the top's"
    return f"`{json.dumps(value if isinstance(value, int | float | tuple) else str(value))}`"


def test_the_page_is_what_the_fields_say():
    """A key, default or unit that changed, and a page that did not."""
    fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
    assert fresh, f"{PAGE.name} is stale; write it again: python tests/{Path(__file__).name}"


def test_the_page_names_every_key_once_in_its_table():
    """A table that the generator loses."""
    named = re.findall(r"^\| `(\w+)` \|", page(), re.MULTILINE)
    sections = (TrainConfig, ModelConfig, TrainStage, DataConfig, EvaluateConfig)
    fields = [name for section in sections for name in section.model_fields if name not in TABLES]
    assert sorted(named) == sorted(fields)


def test_the_smallest_config_is_one():
    """An example that is refused, or one with a key that could be left out."""
    values = tomllib.loads(SMALLEST)
    TrainConfig.model_validate(values)
    for name in values:
        with pytest.raises(ValueError, match=name):
            TrainConfig.model_validate({key: value for key, value in values.items() if key != name})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
