"""A call of attention that a model made: what it was, what it ran under, how to make it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .structure import Shown
from .torch_form import is_causal_bias

SDPA = "scaled_dot_product_attention"
HEADS = "nn.MultiheadAttention, torch's inference path"
LAYER = "nn.TransformerEncoderLayer, torch's inference path"
WEIGHTS = "nn.MultiheadAttention with weights"

KERNELS = ("flash", "mem_efficient", "math", "cudnn", "overrideable")


class State(NamedTuple):
    """What decides how a call runs, beside what it gets."""

    kernels: tuple[bool, ...]  # that torch may choose
    order: list[int]
    device: str
    autocast: bool
    dtype: torch.dtype  # of autocast

    @classmethod
    def of(cls, device: str) -> State:
        kernels = tuple(getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in KERNELS)
        known = torch.amp.is_autocast_available(device)
        return cls(
            kernels,
            torch._C._get_sdp_priority_order(),
            device,
            known and torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device) if known else torch.float32,
        )

    @contextmanager
    def entered(self) -> Generator[None]:
        before = State.of(self.device)
        if before == self:  # costs less than the smallest calls
            yield
            return
        self._choose()
        try:
            if (before.autocast, before.dtype) == (self.autocast, self.dtype):
                yield
            else:
                with torch.autocast(self.device, self.dtype, enabled=self.autocast):
                    yield
        finally:
            before._choose()

    def _choose(self) -> None:
        for name, enabled in zip(KERNELS, self.kernels, strict=True):
            getattr(torch._C, f"_set_sdp_use_{name}")(enabled)
        torch._C._set_sdp_priority_order(self.order)

    def computed(self, dtype: torch.dtype) -> str:
        """The name of the dtype that tensors of `dtype` are computed in."""
        casts = self.autocast and dtype.is_floating_point and dtype != torch.float64
        return str(self.dtype if casts else dtype).removeprefix("torch.")


@dataclass
class Call:
    """Calls of one kind: the same shapes and the same sort of mask, in modules of one name."""

    function: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    dtype: str
    mask: str  # "" for none
    shown: Shown | None
    options: str  # "causal, dropout 0.1"
    runs: str  # what ran it
    state: State = field(repr=False)
    now: Callable[[], Any] = field(repr=False)  # the first of them, once more
    ours: Callable[[], Any] | None = field(repr=False)  # the same, as a patched model makes it
    left: str = ""  # why `convert` leaves its module alone
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)  # of torch's function
    leaves: list[Tensor] = field(default_factory=list, repr=False)  # that backward is for
    module: Any = field(default=None, repr=False)  # that it belongs to, where that is known
    path: str = ""  # with * for a number
    where: Counter[str] = field(default_factory=Counter)
    heads: bool = False  # of an nn.MultiheadAttention, which `convert` reaches
    backward: bool = False  # went through what it gave
    fewest: int = 0  # keys, of calls that differ in them while a text grows
    seconds: float = 0.0  # of all of them, as they ran

    @property
    def count(self) -> int:
        return self.where.total()

    @property
    def by(self) -> str:
        """What brings it to fastattn."""
        return "patched" if self.function == SDPA else "converted"


# ----------------------------------------------------------------------------------- in a few words


def shape(x: Tensor) -> tuple[int, ...]:
    """With -1 where a nested tensor has sizes of its own."""
    if not x.is_nested:
        return tuple(x.shape)
    sizes = []
    for dim in range(x.dim()):
        try:
            size = x.size(dim)
        except RuntimeError:  # of strided ones
            size = None
        sizes.append(size if type(size) is int else -1)
    return tuple(sizes)


def named(mask: Tensor | None, columns: bool = False) -> str:
    """columns: of keys alone, (B,N)."""
    if mask is None:
        return ""
    if is_causal_bias(mask):
        return "CausalBias"
    sizes = shape(mask)
    dense = ", dense" if len(sizes) > 1 and sizes[-2] > 1 and not columns else ""
    return f"{sizes} {str(mask.dtype)[6:]}{dense}"


def options(causal: Any, dropout_p: float, scale: float | None, grouped: bool | None) -> str:
    said = {"causal": causal, f"dropout {dropout_p:g}": dropout_p, "a scale": scale is not None}
    return ", ".join(name for name, given in {**said, "grouped heads": grouped}.items() if given)
