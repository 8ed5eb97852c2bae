"""The lint of words reads comments and docstrings, and nothing else."""

from tests.support.plain_words import REFUSES, cpp_lines, python_lines

# Refused words in comments, which the lint reads, and in code, which it does not.
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
   two lines: who */ int b = '"'; // a comment: said
"""


def test_lines_with_refused_words():
    assert [n for n, line in sorted(python_lines(PYTHON)) if REFUSES.search(line)] == [1, 2, 6, 9]
    assert [n for n, line in cpp_lines(CPP) if REFUSES.search(line)] == [1, 3, 3]
