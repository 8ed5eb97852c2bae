"""Make one call again: `python -m tests.features dense avx512 M=1 sinks=200`. What is not named has
its default (`factors.py`)."""

import ast
import sys

from tests.features import checking, factors


def literal(text):
    """A level of no list (`factors.edges`)."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


def main(form, way, *given):
    factor = factors.FORMS[form]
    row = {name: levels[0] for name, levels in factor.items()}
    for name, _, text in (x.partition("=") for x in given):
        row[name] = {str(x): x for x in factor[name]}.get(text) or literal(text)
    found = checking.complaints(form, row, way)
    print("\n".join(found) or "right")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
