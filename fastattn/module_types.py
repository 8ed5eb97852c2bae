"""Types for type checkers: calling a module has the signature of its `forward`."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

Forward = TypeVar("Forward", covariant=True)


class HasForward(Protocol[Forward]):
    """A module, described by the type of its `forward` with all overloads."""

    @property
    def forward(self) -> Forward:
        """The method."""
        ...


class AsForward:
    """The type of `__call__`, which torch.nn.Module declares as Callable[..., Any].

    `__call__: AsForward` in the body of a class is only an annotation: it defines nothing at run
    time, and torch's own `__call__` runs.
    """

    def __get__(self, module: HasForward[Forward], owner: Any) -> Forward:
        raise NotImplementedError("AsForward is for annotations alone")
