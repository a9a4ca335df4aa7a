"""Mutants of a Python file: the same file with one thing wrong that a test should notice.

Left alone is what no test is for: texts, annotations, what an error says, assertions, how long something waits, and
checks of what cannot happen, such as the `strict` of zip.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
# Keywords whose values are texts, or change nothing that a right program does, and calls whose arguments are texts.
UNSEEN = {"strict", "daemon", "stacklevel", "timeout", "thread_name_prefix"}
TEXTS = {"problem", "fix", "at", "help", "doc", "rich_help_panel", "msg", "description", "metavar"}
SPEAKERS = {"print", "warn", "Refusal", "echo", "Option", "Argument", "debug", "info", "warning", "getLogger"}


@dataclass(frozen=True)
class Mutant:
    """One change. line: from 1; kind: of change; before, after: what is replaced; begin, end: its bytes in the file."""

    line: int
    kind: str
    before: str
    after: str
    begin: int
    end: int

    def applied(self, source: str) -> str:
        """The file with the change."""
        data = source.encode()
        return (data[: self.begin] + self.after.encode() + data[self.end :]).decode()


def mutants(source: str) -> Iterator[Mutant]:
    """All of a file, in order of kind and place; every one of them parses and differs."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _worth_changing(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = data[begin:end].decode()
        for kind, change in KINDS.items():
            for changed in change(copy.copy(node)):
                after = ast.unparse(changed)
                if isinstance(node, ast.expr) and not isinstance(changed, ast.Constant | ast.Name):
                    after = f"({after})"
                if ast.dump(changed) != ast.dump(node):
                    yield Mutant(node.lineno, kind, before, after, begin, end)


def _worth_changing(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    for child in ast.iter_child_nodes(tree):
        if _is_left_alone(child):
            continue
        if isinstance(child, ast.Raise | ast.expr | ast.stmt):
            yield child
        if isinstance(child, ast.Raise):
            continue
        yield from _worth_changing(_without_annotations(child))


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.arg):
        return True
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    if isinstance(node, ast.keyword):
        return node.arg in TEXTS | UNSEEN
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in SPEAKERS or name.endswith("Error")
    if isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return isinstance(target, ast.Name) and (target.id.endswith("SECONDS") or target.id == "__all__")
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == "__repr__" or any("overload" in ast.unparse(d) for d in node.decorator_list)
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base).startswith("Protocol") for base in node.bases)
    return False


def _without_annotations(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ast.Module([*node.args.defaults, *node.body], [])  # type: ignore[list-item]
    if isinstance(node, ast.ClassDef):
        return ast.Module(node.body, [])
    if isinstance(node, ast.AnnAssign):
        return ast.Module([] if node.value is None else [node.value], [])  # type: ignore[list-item]
    return node


def _operators(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        node.ops = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]  # type: ignore[list-item]
        yield node
    elif isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in SWAPPED:
        is_text = isinstance(node, ast.BinOp) and any(
            isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str))
            for s in ast.walk(node)
        )
        if not is_text:
            node.op = SWAPPED[type(node.op)]()  # type: ignore[assignment]
            yield node
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand


def _constants(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield ast.Constant(node.value + 1)
        elif isinstance(node.value, float):
            yield ast.Constant(node.value * 2 or 1.0)


def _branches(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body
        yield node
    elif isinstance(node, ast.If) and not node.orelse:
        yield ast.Pass()


def _arguments(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args):
        is_symmetric = isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "isinstance", "zip")
        if not is_symmetric:
            node.args = [node.args[1], node.args[0], *node.args[2:]]
            yield node


def _boundaries(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        first, *others = node.comparators
        node.comparators = [ast.BinOp(first, ast.Add(), ast.Constant(1)), *others]
        yield node
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Slice):
        if node.slice.upper is not None:
            upper = ast.BinOp(node.slice.upper, ast.Sub(), ast.Constant(1))
            node.slice = ast.Slice(node.slice.lower, upper, node.slice.step)
            yield node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range" and node.args:
        stop = min(len(node.args) - 1, 1)
        fewer = ast.BinOp(node.args[stop], ast.Sub(), ast.Constant(1))
        node.args = [*node.args[:stop], fewer, *node.args[stop + 1 :]]
        yield node


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Return):
        if node.value is not None and not isinstance(node.value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        return
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    is_stored = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    if is_call or is_stored or isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Delete):
        yield ast.Pass()


KINDS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "operator": _operators,
    "constant": _constants,
    "branch": _branches,
    "swapped arguments": _arguments,
    "boundary": _boundaries,
    "dropped statement": _statements,
}
