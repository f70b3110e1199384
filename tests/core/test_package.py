"""The package as a house: what importing it loads, what it exports, which way its imports point."""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ringspun
from ringspun import errors, testing
from ringspun.core.host import cores

CORE = Path(ringspun.__file__).parent / "core"


def loaded_by(statement):
    """The frameworks that a fresh interpreter has loaded after `statement`."""
    program = f"import sys; {statement}; print(*(m for m in ('torch', 'jax', 'transformers') if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return result.stdout.split()


def test_importing_ringspun_loads_no_framework():
    assert loaded_by("import ringspun; ringspun.Causal() & ringspun.Window(3)") == []


def test_importing_the_rings_does_not_load_the_compiler():
    """A second and more, before anything is compiled."""
    program = "import sys, ringspun.torch; print('torch._dynamo' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["False"]


def test_the_whole_core_loads_no_framework():
    modules = sorted(
        ".".join(("ringspun.core", *path.relative_to(CORE).with_suffix("").parts)).removesuffix(".__init__")
        for path in CORE.rglob("*.py")
    )
    assert "ringspun.core.route.ring" in modules and "ringspun.core" in modules
    assert loaded_by(f"import {', '.join(modules)}") == []


def test_certifying_loads_no_framework():
    """Somebody with another framework than torch."""
    names = "certify(lambda p: p, gives=['out'], properties=['causal']), ringspun.testing.mutants.MUTANTS"
    assert loaded_by(f"import ringspun.testing.mutants; from ringspun.testing import certify; {names}") == []
    assert list(testing.__all__) == ["Answer", "Candidate", "Problem", "Report", "certify"]


def test_public_names_are_pinned():
    assert (
        list(ringspun.__all__)
        == sorted(ringspun.__all__)
        == [
            "AllGather",
            "Anchors",
            "Balanced",
            "Band",
            "Bidirectional",
            "Blocks",
            "Buckets",
            "Causal",
            "Chunks",
            "Contiguous",
            "Direct",
            "DocumentPairs",
            "DocumentZigzag",
            "Documents",
            "DoubleRing",
            "Full",
            "Keys",
            "Layout",
            "Mask",
            "Prefix",
            "Ring",
            "Striped",
            "Window",
            "Zigzag",
            "__version__",
            "parse_layout",
            "parse_mask",
            "parse_route",
        ]
    )
    assert all(hasattr(ringspun, name) for name in ringspun.__all__)


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda p: str(p.relative_to(CORE)))
def test_core_imports_numpy_and_itself_alone(path):
    allowed = {"numpy", "ringspun.core", "ringspun.errors"} | set(sys.stdlib_module_names)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module]
        for name in names:
            roots = {name.split(".")[0], ".".join(name.split(".")[:2])}
            assert roots & allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sorted(CORE.parent.rglob("*.py")), ids=lambda p: str(p.relative_to(CORE.parent)))
def test_torch_and_jax_never_meet(path):
    """In one module, directly or through one of this package's own; commands, and the comparison of all peers, import
    either where they are asked for it, not when they are imported."""
    tree, roots = ast.parse(path.read_text(encoding="utf-8")), set()
    either = path.parent == CORE.parent / "cli" or path == CORE.parent / "testing" / "peers" / "on_devices.py"
    for node in tree.body if either else ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        roots |= {word for name in names for word in ("torch", "jax") if word in name.split(".")}
    assert len(roots) < 2, f"{path.name} imports {roots}"


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 4, 5}, raising=False)
    assert cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert cores() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1


def drawn_tree():
    for line in errors.__doc__.splitlines():
        if line.startswith(("├── ", "└── ", "RingspunWarning")):
            name, builtin = line.lstrip("├└─ ").split()[:2]
            yield name, getattr(builtins, builtin.strip("()"))


def test_the_tree_drawn_in_errors_is_the_tree():
    drawn = dict(drawn_tree())
    defined = {n: c for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, Exception)}
    assert set(drawn) == set(defined) - {"RingspunError"}
    for name, builtin in drawn.items():
        assert issubclass(defined[name], builtin), name
        assert issubclass(defined[name], errors.RingspunError) == (name != "RingspunWarning"), name
        assert defined[name].__doc__
