"""Refuse words of a private style in comments and docstrings.

    python -m tests.support.plain_words [PATH]

It prints `path:line: word: text` for each line that has one, and the exit status is 1 if there is
one. It reads the Python, C++ and CUDA files that git knows.
"""

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
BEGIN_STATEMENTS = tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT
Line = tuple[int, str]  # from 1


def python_lines(text: str) -> Iterator[Line]:
    """Lines of comments and docstrings: strings that begin a statement."""
    before = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
        elif token.type == tokenize.STRING and before in (None, *BEGIN_STATEMENTS):
            yield from enumerate(token.string.split("\n"), token.start[0])
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type


def cpp_lines(text: str) -> Iterator[Line]:
    """Lines of comments."""
    for found in CPP_TOKENS.finditer(text):
        if found["comment"]:
            first = text.count("\n", 0, found.start()) + 1
            yield from enumerate(found["comment"].split("\n"), first)


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
    refused = False
    for path in files(paths):
        read = cpp_lines if path.suffix in CPP else python_lines
        for at, line in read(path.read_text()):
            if word := REFUSES.search(line):
                refused = True
                print(f"{path}:{at}: {word[0]}: {line.strip()}")
    return refused


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
