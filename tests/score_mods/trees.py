"""Random expressions of score, b, h, i, j and captured tables, for hypothesis."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from tests.score_mods.gallery import B, H, N

G = torch.Generator().manual_seed(7)
TABLES = {
    "float": torch.randn(H, N, generator=G, dtype=torch.float64).requires_grad_(),
    "int": torch.randint(-5, 20, (B, N), generator=G),
    "bool": torch.randint(0, 2, (N, N), generator=G).bool(),
    "vector": torch.randint(-3, 9, (N,), generator=G),
}


class Tree(NamedTuple):
    """State an expression: its text in Python, and the function of it."""

    text: str
    function: Callable


def made(text: str, scores: bool) -> Tree:
    names = "s, b, h, i, j" if scores else "b, h, i, j"
    return Tree(text, eval(f"lambda {names}: {text}", {"torch": torch, **TABLES}))


FLOATS = (
    "({f} + {f})", "({f} - {f})", "({f} * {f})", "({f} / (1 + {f}.abs()))", "torch.tanh({f})",
    "torch.sigmoid({f})", "torch.where({b}, {f}, {f})", "torch.maximum({f}, {f})",
    "torch.exp(-{f}.abs())", "({n} * 0.25 + {f})", "(-{f})", "{f}.clamp(-1.5, 1.5)",
    "{n}.to(torch.float64)",
    "torch.cos({f})", "torch.sqrt(1 + {f} * {f})", "{f}.floor()", "(2 - {f})", "({n} / 7)",
    "float[h, {n} % 12]",
)  # fmt: skip
INTS = (
    "({n} + {n})", "({n} - {n})", "({n} * {n})", "({n} // {n})", "({n} % {n})", "{n}.abs()",
    "torch.minimum({n}, {n})", "torch.where({b}, {n}, {n})", "({n} & {n})", "({n} | {n})",
    "({n} ^ {n})", "(~{n})", "({n} >> 1)", "(({n} & 7) << 2)", "torch.sign({n})", "{b}.long()",
    "int[b, {n} % 12]", "vector[{n} % 24 - 12]", "{n}.clamp(-2, 9)", "({n} * 3 - 4)",
    "(1 << ({n} & 3))",
)  # fmt: skip
BOOLS = (
    "({n} >= {n})", "({n} < {n})", "({n} == {n})", "({n} != {n})", "({b} & {b})", "({b} | {b})",
    "({b} ^ {b})", "(~{b})", "bool[{n} % 12, {n} % 12]", "bool[{n} % 12, j]", "bool[i, {n} % 12]",
    "torch.where({b}, {b}, {b})", "{n}.bool()", "torch.logical_and({n}, {b})",
    "({f} > {f})",
)  # fmt: skip
LEAVES = {
    "float": ("float[h, i]", "float[h, j]", "(i * 0.5)", "(j - 3.0)"),
    "int": ("i", "j", "h", "b", "int[b, j]", "vector[i]", "(i - j)", "(j + 2)"),
    "bool": ("(i >= j)", "bool[i, j]", "(vector[i] == vector[j])", "(j < 5)"),
}


@st.composite
def trees(draw, kind: str, *, scores: bool, depth: int = 4) -> Tree:
    """A random expression with a result of `kind`."""

    def text(kind: str, left: int) -> str:
        if left == 0 or draw(st.integers(0, 4)) == 0:
            leaves = LEAVES[kind] + (("s", "s * 0.5") if scores and kind == "float" else ())
            return f"({draw(st.sampled_from(leaves))})"
        form = draw(st.sampled_from(dict(float=FLOATS, int=INTS, bool=BOOLS)[kind]))
        for mark, inner in (("{f}", "float"), ("{n}", "int"), ("{b}", "bool")):
            while mark in form:
                form = form.replace(mark, text(inner, left - 1), 1)
        return form

    return made(text(kind, depth), scores)
