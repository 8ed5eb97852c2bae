"""What the loop and an adapter agree on. It is run by any Python, with nothing installed.

An adapter is a module with two functions:

    version() -> str
    prepare(sizes, tensors, threads, variant) -> Prepared    raises Declined

`sizes` are the fields of a row (bench/cpu_engines/cases.py). `tensors` gives (path, dtype, shape)
of q, k and v: (B, H, M, D) and (B, Hk, N, D), or packed (T, H, D)."""

from collections.abc import Callable
from typing import Any, NamedTuple

Sizes = dict[str, Any]
Tensors = dict[str, tuple[str, str, list[int]]]


class Prepared(NamedTuple):
    """`call` computes. `write` stores the output of its last run in float32, as (B, H, M, D) or
    (T, H, D), in a file. The output has at most the error of the dtype or storage `precision`."""

    call: Callable[[], Any]
    write: Callable[[str], None]
    precision: str


class Declined(Exception):
    """The engine has no such call, and why."""


def decline(sizes: Sizes, **values: tuple[Any, ...]) -> None:
    """Raise Declined unless each field has one of these values."""
    for name, expected in values.items():
        if sizes[name] not in expected:
            some = ", ".join(repr(x) for x in expected)
            raise Declined(f"{name} {sizes[name]!r}, takes {some}")


def decline_packed(sizes: Sizes) -> None:
    if sizes["lengths"]:
        raise Declined("takes no packed sequences")


def decline_quantised(sizes: Sizes) -> None:
    if sizes["storage"]:
        raise Declined("its cache has the dtype of queries")
