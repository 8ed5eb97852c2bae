"""Types for checkers: a module's call takes and returns what its `forward` does."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

Forward = TypeVar("Forward", covariant=True)


class HasForward(Protocol[Forward]):
    """A module, by the type of its `forward`, with all overloads."""

    @property
    def forward(self) -> Forward:
        """The method."""
        ...


class AsForward:
    """The type of `__call__`, which torch.nn.Module says is Callable[..., Any].

    `__call__: AsForward` in the body of a class is an annotation alone: nothing is there at run
    time, and a call is torch's own.
    """

    def __get__(self, module: HasForward[Forward], owner: Any) -> Forward:
        raise NotImplementedError("AsForward is for annotations alone")
