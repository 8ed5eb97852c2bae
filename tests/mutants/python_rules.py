"""Faults of Python, by its syntax tree."""

import ast
import itertools

from .fault import HINTS, Fault

SHIFTED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
NEGATED = {ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
NEGATED |= {new: old for old, new in NEGATED.items()}
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add}
ORDERED = ast.Sub | ast.Div | ast.FloorDiv | ast.Mod | ast.Pow | ast.MatMult
EXTREME = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
# What only a reader sees, what only a type checker runs, what promises more than it does.
SILENT = HINTS | {"warn", "print", "log", "debug", "cast", "TypeVar", "NamedTuple", "refuse"}
UNREAD = ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Delete
TYPES = ("annotation", "returns", "decorator_list", "type_params", "bases")


def faults(file, source):
    """Every fault that the rules make of a file's text."""
    starts = [0, *itertools.accumulate(len(x.encode()) for x in source.splitlines(keepends=True))]
    data = source.encode()

    def at(line, column):
        return len(data[: starts[line - 1] + column].decode())

    for node in read(ast.parse(source)):
        for rule, old, new in changes(node):
            text = new if isinstance(new, str) else f"({ast.unparse(new)})"
            ends = at(old.lineno, old.col_offset), at(old.end_lineno, old.end_col_offset)
            yield Fault(file, old.lineno, rule, *ends, text)


def read(node):
    """The nodes below, except those that have no effect which a test should see."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in TYPES and not skipped(child):
                yield child
                yield from read(child)


def skipped(node):
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.Call):
        return called(node) in SILENT
    if isinstance(node, ast.FunctionDef):
        return any(ast.unparse(x).endswith("overload") for x in node.decorator_list)
    if isinstance(node, ast.If):
        return any(x in ast.unparse(node.test) for x in ("TYPE_CHECKING", "__name__"))
    return isinstance(node, UNREAD)


def called(node):
    """The last name of what a call calls."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def changes(node):
    """(rule, the node that is replaced, its text or node instead)"""
    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                for rule, table in (("off by one", SHIFTED), ("negated", NEGATED)):
                    if new := table.get(type(op)):
                        ops = [*node.ops[:i], new(), *node.ops[i + 1 :]]
                        yield rule, node, ast.Compare(node.left, ops, node.comparators)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and for or", node, ast.BoolOp(other, node.values)
        case ast.BinOp():
            if new := SIGNS.get(type(node.op)):
                yield "sign", node, ast.BinOp(node.left, new(), node.right)
                yield "term dropped", node, node.left
            if isinstance(node.op, ORDERED):
                yield "operands swapped", node, ast.BinOp(node.right, node.op, node.left)
        case ast.UnaryOp(op=ast.USub() | ast.Not()) if not isinstance(node.operand, ast.Constant):
            yield "sign" if isinstance(node.op, ast.USub) else "negated", node, node.operand
        case ast.Constant(value=bool()):
            yield "negated", node, str(not node.value)
        case ast.Constant(value=int()):
            yield "off by one", node, str(node.value + 1)
        case ast.Call() if called(node) in EXTREME:
            end = ast.unparse(node.func).removesuffix(called(node)) + EXTREME[called(node)]
            yield "min for max", node.func, end
        case ast.If() | ast.IfExp():
            yield "guard dropped", node.test, "True"
            yield "guard dropped", node.test, "False"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement dropped", node, "pass"
            if new := isinstance(node, ast.AugAssign) and SIGNS.get(type(node.op)):
                yield "sign", node, ast.unparse(ast.AugAssign(node.target, new(), node.value))
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "statement dropped", node, "pass"


def alike(old, new):
    """Do both compile to the same bytecode?"""
    return meaning(compile(old, "", "exec")) == meaning(compile(new, "", "exec"))


def meaning(code):
    constants = [meaning(x) if hasattr(x, "co_code") else (type(x), x) for x in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_exceptiontable
