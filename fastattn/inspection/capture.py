"""Convert intercepted attention calls into call records."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from ..backends.base import choose
from ..call.spec import Options, Tensors
from ..call.validation import describe
from ..dispatch.operation import Operation
from ..dropin import conversion
from ..dropin.multihead import MultiheadAttention
from ..dropin.sdpa import is_causal_bias
from .call_record import HEADS, LAYER, SDPA, WEIGHTS, CallRecord, State, named, options, shape
from .mask_structure import MaskStructure, kept, structure

Found = Callable[..., Any]  # the intercepted function
SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@contextmanager
def converted(module: nn.Module) -> Generator[tuple[str, ...]]:
    """In the block the module is converted by `fastattn.convert`. Afterwards the swapped submodules
    are reverted."""
    swapped = conversion.convert(module).swapped
    try:
        yield swapped
    finally:
        for name in swapped:
            conversion.revert(module.get_submodule(name))


def wants_weights(*args: Any, **kwargs: Any) -> bool:
    """True if multi_head_attention_forward is asked for weights. If not, it calls another function
    that is intercepted."""
    return _bound(args, kwargs)["need_weights"]


def _bound(args, kwargs) -> dict[str, Any]:
    given = SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


class CallCapture:
    """Makes call records. modules: returns those that may be running, the likeliest first."""

    def __init__(self, modules: Callable[[], Iterable[nn.Module]]):
        self._modules = modules
        self._masks: dict[tuple, tuple[Tensor, MaskStructure]] = {}

    # --------------------------------------------------------------------------- torch's function

    def sdpa(
        self,
        found: Found,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **rest: Any,
    ) -> CallRecord:
        given: dict[str, Any] = dict(
            attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **rest
        )
        state = State.of(query.device.type)
        said = options(is_causal, dropout_p, rest.get("scale"), rest.get("enable_gqa"))
        if query.is_nested:
            return self._nested((query, key, value), given, state, said, found)
        q, k, v = (_leaf(x) for x in (query, key, value))
        if attn_mask is not None and not is_causal_bias(attn_mask):
            given["attn_mask"] = attn_mask.detach()
        return CallRecord(
            SDPA,
            tuple(q.shape),
            tuple(k.shape),
            state.computed(q.dtype),
            named(attn_mask),
            self._shown(attn_mask, q.shape[-2], k.shape[-2]),
            said,
            _kernel(found, q, k, v, given),
            state,
            now=lambda: torchs(found)(q, k, v, **given),
            ours=lambda: F.scaled_dot_product_attention(q, k, v, **given),
            arguments=dict(query=q, key=k, value=v, **given),
            leaves=[x for x in (q, k, v) if x.requires_grad],
        )

    def _nested(self, tensors, given, state, said, found) -> CallRecord:
        """A call on nested tensors, which have no regular shape."""
        q, k, v = (x.detach() for x in tensors)
        return CallRecord(
            SDPA,
            shape(q),
            shape(k),
            state.computed(q.dtype),
            named(given["attn_mask"]),
            None,
            said,
            "torch, nested",
            state,
            now=lambda: found(q, k, v, **given),
            ours=lambda: F.scaled_dot_product_attention(q, k, v, **given),
        )

    # ----------------------------------------------------------------------------- torch's modules

    def heads(self, found: Found, *args: Any) -> CallRecord:
        query, key, value, width, heads = args[:5]
        mask, need_weights, average, kind = args[9:13]
        module, ours, left = self._module(nn.MultiheadAttention, args[7]), None, ""
        if module is not None:
            names = {0: "attn_mask", 1: "key_padding_mask", 2: "attn_mask"}
            asked: dict[str, Any] = dict(need_weights=need_weights, average_attn_weights=average)
            asked |= {} if mask is None else {names[kind]: mask if kind < 2 else mask.flatten(0, 1)}
            twin, left = _twin(module)
            ours = twin and (lambda: twin.forward(query, key, value, **asked))
        call = self._of_heads(HEADS, query, key, heads, width, mask, kind, lambda: found(*args))
        call.ours, call.left, call.module = ours, left, module
        return call

    def layer(self, found: Found, *args: Any) -> CallRecord:
        x, width, heads, mask, kind = args[0], args[1], args[2], args[-2], args[-1]
        module: Any = self._module(nn.TransformerEncoderLayer, args[5])
        call = self._of_heads(LAYER, x, x, heads, width, mask, kind, lambda: found(*args))
        call.module = module
        if module is None:
            return call
        call.left = conversion._why_not_convert(module.self_attn) or ""
        names = {0: "src_mask", 1: "src_key_padding_mask", 2: "src_mask"}
        asked = {} if mask is None else {names[kind]: mask if kind < 2 else mask.flatten(0, 1)}

        def ours():
            with converted(module):
                return module.forward(x, **asked)

        call.ours = None if call.left else ours
        return call

    def _of_heads(self, function, query, key, heads, width, mask, kind, now) -> CallRecord:
        q, k = ((x[0], heads, x[1], width // heads) for x in (shape(query), shape(key)))
        shown = None
        if mask is not None and not query.is_nested:
            shown = self._shown(mask, q[2], k[2], hides=True, columns=kind == 1)
        state = State.of(query.device.type)
        said = named(mask, columns=kind == 1)
        dtype, runs = state.computed(query.dtype), "torch, one operator"
        return CallRecord(function, q, k, dtype, said, shown, "", runs, state, now, None)

    def weights(self, found: Found, *args: Any, **kwargs: Any) -> CallRecord:
        """A call with weights, for which torch multiplies the matrices itself."""
        given = _bound(args, kwargs)
        given |= _leaves_of({x: given[x] for x in ("query", "key", "value")})
        for name in ("attn_mask", "key_padding_mask"):
            given[name] = given[name] if given[name] is None else given[name].detach()
        query, key, width = given["query"], given["key"], given["embed_dim_to_check"]
        sizes = [x.shape if x.ndim == 3 else (x.shape[0], 1) for x in (query, key)]
        heads, dropout = given["num_heads"], given["dropout_p"] * given["training"]
        q, k = ((B, heads, L, width // heads) for L, B, *_ in sizes)
        masks = given["attn_mask"], given["key_padding_mask"]
        said = named(masks[0]), named(masks[1], columns=True)
        module = self._module(nn.MultiheadAttention, given["out_proj_weight"])
        twin, left = (None, "") if module is None else _twin(module)
        state = State.of(query.device.type)
        return CallRecord(
            WEIGHTS,
            q,
            k,
            state.computed(query.dtype),
            " and ".join(filter(None, said)),
            self._shown_together(*masks, heads, q[2], k[2]),
            options(False, dropout, None, None),
            "torch, matrices multiplied",
            state,
            now=lambda: found(**given),
            ours=twin and _as_module(twin, given),
            left=left,
            leaves=_unique(x for x in given.values() if isinstance(x, Tensor) and _differs(x)),
            module=module,
        )

    def _module(self, kind: type[nn.Module], weight: Tensor) -> Any:
        """The running module, found by the weight of its output projection, because its hooks may
        not have run; None if it is not found."""
        for module in self._modules():
            if isinstance(module, kind):
                heads = getattr(module, "self_attn", module)
                if getattr(getattr(heads, "out_proj", None), "weight", None) is weight:
                    return module
        return None

    # ------------------------------------------------------------------------------ fastattn's own

    def own(self, found: Found, op: Operation, t: Tensors, o: Options) -> CallRecord:
        spec = describe(t, o)
        said = options(o.causal, o.dropout_p, o.scale, None)
        beside = [n for n in ("left", "right", "softcap") if getattr(o, n) is not None]
        known = ("q", "k", "v", "mask", "seed", "normaliser")
        beside += [n for n in t._fields if n not in known and getattr(t, n) is not None]
        return CallRecord(
            f"fastattn {op.name}",
            tuple(t.q.shape),
            tuple(t.k.shape),
            str(t.q.dtype)[6:],
            named(t.mask),
            self._shown(t.mask, t.q.shape[-2], t.k.shape[-2]) if t.cu_q is None else None,
            ", ".join(filter(None, [said, *beside])),
            f"fastattn {choose(spec, o.backend).name}",
            State.of(t.q.device.type),
            now=lambda: found(op, t, o)[0],
            ours=None,
        )

    # --------------------------------------------------------------------------------------- masks

    def _shown(
        self, mask: Tensor | None, M: int, N: int, *, hides: bool = False, columns: bool = False
    ) -> MaskStructure | None:
        """The structure of a mask, computed once for the same memory, even through different views.
        hides: True hides a key, as in a module's masks. columns: the mask covers keys only."""
        if not isinstance(mask, Tensor) or type(mask) not in (Tensor, nn.Parameter):
            return None
        version = 0 if mask.is_inference() else mask._version
        at = mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, version, M, N
        if at not in self._masks:
            with torch.no_grad():
                keep = ~mask if hides and mask.dtype == torch.bool else mask
                keep = keep[:, None, None] if columns else keep
                self._masks[at] = mask, structure(keep, M, N)  # the mask keeps its address in use
        return self._masks[at][1]

    def _shown_together(self, mask, padding, heads: int, M: int, N: int) -> MaskStructure | None:
        """The structure of multi_head_attention_forward's two masks together. A mask that is not
        bool is added to the scores."""
        if mask is None and padding is None:
            return None
        if padding is None:
            split = mask.ndim == 3 and mask.shape[0] % heads == 0
            return self._shown(mask.unflatten(0, (-1, heads)) if split else mask, M, N, hides=True)
        if mask is None:
            return self._shown(padding, M, N, hides=True, columns=padding.ndim == 2)
        keep = [~x if x.dtype == torch.bool else kept(x) for x in (mask, padding)]
        if keep[0] is None or keep[1] is None:
            return MaskStructure("added to the scores: a bias")
        rows = keep[0].unflatten(0, (-1, heads)) if mask.ndim == 3 else keep[0]
        keys = keep[1][:, None, None] if padding.ndim == 2 else keep[1]
        return structure(rows & keys, M, N)


def torchs(found: Callable) -> Callable:
    """torch's function, put back into F while it gets a CausalBias: a CausalBias handles only the
    function that F has, and is an uninitialised tensor for others."""

    def call(query, key, value, attn_mask=None, *args, **kwargs):
        if not is_causal_bias(attn_mask):
            return found(query, key, value, attn_mask, *args, **kwargs)
        holder: Any = F
        standing, holder.scaled_dot_product_attention = F.scaled_dot_product_attention, found
        try:
            return found(query, key, value, attn_mask, *args, **kwargs)
        finally:
            holder.scaled_dot_product_attention = standing

    return call


def _kernel(found, q, k, v, given) -> str:
    """The torch kernel that takes the call, or the name of what replaces torch's function."""
    if not isinstance(found, type(len)):
        return (
            "fastattn.patch()"
            if found.__module__ == "fastattn.dropin.patching"
            else found.__module__
        )
    if is_causal_bias(given["attn_mask"]):
        return "torch"
    try:
        choice = torch._fused_sdp_choice(q, k, v, **given)
    except (RuntimeError, TypeError):
        return "torch"
    members: Any = SDPBackend
    names = {int(x): name for name, x in members.__members__.items()}
    return f"torch {names.get(choice, 'OTHER').lower().replace('_attention', '')}"


# --------------------------------------------------------------- copies with which a call can rerun


def _differs(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(_differs(x))


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(x): x for x in tensors}.values())


def _leaves_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A leaf for each tensor, one for the same tensor: torch projects equal inputs at once."""
    made = {id(x): _leaf(x) for x in tensors.values()}
    return {name: made[id(x)] for name, x in tensors.items()}


def _twin(module: nn.MultiheadAttention) -> tuple[Any, str]:
    """What `convert` would make of the module, with the same parameters; or why it would not."""
    if why := conversion._why_not_convert(module):
        return None, why
    twin = copy.copy(module)
    twin.__class__ = MultiheadAttention
    return twin, ""


def _as_module(twin: nn.Module, given: dict[str, Any]) -> Callable[[], Any]:
    """A call of multi_head_attention_forward as a call of the module `twin`. The function takes
    (L,B,E); a batch_first module takes (B,L,E)."""
    tensors = [given[x] for x in ("query", "key", "value")]
    if getattr(twin, "batch_first", False) and tensors[0].ndim == 3:
        turned = {id(x): x.transpose(0, 1) for x in tensors}
        tensors = [turned[id(x)] for x in tensors]
    names = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    asked = {name: given[name] for name in names}
    return lambda: twin.forward(*tensors, **asked)
