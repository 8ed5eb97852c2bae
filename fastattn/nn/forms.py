"""Base classes of modules that return out or, with need_weights, also the weights: `forward` with
its types and its documentation."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from .core import Leaf


class TokensForward(Leaf):
    """`forward` of modules that attend the tokens x to each other."""

    @overload
    def forward(
        self, x: Tensor, mask: Tensor | None = None, need_weights: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, need_weights: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self, x: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def forward(
        self, x: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend the tokens of x to each other.

        Args:
            x: Tokens.
            mask: 0 or False hides a key.
            need_weights: If True, also return the weights after dropout.

        Returns:
            out, or (out, weights) with need_weights.

        Raises:
            ValueError: x or the mask does not have the shape that the class states, or a float mask
                on a CPU contains -inf.
        """
        out, weights = self._compute(x, mask, need_weights)
        return out if weights is None else (out, weights)

    def _compute(
        self, x: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out, weights); the weights are None without need_weights."""
        raise NotImplementedError


class KeyValueForward(Leaf):
    """`forward` of modules that attend q to the keys k and the values v."""

    @overload
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        need_weights: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        need_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend each row of q to the keys k, and return weighted sums of v.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            mask: 0 or False hides a key.
            need_weights: If True, also return the weights after dropout.

        Returns:
            out, or (out, weights) with need_weights.

        Raises:
            ValueError: A tensor does not have the shape that the class states, or a float mask on a
                CPU contains -inf.
        """
        out, weights = self._compute(q, k, v, mask, need_weights)
        return out if weights is None else (out, weights)

    def _compute(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out, weights); the weights are None without need_weights."""
        raise NotImplementedError
