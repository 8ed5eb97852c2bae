"""The environment variables with a fixed set of values, and their reader. Others name files,
folders and instruction sets; what loads these says what is wrong with them."""

from __future__ import annotations

import os

VALUES = {  # the first is as without the variable
    "FASTATTN_LOG": ("0", "1"),
    "FASTATTN_CHECK": ("0", "1"),
    "FASTATTN_FLOAT32": ("tiles", "vector"),
    "FASTATTN_SM90": ("on", "off"),
    "FASTATTN_EXTENSION": ("auto", "on", "off"),
}


def setting(name: str) -> str:
    """The value of a variable of `VALUES`; the first one if it is not set or empty.

    Raises:
        ValueError: The variable has another value.
    """
    values = VALUES[name]
    got = os.environ.get(name) or values[0]
    if got not in values:
        *others, last = f"{values[0]} (as without it)", *values[1:]
        raise ValueError(f"{name}: got {got!r}, expected {', '.join(others)} or {last}")
    return got


for _each in VALUES:  # at import: many are read late, or never
    setting(_each)
