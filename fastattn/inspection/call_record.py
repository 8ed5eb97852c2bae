"""Store an attention call of a model: its arguments, its global state, and how to repeat it.

`recorder` replaces the functions and finds the calls; `capture` converts their arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dropin.sdpa import is_causal_bias
from .mask_structure import MaskStructure

SDPA = "scaled_dot_product_attention"
MULTIHEAD = "nn.MultiheadAttention, torch's inference path"
LAYER = "nn.TransformerEncoderLayer, torch's inference path"
WEIGHTS = "nn.MultiheadAttention with weights"

KERNELS = ("flash", "mem_efficient", "math", "cudnn", "overrideable")


class State(NamedTuple):
    """The global state that decides how a call runs, beside its arguments."""

    kernels: tuple[bool, ...]  # for each of KERNELS: may torch choose it?
    order: list[int]  # torch's priority order of the kernels
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
        if before == self:  # this comparison takes less time than the smallest calls
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
        """The name of the dtype in which tensors of `dtype` are computed."""
        casts = self.autocast and dtype.is_floating_point and dtype != torch.float64
        return str(self.dtype if casts else dtype).removeprefix("torch.")


@dataclass
class CallRecord:
    """Calls of one kind: the same shapes, the same kind of mask, modules of the same name."""

    function: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    dtype: str
    mask: str  # "" for none
    mask_structure: MaskStructure | None  # None: no mask, or not examined
    options: str  # "causal, dropout 0.1"
    runs: str  # the kernel or operator that ran it
    state: State = field(repr=False)
    run_original: Callable[[], Any] = field(repr=False)  # repeats one call as it ran
    ours: Callable[[], Any] | None = field(repr=False)  # the same call in a patched model
    not_converted_because: str = ""  # why `convert` does not swap its module; "" for no reason
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)  # of torch's function
    leaves: list[Tensor] = field(default_factory=list, repr=False)  # tensors that require grad
    module: Any = field(default=None, repr=False)  # the module that made it, if known
    path: str = ""  # the module's name, with * for each number
    where: Counter[str] = field(default_factory=Counter)  # calls by the module's full name
    of_multihead: bool = False  # made by an nn.MultiheadAttention, which `convert` can swap
    backward: bool = False  # a backward pass ran through its result
    fewest: int = 0  # the fewest keys of its calls, which gain keys while a text grows
    seconds: float = 0.0  # measured time of all its calls

    @property
    def count(self) -> int:
        return self.where.total()

    @property
    def by(self) -> str:
        """What makes it run on fastattn: a patched or a converted model."""
        return "patched" if self.function == SDPA else "converted"


# ------------------------------------------------------------------------------- short descriptions


def shape(x: Tensor) -> tuple[int, ...]:
    """The shape of x, with -1 for a dimension that varies in a nested tensor."""
    if not x.is_nested:
        return tuple(x.shape)
    sizes = []
    for dim in range(x.dim()):
        try:
            size = x.size(dim)
        except RuntimeError:  # a strided nested tensor: the size varies
            size = None
        sizes.append(size if type(size) is int else -1)
    return tuple(sizes)


def named(mask: Tensor | None, columns: bool = False) -> str:
    """A description of a mask. columns: the mask covers keys only, (B,N)."""
    if mask is None:
        return ""
    if is_causal_bias(mask):
        return "CausalBias"
    sizes = shape(mask)
    dense = ", dense" if len(sizes) > 1 and sizes[-2] > 1 and not columns else ""
    return f"{sizes} {str(mask.dtype)[6:]}{dense}"


def options(causal: Any, dropout_p: float, scale: float | None, grouped: bool | None) -> str:
    """The options of a call that are not their defaults, as text."""
    texts = {
        "causal": causal,
        f"dropout {dropout_p:g}": dropout_p,
        "a scale": scale is not None,
        "grouped heads": grouped,
    }
    return ", ".join(text for text, given in texts.items() if given)
