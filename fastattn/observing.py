"""Which attention calls a model makes: seen while it runs, by stand-ins that go afterwards."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from . import api, conversion
from .backend import choose
from .check import describe
from .structure import Shown, structure

SDPA = "scaled_dot_product_attention"
HEADS = "nn.MultiheadAttention, torch's inference path"
LAYER = "nn.TransformerEncoderLayer, torch's inference path"


@dataclass
class Call:
    """Calls of one kind: the same shapes and the same sort of mask, in modules of one name."""

    function: str
    path: str  # with * for a number
    q: tuple[int, ...]
    k: tuple[int, ...]
    dtype: str
    mask: str  # "" for none
    shown: Shown | None
    options: str  # "causal, dropout 0.1"
    runs: str  # what ran it
    now: Callable[[], Any] = field(repr=False)  # the first of them, once more
    ours: Callable[[], Any] | None = field(repr=False)  # the same, as a patched model makes it
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)  # of torch's function
    where: Counter[str] = field(default_factory=Counter)
    heads: bool = False  # of an nn.MultiheadAttention, which `convert` reaches
    fewest: int = 0  # keys, of calls of one row, which differ in them while a text grows
    seconds: float = 0.0  # of all of them, as they ran

    @property
    def count(self) -> int:
        return self.where.total()


@contextmanager
def converted(module: nn.Module) -> Generator[tuple[str, ...]]:
    """`fastattn.convert`, and back what that has swapped."""
    swapped = conversion.convert(module).swapped
    try:
        yield swapped
    finally:
        for name in swapped:
            conversion.revert(module.get_submodule(name))


class Observer:
    def __init__(self, owner: nn.Module | None):
        self.names = {} if owner is None else {id(m): n for n, m in owner.named_modules()}
        self.modules: list[nn.Module] = []
        self.calls: dict[tuple, Call] = {}
        self._masks: dict[tuple, tuple[Tensor, Shown]] = {}
        self._inside = False

    @contextmanager
    def watching(self) -> Generator[None]:
        with ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(self._enter).remove)
            undo.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            for holder, name, watch in (
                (F, SDPA, self._sdpa),
                (torch, "_native_multi_head_attention", self._heads),
                (torch, "_transformer_encoder_layer_fwd", self._layer),
                (api, "call", self._own),
            ):
                found = getattr(holder, name)
                undo.callback(setattr, holder, name, found)
                setattr(holder, name, self._stand_in(found, watch))
            yield

    def _enter(self, module: nn.Module, args) -> None:
        self.modules.append(module)

    def _leave(self, module: nn.Module, args, out) -> None:
        while self.modules and self.modules.pop() is not module:
            pass

    def _stand_in(self, found: Callable, watch: Callable) -> Callable:
        def stand_in(*args, **kwargs):
            if self._inside:  # of a call that is seen
                return found(*args, **kwargs)
            self._inside = True
            try:
                began = clock()
                out = found(*args, **kwargs)
                seconds = clock() - began
                call = watch(found, *args, **kwargs)
            finally:
                self._inside = False
            if call is not None:
                self._add(call, seconds)
            return out

        return stand_in

    def _add(self, call: Call, seconds: float) -> None:
        module = self.modules[-1] if self.modules else None
        path = self.names.get(id(module), type(module).__name__) if module else ""
        call.path = re.sub(r"(?<![a-zA-Z])\d+", "*", path)  # attn1 and attn2 are two
        call.heads, call.fewest = isinstance(module, nn.MultiheadAttention), call.k[-2]
        grows = call.q[-2] == 1
        key: tuple = call.function, call.path, call.q, call.dtype, call.options, call.runs
        if not grows:
            key += call.k, call.mask, call.shown and call.shown.what
        kept = self.calls.get(key)
        if kept is None or grows:  # the longest stands for all
            self.calls[key] = call
        if kept is not None and grows:
            call.where, call.seconds = kept.where, kept.seconds
            call.fewest = min(call.fewest, kept.fewest)
        self.calls[key].where[path] += 1
        self.calls[key].seconds += seconds

    # ------------------------------------------------------------------------- what each one sees

    def _sdpa(
        self, found, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest
    ):
        if query.is_nested:
            return self._opaque(
                found, SDPA, (query, key, value), attn_mask, dropout_p, is_causal, rest
            )
        q, k, v = _leaves(query, key, value)
        mask = None if attn_mask is None else attn_mask.detach()
        given: dict[str, Any] = dict(
            attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, **rest
        )
        return Call(
            SDPA,
            "",
            tuple(q.shape),
            tuple(k.shape),
            str(q.dtype)[6:],
            _named(attn_mask),
            self._shown(attn_mask, q.shape[-2], k.shape[-2]),
            _options(is_causal, dropout_p, rest.get("scale"), rest.get("enable_gqa")),
            _kernel(found, q, k, v, given),
            now=lambda: found(q, k, v, **given),
            ours=lambda: F.scaled_dot_product_attention(q, k, v, **given),
            arguments=dict(query=q, key=k, value=v, **given),
        )

    def _opaque(self, found, function, tensors, mask, dropout_p, is_causal, rest) -> Call:
        """Nested: no shape to speak of."""
        q, k = (_shape(x) for x in tensors[:2])
        args = (*(x.detach() for x in tensors), mask, dropout_p, is_causal)
        return Call(
            function,
            "",
            q,
            k,
            str(tensors[0].dtype)[6:],
            _named(mask),
            None,
            _options(is_causal, dropout_p, rest.get("scale"), None),
            "torch, nested",
            now=lambda: found(*args, **rest),
            ours=lambda: F.scaled_dot_product_attention(*args, **rest),
        )

    def _heads(self, found, *args) -> Call:
        query, key, value, width, heads = args[:5]
        mask, need_weights, average, kind = args[9:13]
        module = self.modules[-1]

        def ours():
            names = {0: "attn_mask", 1: "key_padding_mask", 2: "attn_mask"}
            given = {} if mask is None else {names[kind]: mask if kind < 2 else mask.flatten(0, 1)}
            asked = dict(need_weights=need_weights, average_attn_weights=average)
            with converted(module):
                return module(query, key, value, **asked, **given)

        return self._of_heads(HEADS, found, args, query, key, heads, width, mask, kind, ours)

    def _layer(self, found, *args) -> Call:
        x, width, heads, mask, kind = args[0], args[1], args[2], args[-2], args[-1]
        module = self.modules[-1]

        def ours():
            names = {0: "src_mask", 1: "src_key_padding_mask"}
            with converted(module):
                return module(x, **({} if mask is None else {names[kind]: mask}))

        return self._of_heads(LAYER, found, args, x, x, heads, width, mask, kind, ours)

    def _of_heads(self, function, found, args, query, key, heads, width, mask, kind, ours) -> Call:
        q, k = ((x[0], heads, x[1], width // heads) for x in (_shape(query), _shape(key)))
        shown = None
        if mask is not None and not query.is_nested:
            keep = ~mask if mask.dtype == torch.bool else mask  # True hides, in a module's masks
            shown = self._shown(keep[:, None, None] if kind == 1 else keep, q[2], k[2])
        return Call(
            function,
            "",
            q,
            k,
            str(query.dtype)[6:],
            _named(mask),
            shown,
            "",
            "torch, one operator",
            now=lambda: found(*args),
            ours=ours,
        )

    def _own(self, found, op, t, o) -> Call:
        spec = describe(t, o)
        options = _options(o.causal, o.dropout_p, o.scale, None)
        named = [n for n in ("left", "right", "softcap") if getattr(o, n) is not None]
        beside = [n for n in t._fields if n not in ("q", "k", "v", "mask", "seed", "normaliser")]
        named += [n for n in beside if getattr(t, n) is not None]
        return Call(
            f"fastattn {op.name}",
            "",
            tuple(t.q.shape),
            tuple(t.k.shape),
            str(t.q.dtype)[6:],
            _named(t.mask),
            self._shown(t.mask, t.q.shape[-2], t.k.shape[-2]) if t.cu_q is None else None,
            ", ".join(filter(None, [options, *named])),
            f"fastattn {choose(spec, o.backend).name}",
            now=lambda: found(op, t, o)[0],
            ours=None,
        )

    def _shown(self, mask: Tensor | None, M: int, N: int) -> Shown | None:
        """Looked at once for each mask, whatever views of it there are."""
        if not isinstance(mask, Tensor) or type(mask) not in (Tensor, nn.Parameter):
            return None
        key = mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask._version, M, N
        if key not in self._masks:
            with torch.no_grad():
                self._masks[key] = mask, structure(mask, M, N)  # kept, that no other lies there
        return self._masks[key][1]


def clock() -> float:
    """Seconds, when what a GPU was given is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _shape(x: Tensor) -> tuple[int, ...]:
    """With -1 where a nested tensor has sizes of its own."""
    if not x.is_nested:
        return tuple(x.shape)
    sizes = []
    for dim in range(x.dim()):
        try:
            sizes.append(int(x.size(dim)))
        except (RuntimeError, TypeError):
            sizes.append(-1)
    return tuple(sizes)


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_(_needs_gradient(x)) for x in tensors)


def _needs_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _named(mask: Tensor | None) -> str:
    if mask is None:
        return ""
    shape = _shape(mask)
    dense = ", dense" if len(shape) > 1 and shape[-2] > 1 else ""
    return f"{shape} {str(mask.dtype)[6:]}{dense}"


def _options(causal, dropout_p, scale, grouped) -> str:
    said = {"causal": causal, f"dropout {dropout_p:g}": dropout_p, "a scale": scale is not None}
    return ", ".join(name for name, given in {**said, "grouped heads": grouped}.items() if given)


def _kernel(found, q, k, v, given) -> str:
    """Which of torch's kernels takes the call; or who stands there instead."""
    if not isinstance(found, type(len)):
        return "fastattn.patch()" if found.__module__ == "fastattn.patching" else found.__module__
    try:
        choice = torch._fused_sdp_choice(q, k, v, **given)
    except (RuntimeError, TypeError):
        return "torch"
    members: Any = SDPBackend
    names = {int(x): name for name, x in members.__members__.items()}
    return f"torch {names.get(choice, 'OTHER').lower().replace('_attention', '')}"
