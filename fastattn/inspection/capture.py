"""Make a call record from the arguments of an intercepted attention call.

This module only converts arguments: `recorder` replaces the functions, and `call_record` defines
the record that is stored.
"""

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
from ..namespace import PACKAGE
from ..score_mods.mod_text import ModText
from .call_record import LAYER, MULTIHEAD, SDPA, WEIGHTS, CallRecord, State, named, options, shape
from .mask_structure import MaskStructure, kept, structure

Original = Callable[..., Any]  # the intercepted function, as it was before it was replaced
SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@contextmanager
def converted(module: nn.Module) -> Generator[tuple[str, ...]]:
    """Convert the module by `fastattn.convert` for the time of the block. Yields the names of the
    submodules that were swapped; they are reverted at the end of the block."""
    swapped = conversion.convert(module).swapped
    try:
        yield swapped
    finally:
        for name in swapped:
            conversion.revert(module.get_submodule(name))
        conversion.match_layers(module)


def wants_weights(*args: Any, **kwargs: Any) -> bool:
    """True if these arguments ask F.multi_head_attention_forward for weights. Without weights the
    function calls F.scaled_dot_product_attention, which is intercepted, too."""
    return _bound(args, kwargs)["need_weights"]


def _bound(args, kwargs) -> dict[str, Any]:
    """All arguments of F.multi_head_attention_forward by name, with defaults."""
    given = SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


class CallCapture:
    """Makes call records. modules: returns the modules that may have made the call, the innermost
    running module first. Each method takes the intercepted function `original` and the arguments
    of one call."""

    def __init__(self, modules: Callable[[], Iterable[nn.Module]]):
        self._modules = modules
        self._masks: dict[tuple, tuple[Tensor, MaskStructure]] = {}

    # ------------------------------------------------------------- F.scaled_dot_product_attention

    def sdpa(
        self,
        original: Original,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **rest: Any,
    ) -> CallRecord:
        """A call of F.scaled_dot_product_attention."""
        given: dict[str, Any] = dict(
            attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **rest
        )
        state = State.of(query.device.type)
        options_text = options(is_causal, dropout_p, rest.get("scale"), rest.get("enable_gqa"))
        if query.is_nested:
            return self._nested((query, key, value), given, state, options_text, original)
        q, k, v = (_leaf(x) for x in (query, key, value))
        if attn_mask is not None and not is_causal_bias(attn_mask):
            given["attn_mask"] = attn_mask.detach()
        return CallRecord(
            SDPA,
            tuple(q.shape),
            tuple(k.shape),
            state.computed(q.dtype),
            named(attn_mask),
            self._structure(attn_mask, q.shape[-2], k.shape[-2]),
            options_text,
            _kernel(original, q, k, v, given),
            state,
            run_original=lambda: with_original_restored(original)(q, k, v, **given),
            ours=lambda: F.scaled_dot_product_attention(q, k, v, **given),
            arguments=dict(query=q, key=k, value=v, **given),
            leaves=[x for x in (q, k, v) if x.requires_grad],
        )

    def _nested(self, tensors, given, state, options_text, original) -> CallRecord:
        """A call on nested tensors, which have no regular shape."""
        q, k, v = (x.detach() for x in tensors)
        return CallRecord(
            SDPA,
            shape(q),
            shape(k),
            state.computed(q.dtype),
            named(given["attn_mask"]),
            None,
            options_text,
            "torch, nested",
            state,
            run_original=lambda: original(q, k, v, **given),
            ours=lambda: F.scaled_dot_product_attention(q, k, v, **given),
        )

    # ----------------------------------------------------------------------------- torch's modules

    def multihead(self, original: Original, *args: Any) -> CallRecord:
        """A call of torch._native_multi_head_attention, the inference path of
        nn.MultiheadAttention, which passes all arguments by position:

        0 query, 1 key, 2 value, 3 embed_dim, 4 num_head, 5 qkv_weight, 6 qkv_bias, 7 proj_weight,
        8 proj_bias, 9 mask, 10 need_weights, 11 average_attn_weights, 12 mask_type. mask_type is 0
        for attn_mask (L,L), 1 for key_padding_mask (B,L), 2 for (B,H,L,L): attn_mask, merged with
        key_padding_mask if there is one.
        """
        query, key, value, width, num_heads = args[:5]
        mask, need_weights, average, mask_type = args[9:13]
        module = self._module_of(nn.MultiheadAttention, args[7])
        ours, not_converted_because = None, ""
        if module is not None:
            names = {0: "attn_mask", 1: "key_padding_mask", 2: "attn_mask"}
            asked: dict[str, Any] = dict(need_weights=need_weights, average_attn_weights=average)
            if mask is not None:
                asked[names[mask_type]] = mask if mask_type < 2 else mask.flatten(0, 1)
            twin, not_converted_because = _twin(module)
            ours = twin and (lambda: twin.forward(query, key, value, **asked))
        call = self._inference_record(
            MULTIHEAD, query, key, num_heads, width, mask, mask_type, lambda: original(*args)
        )
        call.ours, call.not_converted_because, call.module = ours, not_converted_because, module
        return call

    def encoder_layer(self, original: Original, *args: Any) -> CallRecord:
        """A call of torch._transformer_encoder_layer_fwd, the inference path of
        nn.TransformerEncoderLayer, which passes all arguments by position:

        0 src, 1 embed_dim, 2 num_heads, 3 qkv_weight, 4 qkv_bias, 5 proj_weight, 6 proj_bias,
        7 use_gelu, 8 norm_first, 9 eps, 10 to 13 the weight and bias of two norms, 14 to 17 the
        weight and bias of two linear layers, 18 mask, 19 mask_type. mask_type is 0 for src_mask
        (L,L), 1 for src_key_padding_mask (B,L), 2 for (B,H,L,L): src_mask, merged with
        src_key_padding_mask if there is one.
        """
        x, width, num_heads, mask, mask_type = args[0], args[1], args[2], args[-2], args[-1]
        module: Any = self._module_of(nn.TransformerEncoderLayer, args[5])
        call = self._inference_record(
            LAYER, x, x, num_heads, width, mask, mask_type, lambda: original(*args)
        )
        call.module = module
        if module is None:
            return call
        call.not_converted_because = conversion._why_not_convert(module.self_attn) or ""
        names = {0: "src_mask", 1: "src_key_padding_mask", 2: "src_mask"}
        asked = {}
        if mask is not None:
            asked[names[mask_type]] = mask if mask_type < 2 else mask.flatten(0, 1)

        def ours():
            with converted(module):
                return module.forward(x, **asked)

        call.ours = None if call.not_converted_because else ours
        return call

    def _inference_record(
        self, function, query, key, num_heads, width, mask, mask_type, run_original
    ) -> CallRecord:
        """The record of a call of one of torch's operators for inference, without `ours`."""
        q, k = ((x[0], num_heads, x[1], width // num_heads) for x in (shape(query), shape(key)))
        mask_structure = None
        if mask is not None and not query.is_nested:
            columns = mask_type == 1
            mask_structure = self._structure(mask, q[2], k[2], hides=True, columns=columns)
        state = State.of(query.device.type)
        mask_text = named(mask, columns=mask_type == 1)
        dtype, runs = state.computed(query.dtype), "torch, one operator"
        return CallRecord(
            function, q, k, dtype, mask_text, mask_structure, "", runs, state, run_original, None
        )

    def weights(self, original: Original, *args: Any, **kwargs: Any) -> CallRecord:
        """A call of F.multi_head_attention_forward that returns weights. For these torch multiplies
        the matrices itself and calls no other function that is intercepted."""
        given = _bound(args, kwargs)
        given |= _leaves_of({x: given[x] for x in ("query", "key", "value")})
        for name in ("attn_mask", "key_padding_mask"):
            given[name] = given[name] if given[name] is None else given[name].detach()
        query, key, width = given["query"], given["key"], given["embed_dim_to_check"]
        sizes = [x.shape if x.ndim == 3 else (x.shape[0], 1) for x in (query, key)]
        num_heads, dropout = given["num_heads"], given["dropout_p"] * given["training"]
        q, k = ((B, num_heads, L, width // num_heads) for L, B, *_ in sizes)
        masks = given["attn_mask"], given["key_padding_mask"]
        mask_texts = named(masks[0]), named(masks[1], columns=True)
        module = self._module_of(nn.MultiheadAttention, given["out_proj_weight"])
        twin, not_converted_because = (None, "") if module is None else _twin(module)
        state = State.of(query.device.type)
        return CallRecord(
            WEIGHTS,
            q,
            k,
            state.computed(query.dtype),
            " and ".join(filter(None, mask_texts)),
            self._structure_of_both(*masks, num_heads, q[2], k[2]),
            options(False, dropout, None, None),
            "torch, matrices multiplied",
            state,
            run_original=lambda: original(**given),
            ours=twin and _as_module(twin, given),
            not_converted_because=not_converted_because,
            leaves=_unique(x for x in given.values() if isinstance(x, Tensor) and _needs_grad(x)),
            module=module,
        )

    def _module_of(self, kind: type[nn.Module], weight: Tensor) -> Any:
        """The module of class `kind` that made the call: the one with this weight in its output
        projection, because the hooks that note running modules may not have run for it. None if no
        module has the weight."""
        for module in self._modules():
            if isinstance(module, kind):
                attention = getattr(module, "self_attn", module)
                if getattr(getattr(attention, "out_proj", None), "weight", None) is weight:
                    return module
        return None

    # ------------------------------------------------------------------------------ fastattn's own

    def own(self, original: Original, op: Operation, t: Tensors, o: Options) -> CallRecord:
        """A call of one of fastattn's own operations, as the dispatcher ran it."""
        spec = describe(t, o)
        options_text = options(o.causal, o.dropout_p, o.scale, None)
        extra_features = [n for n in ("left", "right", "softcap") if getattr(o, n) is not None]
        if o.score_mod:
            extra_features += ModText.parse(o.score_mod).described()
        known = ("q", "k", "v", "mask", "seed", "normaliser")
        known += ("captured_floats", "captured_ints", "mask_blocks")
        extra_features += [n for n in t._fields if n not in known and getattr(t, n) is not None]
        return CallRecord(
            f"fastattn {op.name}",
            tuple(t.q.shape),
            tuple(t.k.shape),
            str(t.q.dtype)[6:],
            named(t.mask),
            self._structure(t.mask, t.q.shape[-2], t.k.shape[-2]) if t.cu_q is None else None,
            ", ".join(filter(None, [options_text, *extra_features])),
            f"fastattn {choose(spec, o.backend, t.q.device).name}",
            State.of(t.q.device.type),
            run_original=lambda: original(op, t, o)[0],
            ours=None,
        )

    # --------------------------------------------------------------------------------------- masks

    def _structure(
        self, mask: Tensor | None, M: int, N: int, *, hides: bool = False, columns: bool = False
    ) -> MaskStructure | None:
        """The structure of a mask for M rows and N keys; None for no mask or another class of
        tensor. It is computed once for the same memory, even through different views. hides: in a
        bool mask True hides a key, as in the masks of modules. columns: the mask has shape (B,N)
        and is the same for all rows."""
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

    def _structure_of_both(
        self, mask, padding, num_heads: int, M: int, N: int
    ) -> MaskStructure | None:
        """The structure of attn_mask and key_padding_mask of F.multi_head_attention_forward
        together. A mask that is not bool is added to the scores."""
        if mask is None and padding is None:
            return None
        if padding is None:
            split = mask.ndim == 3 and mask.shape[0] % num_heads == 0
            mask = mask.unflatten(0, (-1, num_heads)) if split else mask
            return self._structure(mask, M, N, hides=True)
        if mask is None:
            return self._structure(padding, M, N, hides=True, columns=padding.ndim == 2)
        keep = [~x if x.dtype == torch.bool else kept(x) for x in (mask, padding)]
        if keep[0] is None or keep[1] is None:
            return MaskStructure("added to the scores: a bias")
        rows = keep[0].unflatten(0, (-1, num_heads)) if mask.ndim == 3 else keep[0]
        keys = keep[1][:, None, None] if padding.ndim == 2 else keep[1]
        return structure(rows & keys, M, N)


def with_original_restored(original: Callable) -> Callable:
    """A function that calls `original`, the F.scaled_dot_product_attention before recording.

    F.scaled_dot_product_attention must be torch's own while it gets a CausalBias, because a
    CausalBias handles a function only if it is this attribute of F. For any other function a
    CausalBias is a tensor with uninitialised values. Therefore `original` is put back into F for
    the time of such a call.
    """

    def call(query, key, value, attn_mask=None, *args, **kwargs):
        if not is_causal_bias(attn_mask):
            return original(query, key, value, attn_mask, *args, **kwargs)
        holder: Any = F
        standing, holder.scaled_dot_product_attention = F.scaled_dot_product_attention, original
        try:
            return original(query, key, value, attn_mask, *args, **kwargs)
        finally:
            holder.scaled_dot_product_attention = standing

    return call


def _kernel(original, q, k, v, given) -> str:
    """The torch kernel that takes the call, or the name of what replaces torch's function."""
    if not isinstance(original, type(len)):
        return (
            "fastattn.patch()"
            if original.__module__ == f"{PACKAGE}.dropin.patching"
            else original.__module__
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


def _needs_grad(x: Tensor) -> bool:
    """True if a gradient with respect to x is recorded now."""
    return x.requires_grad and torch.is_grad_enabled()


def _leaf(x: Tensor) -> Tensor:
    """x as a leaf of autograd's graph, which requires grad if x needs a gradient."""
    return x.detach().requires_grad_(_needs_grad(x))


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(x): x for x in tensors}.values())


def _leaves_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A leaf for each tensor. One tensor under several names gets one leaf, because torch projects
    inputs that are the same tensor in one product."""
    made = {id(x): _leaf(x) for x in tensors.values()}
    return {name: made[id(x)] for name, x in tensors.items()}


def _twin(module: nn.MultiheadAttention) -> tuple[Any, str]:
    """The module that `convert` would make of this one, with the same parameters, and ""; or None
    and the reason why `convert` does not convert it."""
    if why := conversion._why_not_convert(module):
        return None, why
    twin = copy.copy(module)
    twin.__class__ = MultiheadAttention
    return twin, ""


def _as_module(twin: nn.Module, given: dict[str, Any]) -> Callable[[], Any]:
    """A function that calls the module `twin` with the arguments `given` of
    F.multi_head_attention_forward. That takes (L,B,E); a module with batch_first takes (B,L,E)."""
    tensors = [given[x] for x in ("query", "key", "value")]
    if getattr(twin, "batch_first", False) and tensors[0].ndim == 3:
        turned = {id(x): x.transpose(0, 1) for x in tensors}
        tensors = [turned[id(x)] for x in tensors]
    names = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    asked = {name: given[name] for name in names}
    return lambda: twin.forward(*tensors, **asked)
