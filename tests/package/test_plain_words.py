"""The lint of words reads comments and docstrings, and nothing else."""

import subprocess

import pytest

from tests.support.plain_words import REFUSED, cpp_lines, main, python_lines

# Each text has refused words in comments, which the lint reads, and in code, which it does not.
PYTHON = '''"""A docstring with the word who."""
x = "a string: nobody"  # a comment: whose
def f():
    """First line.

    A later line: told.
    """
    y = """a string: somebody"""
    return y  # a comment: said
'''
CPP = """#include "who.h"  // a comment: whose
const char* a = "http://nobody";  /* a comment of
   two lines */ int b = '"'; // a comment: said
char c = '\\\\'; // a comment: four
"""


def test_python():
    found = sorted(python_lines(PYTHON))
    assert [at for at, _ in found] == [1, 2, 4, 5, 6, 7, 9]
    text = " ".join(line for _, line in found)
    assert "whose" in text and "told" in text and "said" in text
    assert "somebody" not in text


def test_cpp():
    found = list(cpp_lines(CPP))
    assert [at for at, _ in found] == [1, 2, 3, 3, 4]
    text = " ".join(line for _, line in found)
    assert "whose" in text and "two" in text and "said" in text and "four" in text
    assert "nobody" not in text and "who.h" not in text


@pytest.mark.parametrize("word", [*REFUSED, "Who"])
def test_words(word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    (tmp_path / "a.py").write_text(f"x = 1  # {word} is it\ny = 2  # {word}s\n")
    (tmp_path / "b.cuh").write_text("// fine\n")
    assert main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"a.py:1: {word}: # {word} is it",
        "1 of 3 lines of comments and docstrings, 33.33 in 100",
    ]
    assert main(["b.cuh"]) == 0
