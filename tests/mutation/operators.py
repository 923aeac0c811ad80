"""The small faults that are put into a module, one at a time: what a wrong line would look like.

Each is a change of one node of the syntax tree. Left out, for no test of a rule should see them:
docstrings, annotations, decorators, `__slots__`, names given to NewType, the arguments of a raise
that are text, and the wording of every text (whatever has a space in it). The numbers of
`ps_core.limits` are values that were chosen, not rules; the relations between them are in.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

LEFT_OUT = (
    "docstrings, annotations, decorators, __slots__, NewType, wording of texts and of errors, "
    "the numbers in ps_core.limits"
)

Place = tuple[tuple[str, int | None], ...]
"""From the module to a node: a field and, where that is a list, an index, at each step."""

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Pow: ast.Mult,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_WORDING_CALLS = {"check", "_require"}
"""Functions whose texts are those of errors."""

_MAX_SHOWN_CHARACTERS = 90

Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed node.

    Attributes:
        module: its dotted name.
        line: where, in the file as it is.
        where: the class and function that it is in; empty at the top of the module.
        change: what stood there and what stands there now, each with what is around it.
        place: the node that is replaced.
        replacement: by what.
    """

    module: str
    line: int
    where: str
    change: str
    place: Place
    replacement: ast.AST

    def __str__(self) -> str:
        path = self.module.replace(".", "/") + ".py"
        return f"{path}:{self.line} {self.where or 'top'}: {self.change}"


def replaced(tree: Node, place: Place, replacement: ast.AST) -> Node:
    """A copy of `tree` in which another node is at `place`."""
    found = copy.deepcopy(tree)
    parent = _at(found, place[:-1])
    field, index = place[-1]
    if index is None:
        setattr(parent, field, replacement)
    else:
        getattr(parent, field)[index] = replacement
    return ast.fix_missing_locations(found)


def mutants(module: str, text: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(text)
    found: list[Mutant] = []
    seen: Counter[tuple[str, str]] = Counter()
    for place, where in _places(tree, (), ""):
        node = _at(tree, place)
        if module.endswith(".limits") and isinstance(_at(tree, place[:1]), ast.Assign):
            continue
        for replacement in _replacements(node):
            change = _shown(tree, place, replacement)
            seen[where, change] += 1
            again = seen[where, change]
            shown = change if again == 1 else f"{change} #{again}"
            line = getattr(node, "lineno", 0)
            found.append(Mutant(module, line, where, shown, place, replacement))
    return sorted(found, key=lambda mutant: mutant.line)


def _at(tree: ast.AST, place: Place) -> ast.AST:
    node = tree
    for field, index in place:
        value = getattr(node, field)
        node = value if index is None else value[index]
    return node


def _places(node: ast.AST, place: Place, where: str) -> Iterator[tuple[Place, str]]:
    """The nodes below that may be changed, each with the function that it is in."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "format_spec"):
            continue
        children = enumerate(value) if isinstance(value, list) else ((None, value),)
        for index, child in children:
            if not isinstance(child, ast.AST) or _is_left_out(node, child):
                continue
            inside = where
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                inside = f"{where}.{child.name}".lstrip(".")
            yield (*place, (field, index)), inside
            yield from _places(child, (*place, (field, index)), inside)


def _is_left_out(parent: ast.AST, child: ast.AST) -> bool:
    if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
        return True  # a docstring
    if isinstance(child, ast.Import | ast.ImportFrom):
        return True
    if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) in ("__slots__", "__hash__"):
        return True
    if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
        return True
    if isinstance(child, ast.Call) and _called(child) == "NewType":
        return True
    is_text = isinstance(child, ast.JoinedStr) or (
        isinstance(child, ast.Constant) and isinstance(child.value, str)
    )
    if is_text and isinstance(parent, ast.Call) and _called(parent) in _WORDING_CALLS:
        return True
    if isinstance(parent, ast.Raise) and isinstance(child, ast.Call):
        return all(isinstance(argument, ast.JoinedStr | ast.Constant) for argument in child.args)
    return is_text and isinstance(child, ast.Constant) and " " in str(child.value)


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What a node is changed into; each change is a mutant."""
    match node:
        case ast.Compare():
            yield from _compared_otherwise(node)
        case ast.BinOp(op=op):
            yield ast.BinOp(node.left, _ARITHMETIC.get(type(op), ast.Add)(), node.right)
        case ast.AugAssign(op=op):
            yield ast.AugAssign(node.target, _ARITHMETIC.get(type(op), ast.Add)(), node.value)
            yield ast.Pass()
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield ast.BoolOp(other, node.values)
            yield from _without_one(node)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.If() | ast.While() | ast.IfExp() if not _is_negated_elsewhere(node.test):
            changed = copy.copy(node)
            changed.test = ast.UnaryOp(ast.Not(), node.test)
            yield changed
        case ast.comprehension() if node.ifs:
            changed_loop = copy.copy(node)
            changed_loop.ifs = []
            yield changed_loop
        case ast.Constant(value=value):
            yield from map(ast.Constant, _other_constants(value))
        case ast.Name(id=name) if name in _CALLS:
            yield ast.Name(_CALLS[name], ast.Load())
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))
        case ast.Expr() | ast.Raise() | ast.Break() | ast.Continue() | ast.Delete():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def _is_negated_elsewhere(condition: ast.expr) -> bool:
    """Whether another mutant is the opposite of the condition already."""
    if isinstance(condition, ast.Compare):
        return len(condition.ops) == 1
    return isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not)


def _compared_otherwise(node: ast.Compare) -> Iterator[ast.AST]:
    for index, op in enumerate(node.ops):
        for other in _COMPARISONS[type(op)]:
            ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
            yield ast.Compare(node.left, ops, node.comparators)


def _without_one(node: ast.BoolOp) -> Iterator[ast.AST]:
    for index in range(len(node.values)):
        rest = node.values[:index] + node.values[index + 1 :]
        yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


def _other_constants(value: object) -> Iterator[bool | int | float | str | bytes]:
    match value:
        case bool():
            yield not value
        case int():
            yield value + 1
            if value:
                yield value - 1
        case float():
            yield value + 1.0
        case str():
            yield value + "x"
        case bytes():
            yield value + b"x"


def _shown(tree: ast.Module, place: Place, replacement: ast.AST) -> str:
    """The change with so much around it as fits a line, that one may find it and know it again."""
    node = _at(tree, place)
    before, after = _first_line(node), _first_line(replacement)
    if isinstance(node, ast.stmt):
        return f"{before} -> {after}"
    for depth in range(len(place) - 1, 0, -1):
        around = _at(tree, place[:depth])
        if not isinstance(around, ast.expr | ast.stmt) or isinstance(around, ast.ClassDef):
            continue
        line = _first_line(around)
        if len(line) > _MAX_SHOWN_CHARACTERS or isinstance(around, ast.FunctionDef):
            break
        before, after = line, _first_line(replaced(around, place[depth:], replacement))
        if isinstance(around, ast.stmt):
            break
    return f"{before} -> {after}"


def _first_line(node: ast.AST) -> str:
    if isinstance(node, ast.cmpop | ast.operator | ast.boolop):
        return type(node).__name__
    return ast.unparse(node).strip().split("\n")[0]
