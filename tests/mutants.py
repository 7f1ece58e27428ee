"""Programs with one thing changed: an operator or a constant."""

import ast
import copy
import random
from collections.abc import Callable, Iterator

Change = Callable[[ast.AST], bool]
"""Sets attributes of a node; says whether there was anything to change."""

COMPARED: dict[type[ast.AST], list[type[ast.AST]]] = {
    ast.Lt: [ast.LtE, ast.Gt], ast.LtE: [ast.Lt, ast.GtE], ast.Gt: [ast.GtE, ast.Lt], ast.GtE: [ast.Gt, ast.LtE],
    ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.In: [ast.NotIn], ast.NotIn: [ast.In], ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
}  # fmt: skip
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.USub: ast.UAdd,
}  # fmt: skip
"""Operator → what takes its place."""


def mutants(source: str, first_line: int, seed: str) -> Iterator[str]:
    """All there are, in an order that depends on the seed alone.

    A program without any operator or constant, such as `return len(text)`, has its results negated.

    Args:
        first_line: nothing before it is changed.
    """
    nodes = list(enumerate(ast.walk(ast.parse(source))))

    def places(change: Change) -> list[tuple[Change, int]]:
        own = ((place, node) for place, node in nodes if getattr(node, "lineno", 0) >= first_line)
        return [(change, place) for place, node in own if change(copy.copy(node))]

    found = [*places(_change), *places(_reverse)] or places(_negate)
    random.Random(seed).shuffle(found)
    for change, place in found:
        tree = ast.parse(source)
        change(list(ast.walk(tree))[place])
        yield ast.unparse(tree)


def _change(node: ast.AST) -> bool:
    match node:
        case ast.Compare():
            node.ops = [COMPARED[type(node.ops[0])][0](), *node.ops[1:]]  # type: ignore[list-item]
        case ast.UnaryOp(op=ast.Not()):
            node.operand = ast.UnaryOp(ast.Not(), node.operand)
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() | ast.UnaryOp():
            node.op = OPERATORS[type(node.op)]()  # type: ignore[assignment]
        case ast.Constant(value=bool(value)):
            node.value = not value
        case ast.Constant(value=int(value) | float(value)):
            node.value = value + 1
        case ast.Constant(value=str(value)):
            node.value = value + "x"
        case _:
            return False
    return True


def _reverse(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare) or len(COMPARED[type(node.ops[0])]) == 1:
        return False
    node.ops = [COMPARED[type(node.ops[0])][1](), *node.ops[1:]]  # type: ignore[list-item]
    return True


def _negate(node: ast.AST) -> bool:
    if not isinstance(node, ast.Return) or node.value is None:
        return False
    node.value = ast.UnaryOp(ast.Not(), node.value)
    return True
