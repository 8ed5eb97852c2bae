"""Refuse words of a private style in comments and docstrings.

    python -m tests.support.plain_words [PATH]

It prints `path:line: word: text` for each line that has one, then how many lines there are. The
exit status is 1 if a line has one. It reads the Python, C++ and CUDA files that git knows.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

REFUSED = "who", "whom", "whose", "whoever", "nobody", "somebody", "said", "told"
REFUSES = re.compile(rf"\b({'|'.join(REFUSED)})\b", re.IGNORECASE)
CPP = (".c", ".h", ".cpp", ".cu", ".cuh")
# Strings and characters first: they may contain what begins a comment.
CPP_TOKENS = re.compile(
    r'"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'"
    r"|(?P<comment>//[^\n]*|/\*.*?\*/)",
    re.DOTALL,
)
Line = tuple[int, str]  # from 1


def python_lines(text: str) -> Iterator[Line]:
    """Lines of comments and docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            string = node.body[0]
            for at in range(string.lineno, string.end_lineno + 1):
                yield at, lines[at - 1]


def cpp_lines(text: str) -> Iterator[Line]:
    """Lines of comments."""
    for found in CPP_TOKENS.finditer(text):
        if found["comment"]:
            first = text.count("\n", 0, found.start()) + 1
            yield from enumerate(found["comment"].split("\n"), first)


def lines(path: Path) -> list[Line]:
    """Those with at least one letter."""
    read = cpp_lines if path.suffix in CPP else python_lines
    return sorted(x for x in read(path.read_text()) if re.search("[a-zA-Z]", x[1]))


def files(paths: list[str]) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths],
        check=True,
        capture_output=True,
        text=True,
    )
    found = sorted({Path(x) for x in listed.stdout.split("\0") if x})
    return [x for x in found if x.suffix in (".py", *CPP) and x.exists()]


def main(paths: list[str]) -> int:
    every = refused = 0
    for path in files(paths):
        for at, line in lines(path):
            every += 1
            if word := REFUSES.search(line):
                refused += 1
                print(f"{path}:{at}: {word[0]}: {line.strip()}")
    rate = 100 * refused / max(1, every)
    print(f"{refused} of {every} lines of comments and docstrings, {rate:.2f} in 100")
    return refused > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
