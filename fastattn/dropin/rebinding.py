"""Bind every name that modules gave to a function to another function, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Names:
    """The names of one function.

    A search through all modules takes milliseconds, and `sdpa` may be entered at every step. So
    the names are remembered, and a search is repeated only where another one may have been bound.
    """

    def __init__(self, owner: str) -> None:
        """owner: the module that keeps its own names as they are."""
        self._owner = owner
        # Every name that was ever bound to the function, with the dictionary of its module; those
        # that the last `rebind` bound; and what `_references` was after it.
        self._places: dict[tuple[int, str], dict[str, Any]] = {}
        self._bound: list[tuple[dict[str, Any], str]] = []
        self._counted: tuple[int, int] | None = None

    def rebind(self, old: Callable[..., Any], new: Callable[..., Any]) -> None:
        """Bind every name of every module that is bound to `old` to `new`."""
        stay = all(names.get(name) is old for names, name in self._bound)
        if not stay or _references(old) != self._counted:
            self._search(old)
        self._bound = [(names, x) for (_, x), names in self._places.items() if names.get(x) is old]
        for names, name in self._bound:
            names[name] = new
        self._counted = _references(new)

    def _search(self, function: Callable[..., Any]) -> None:
        """Add the names that are bound to a function to `_places`."""
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict) or module is sys.modules[self._owner]:
                continue
            # True for few modules; the next loop is slower.
            if id(function) in map(id, list(names.values())):
                bound = [name for name, x in list(names.items()) if x is function]
                self._places.update({(id(names), name): names for name in bound})


def _references(function: Callable[..., Any]) -> tuple[int, int]:
    """Numbers that change where a name is bound to the function: of references, and of modules."""
    return sys.getrefcount(function), len(sys.modules)
