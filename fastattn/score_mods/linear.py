"""Linear forms of indices: ci i + cj j + c."""

from __future__ import annotations

from .program import Program

Form = tuple[int, int, int]  # ci, cj, c


def difference(program: Program, x: int, y: int | None) -> Form | None:
    """Return the linear form of value x minus value y.

    Args:
        program: The program of both.
        x: The number of an int value.
        y: The number of another. None: 0.

    Returns:
        (ci, cj, c), or None if the difference is no linear form of i and j.
    """
    forms = [_form(program, x), (0, 0, 0) if y is None else _form(program, y)]
    if forms[0] is None or forms[1] is None:
        return None
    return _added(forms[0], forms[1], -1)


def _added(x: Form, y: Form, factor: int) -> Form:
    return x[0] + factor * y[0], x[1] + factor * y[1], x[2] + factor * y[2]


def _form(program: Program, at: int) -> Form | None:
    value = program.values[at]
    if value.op == "constant":
        return (0, 0, value.number) if type(value.number) is int else None
    if value.op in ("i", "j"):
        return (1, 0, 0) if value.op == "i" else (0, 1, 0)
    if value.op not in ("add", "sub", "neg", "mul") or value.kind != "int":
        return None
    forms = [_form(program, x) for x in value.args]
    if any(x is None for x in forms):
        return None
    x, *others = forms
    assert x is not None
    if value.op == "neg":
        return _added((0, 0, 0), x, -1)
    y = others[0]
    assert y is not None
    if value.op != "mul":
        return _added(x, y, 1 if value.op == "add" else -1)
    if x[:2] == (0, 0):
        x, y = y, x
    return _added((0, 0, 0), x, y[2]) if y[:2] == (0, 0) else None
