"""Faults of C++, by its tokens. clang-format tells a comparison from a template's bracket: only
binary operators have a space on both sides."""

import re
from typing import NamedTuple

from .fault import HINTS, Fault

TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|/\*.*?\*/|\#(?:[^\n\\]|\\.)*|R?"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark><<=|>>=|->\*?|\+\+|--|&&|\|\||::|[-+*/%&|^=!<>]=|<<|>>|[^\s\w])""",
    re.S | re.X,
)
SHIFTED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
NEGATED = {"==": "!=", "!=": "=="}
JOINED = {"&&": "||", "||": "&&"}
SIGNS = {"+": "-", "-": "+", "+=": "-=", "-=": "+="}
EXTREME = {"min": "max", "max": "min", "least": "most", "most": "least"}
OPEN, CLOSE = "([{", ")]}"
ENDS = {",", ";", "?", ":", "=", "+", "-", "<", ">", "&", "|", "^", *SHIFTED, *NEGATED, *JOINED}
WHOLE = {"(", ")", "[", "]", ",", ";", "=", "return", "?", ":", "+", *SHIFTED, *NEGATED, *JOINED}
INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|[1-9]\d*|0)([uUlL]*)")
KEYWORDS = {"return", "using", "template", "if", "for", "while", "switch", "else", "do", "case"}


class Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


def tokens(source):
    found = (Token(x.lastgroup, x[0], *x.span()) for x in TOKEN.finditer(source))
    return [x for x in found if x.kind != "skip"]


def faults(file, source):
    """Every fault that the rules make of a file's text."""
    every = tokens(source)
    hints = set(skipped(every))
    for i in range(len(every)):
        if i not in hints:
            for rule, start, end, new in changes(source, every, i):
                yield Fault(file, source.count("\n", 0, start) + 1, rule, start, end, new)


def skipped(every):
    """Tokens of hints and of checks at compile time."""
    for i, x in enumerate(every):
        if x.text in HINTS | {"static_assert", "alignas", "assert"}:
            yield from range(i, closed(every, i + 1) + 1)


def closed(every, i):
    """The token that closes what token i opens; i, if it opens nothing."""
    depth = 0
    for j in range(i, len(every)):
        depth += (every[j].text in OPEN) - (every[j].text in CLOSE)
        if depth <= 0:
            return j
    return i


def term_end(every, i):
    """The last token of the term that begins at token i."""
    while i + 1 < len(every):
        i = closed(every, i)
        if every[i + 1].text in ENDS or every[i + 1].text in CLOSE:
            return i
        i += 1
    return i


def spaced(source, x):
    return source[x.start - 1] in " \n" and source[x.end] in " \n"


def changes(source, every, i):
    """(rule, start, end, new text) of the faults at token i"""
    x = every[i]
    before, after = every[i - 1], every[min(i + 1, len(every) - 1)]
    tables = ("off by one", SHIFTED), ("negated", NEGATED), ("and for or", JOINED), ("sign", SIGNS)
    for rule, table in tables:
        if x.kind == "mark" and x.text in table and spaced(source, x):
            yield rule, x.start, x.end, table[x.text]
    if x.text in ("+", "-") and spaced(source, x):
        yield "term dropped", before.end, every[term_end(every, i + 1)].end, ""
    if x.text in ("-", "/", "%") and spaced(source, x) and whole(every, i - 1, i + 1):
        yield "operands swapped", before.start, after.end, f"{after.text} {x.text} {before.text}"
    prefix = before.text == "return" or (before.kind == "mark" and before.text not in CLOSE)
    if x.text in ("!", "-") and prefix and after.kind == "name":
        yield "negated" if x.text == "!" else "sign", x.start, x.end, ""
    if x.text in ("true", "false"):
        yield "negated", x.start, x.end, "false" if x.text == "true" else "true"
    if x.text in EXTREME and after.text in ("(", "<"):
        yield "min for max", x.start, x.end, EXTREME[x.text]
    if x.kind == "number" and (number := INTEGER.fullmatch(x.text)):
        yield "off by one", x.start, x.end, f"{int(number[1], 0) + 1}{number[2]}"
    if x.text == "if" and after.text == "(":
        end = every[closed(every, i + 1)].start
        for value in ("true", "false"):
            yield "guard dropped", after.end, end, value
    begins = before.text in ("{", "}", ";", ")") and x.kind == "name" and x.text not in KEYWORDS
    if begins and (end := statement(every, i)):
        yield "statement dropped", x.start, every[end].end, ";"


def whole(every, left, right):
    """Are these two tokens the whole operands of what is between?"""
    around = every[left - 1].text in WHOLE and every[min(right + 1, len(every) - 1)].text in WHOLE
    return around and {every[left].kind, every[right].kind} <= {"name", "number"}


def statement(every, i):
    """The semicolon of a call or an assignment that begins at token i, else None."""
    while i + 2 < len(every):
        after = every[i + 1]
        if after.text in (".", "->", "::"):
            i += 2
        elif after.text in ("(", "["):
            i = closed(every, i + 1)
        elif after.text == ";":
            return i + 1 if every[i].text == ")" else None
        elif re.fullmatch(r"[-+*/|&%^]?=", after.text):
            while every[i].text != ";" and every[i].text not in CLOSE:
                i = closed(every, i) + 1
            return i if every[i].text == ";" else None
        else:
            return None
    return None
