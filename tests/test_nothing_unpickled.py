"""Nothing that comes from outside (a checkpoint, a data file, a config) is ever unpickled or run as code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringspun

SOURCES = Path(ringspun.__file__).parent
# Modules that make objects, or run code, out of what a file says.
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "pickletools",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "dbm",
    "joblib",
    "jsonpickle",
    "yaml",
    "torch.distributed.checkpoint",  # its metadata is a pickle
    "torch.package",
    "torch.hub",
    "runpy",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
# `torch.load` reads pickles unless told not to; the others always do, or run what they read.
CALLS = {"torch.load", "torch.jit.load", "torch.export.load", "numpy.load", "pandas.read_pickle"}
COLLECTIVES = ("_object", "_object_list")  # torch.distributed's, which pickle what they send
# Between the processes of one program, over pipes that it made: not from outside.
# And of DCP, what reads and writes safetensors; a test of training watches that it unpickles nothing.
DCP = "torch.distributed.checkpoint"
INSIDE = {"testing/pool.py": {"pickle"}, "train/checkpoints/shards.py": {DCP}}


def faults(source: str) -> Iterator[str]:
    """Whatever in a module could unpickle."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
            yield from (found for a in node.names if (found := forbidden(a.name)))
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            yield from {
                found for a in node.names if (found := forbidden(node.module) or forbidden(f"{node.module}.{a.name}"))
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from call_faults(node, full_name(node.func, aliases))


def forbidden(module: str) -> str | None:
    return next((name for name in MODULES if module == name or module.startswith(name + ".")), None)


def full_name(node: ast.expr, aliases: dict[str, str]) -> str:
    """The dotted name that is called, or its last part after something that is not a name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, aliases)}.{node.attr}"
    return "?"


def call_faults(call: ast.Call, name: str) -> Iterator[str]:
    given = {word.arg: word.value for word in call.keywords}
    safe = given.get("weights_only")
    if name in BUILTINS or (name in CALLS and not (isinstance(safe, ast.Constant) and safe.value is True)):
        yield name
    if forbidden(name):
        yield name
    if name.endswith("import_module") and call.args and isinstance(call.args[0], ast.Constant):
        yield from [found for found in [forbidden(str(call.args[0].value))] if found]
    if name.rsplit(".", 1)[-1].endswith(COLLECTIVES):
        yield name
    for word in ("allow_pickle", "trust_remote_code"):
        value = given.get(word)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
            yield word


PLANTED = {
    "import pickle": "pickle",
    "import pickle as p\np.loads(b'')": "pickle",
    "from _pickle import loads": "_pickle",
    "import torch.distributed.checkpoint as dcp": "torch.distributed.checkpoint",
    "from torch.distributed import checkpoint": "torch.distributed.checkpoint",
    "import torch\ntorch.load('x')": "torch.load",
    "import torch\ntorch.load('x', weights_only=False)": "torch.load",
    "import torch\ntorch.load('x', weights_only=trusted)": "torch.load",
    "from torch import load as read\nread('x')": "torch.load",
    "import torch\ntorch.hub.load('x', 'y')": "torch.hub.load",
    "import numpy as np\nnp.load('x.npy')": "numpy.load",
    "import numpy as np\nnp.lib.format.read_array(f, allow_pickle=True)": "allow_pickle",
    "from torch import distributed as dist\ndist.broadcast_object_list(x)": "torch.distributed.broadcast_object_list",
    "import torch\ntorch.distributed.all_gather_object(x, y)": "torch.distributed.all_gather_object",
    "import yaml": "yaml",
    "import importlib\nimportlib.import_module('shelve')": "shelve",
    "eval('1')": "eval",
    "exec(text)": "exec",
    "from transformers import AutoModel\nAutoModel.from_pretrained(x, trust_remote_code=True)": "trust_remote_code",
}
HARMLESS = """
import ast, json, torch
from numpy import fromfile
model.eval()
torch.load("x", weights_only=True)
ast.literal_eval("1")
re.compile("x")
torch.compile(f)
read(x, allow_pickle=False)
"""


@pytest.mark.parametrize("source", PLANTED, ids=lambda text: text.splitlines()[-1])
def test_what_unpickles_is_found(source: str) -> None:
    assert PLANTED[source] in set(faults(source))


def test_what_does_not_unpickle_is_left_alone() -> None:
    assert list(faults(HARMLESS)) == []


def test_nothing_in_the_package_unpickles() -> None:
    files = sorted(SOURCES.rglob("*.py"))
    assert len(files) > 60
    found = {}
    for path in files:
        name = path.relative_to(SOURCES).as_posix()
        allowed = INSIDE.get(name, set())
        words = {
            word
            for word in faults(path.read_text(encoding="utf-8"))
            if not any(word == one or word.startswith(f"{one}.") for one in allowed)
        }
        found |= {name: words} if words else {}
    assert found == {}
