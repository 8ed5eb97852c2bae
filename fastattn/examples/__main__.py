"""python -m fastattn.examples: the examples, and what each shows."""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parent


def examples() -> dict[str, str]:
    """The first sentence of each example's documentation, by the name of its module. A module is an
    example if it has a main function that runs when the module does."""
    found = {}
    for path in sorted(FOLDER.glob("[a-z]*.py")):
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            about = ast.get_docstring(ast.parse(text)) or ""
            found[path.stem] = " ".join(about.partition("\n\n")[0].split())
    return found


def main() -> None:
    print("python -m fastattn.examples.NAME runs an example; --help lists its options.\n")
    for name, about in examples().items():
        print(f"{name}\n    {about}")


if __name__ == "__main__":
    main()
