"""Small faults for `mutation.py`: every change of one place in a module that a programmer might have made."""

from __future__ import annotations

import ast
import copy
import importlib.abc
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"

COMPARES = {
    **{ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt)},
    **{ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,)},
    **{ast.In: (ast.NotIn,), ast.NotIn: (ast.In,)},
}
ARITHMETIC = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift},
}
PAIRS = [("min", "max"), ("minimum", "maximum"), ("any", "all"), ("argmin", "argmax"), ("logical_and", "logical_or")]
PAIRS += [("zeros", "ones"), ("left", "right")]
OTHER = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
DROPPED = {"cumsum", "accumulate", "abs", "sorted", "unique", "set", "tighten", "exp", "sigmoid", "diff"}
DROPPED_METHODS = {"masked_fill", "copy", "to", "astype"}
COMMUTE = {"min", "max", "minimum", "maximum", "logaddexp", "broadcast_shapes"}
A_LIMIT = 1000
"""From here on a number is a limit of size, and one more or less is as good."""
NOT_CODE = {"annotation", "returns", "decorator_list", "bases", "exc"}
TYPES = {"tuple", "list", "dict", "type", "NDArray"}


@dataclass(frozen=True)
class Mutant:
    """One change of a file: the `number`-th of those of the node that `sites` yields at `index`."""

    path: Path
    line: int
    operator: str
    change: str
    index: int
    number: int


def sites(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may change: code, but no annotation, decorator, docstring, or words of an error or a warning."""
    text = ast.unparse(node.value) if isinstance(node, ast.Expr | ast.Subscript) else ""
    if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) or text.startswith("warnings.warn"):
        return
    yield node
    if (isinstance(node, ast.Subscript) and text in TYPES) or ast.unparse(node).startswith("isinstance("):
        return
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in NOT_CODE:
                yield from sites(child)


def changed(node: ast.AST, **fields: Any) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def of_expressions(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every (operator, what stands in place of the node)."""
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for other in COMPARES[type(op)]:
                    yield "compare", changed(node, ops=[*ops[:i], other(), *ops[i + 1 :]])
        case ast.BinOp() | ast.AugAssign() if type(node.op) in ARITHMETIC:
            yield "arithmetic", changed(node, op=ARITHMETIC[type(node.op)]())
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "arithmetic", operand
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield "logic", operand
        case ast.BoolOp(op=op):
            yield "logic", changed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.IfExp(body=body, orelse=orelse):
            yield "logic", changed(node, body=orelse, orelse=body)
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() | float() as value) if value < A_LIMIT:
            yield from (("constant", ast.Constant(value + step)) for step in (1, -1))
        case ast.Slice(lower=lower, upper=upper):
            yield from (("slice", changed(node, **{k: None})) for k, x in (("lower", lower), ("upper", upper)) if x)
        case ast.Name(id=name) if name in OTHER:
            yield "other function", changed(node, id=OTHER[name])
        case ast.Attribute(attr=name) if name in OTHER:
            yield "other function", changed(node, attr=OTHER[name])
        case ast.keyword(arg="side", value=ast.Constant(value=side)):
            yield "other function", changed(node, value=ast.Constant(OTHER[side]))
        case ast.Tuple(elts=[a, b, *others]) if ast.unparse(a) != ast.unparse(b):
            yield "swap", changed(node, elts=[b, a, *others])
        case ast.Call(func=func, args=[*others, a, b]) if ast.unparse(a) != ast.unparse(b):
            if ast.unparse(func).split(".")[-1] not in COMMUTE:
                yield "swap", changed(node, args=[*others, b, a])
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *_]) if name in DROPPED:
            yield "call dropped", first
        case ast.Call(func=ast.Attribute(attr=name, value=value)) if name in DROPPED_METHODS:
            yield "call dropped", value


def of_statements(node: ast.AST, returns: list[ast.expr]) -> Iterator[tuple[str, ast.AST]]:
    """The same for statements; `returns` is what else the function returns."""
    match node:
        case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call()) | ast.Break() | ast.Continue():
            yield "statement dropped", ast.Pass()
        case ast.Assign(targets=[target], value=value) if not isinstance(target, ast.Name) or target.id in names(value):
            if not names(target).isdisjoint(names(value)) or not isinstance(target, ast.Name | ast.Tuple):
                yield "statement dropped", ast.Pass()
        case ast.If(test=test):
            yield "logic", changed(node, test=ast.UnaryOp(ast.Not(), test))
            yield from [] if node.orelse else [("statement dropped", ast.Pass())]
        case ast.Return():
            yield from (("other return", changed(node, value=value)) for value in returns)


def each(path: Path) -> Iterator[tuple[Mutant, ast.Module, ast.AST, ast.AST]]:
    """Every mutant of a file, with the module, the node, and what takes its place."""
    tree = ast.parse(path.read_text())
    returns: dict[int, list[ast.expr]] = {}
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        found = [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
        for one in found:
            others = {ast.unparse(n): n.value for n in found if ast.unparse(n) != ast.unparse(one)}
            returns[id(one)] = [*others.values()]
    for index, node in enumerate(sites(tree)):
        for number, (operator, other) in enumerate(
            (*of_expressions(node), *of_statements(node, returns.get(id(node), [])))
        ):
            line = getattr(node, "lineno", None) or getattr(getattr(node, "value", None), "lineno", 0) or 0
            change = " -> ".join(" ".join(ast.unparse(x).split())[:110] for x in (node, other))
            yield Mutant(path, line, operator, change, index, number), tree, node, other


def mutated(mutant: Mutant) -> ast.Module:
    """The module with the change in it."""

    class Replace(ast.NodeTransformer):
        def visit(self, at: ast.AST) -> ast.AST:
            return other if at is node else self.generic_visit(at)

    _, tree, node, other = next(found for found in each(mutant.path) if found[0] == mutant)
    return ast.fix_missing_locations(Replace().visit(tree))


class Planted(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module as it was changed."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.code = compile(tree, str(path), "exec")
        self.name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        self.package = path.name == "__init__.py"

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def is_package(self, name: str) -> bool:
        return self.package

    def get_source(self, name: str) -> str:
        return ""

    def get_code(self, name: str) -> Any:
        return self.code
