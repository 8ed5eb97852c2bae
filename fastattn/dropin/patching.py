"""patch, unpatch and sdpa: run torch's functions of attention on fastattn in any model.

`flex_patching.py` and `varlen_patching.py` replace flex_attention and varlen_attn. Here, a stand-in
replaces `torch.nn.functional.scaled_dot_product_attention`. If `why_torchs` returns a
reason, or if our function raises, it calls torch's function with the arguments unchanged. So errors
are torch's, and every call that torch can run still runs.

`torch.nn.attention.register_flash_attention_impl` is not used: it replaces the operator that torch
calls once it has chosen flash attention. torch never chooses that for dropout on a CPU, values of
another width or 3-D inputs, nor on a GPU for masks or float32, where there is most to gain.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from ..backends.native.marshalling import PLAIN
from . import flex_patching, fused_kernels, nested, varlen_patching
from .sdpa import is_causal_bias
from .sdpa import scaled_dot_product_attention as _ours

# Below this number of multiplications torch's function is as fast. It takes some 50 us for them;
# calling ours costs 10 us more, or 40 if the model's other code has evicted it from the caches.
SMALL = 1 << 20

_lock = threading.RLock()
# A forked child has none of the parent's other threads, so a lock that one of them holds would stay
# locked in it.
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )
_holders = {"patch": 0, "sdpa": 0}  # active patches by kind; each kind undoes only its own
_active = False  # while False, a stand-in that was imported by name runs torch's function
_buried = False  # another library's function replaced our stand-in, and may call it
_asking = 0  # the thread that runs `_calls_ours`, which tests if such a function calls ours
_reached = False
_torch: Any = F  # the module with the replaced function
_torchs: Any = F.scaled_dot_product_attention  # the function that the patch replaces

_PRIORITY = torch._C._get_sdp_priority_order()


def patch() -> None:
    """Make `torch.nn.functional.scaled_dot_product_attention` run on fastattn, in every thread.

    Patches are counted: the function stays until `unpatch` has been called as often. The patch
    reaches code that looks the function up in its module at each call: most libraries, torch.nn,
    and compiled functions, also earlier ones, which are compiled again. It does not reach names
    that `from torch.nn.functional import scaled_dot_product_attention` bound before, nor
    nn.MultiheadAttention on its inference path or compiled, which calls other operators: use
    `fastattn.convert` for those.

    torch's own function still runs:

    - where sdpa_kernel(...) or torch.backends.cuda ruled out its flash or its math kernel, or set
      priorities (allowing both selects neither);
    - for tensor subclasses and modes of `__torch_function__`, except CausalBias, jagged tensors and
      a default device;
    - under torch.func and forward-mode AD;
    - in exported, traced or scripted code;
    - for devices, dtypes and head dims without a fused kernel on this machine;
    - for so few tokens that calling costs more than computing, except in compiled code;
    - for every call that `fastattn.scaled_dot_product_attention` raises for.

    torch's `flex_attention` runs on `fastattn.flex_attention`, which trains it on CPUs, too: also
    under names that modules imported before, and where transformers holds it compiled. torch's own
    function runs where ours raises.

    `varlen_attn` and `varlen_attn_out` of torch.nn.attention.varlen run on
    `fastattn.attention_packed`, with the arguments of the installed torch: on CPUs, too, in
    float32 and float64, with second derivatives, and with gradients by the LSE, by keys of which
    a part is used, in pages, and through `out`. Names that modules imported before are reached,
    compiled forms that were made before are not. On a CPU an argument of a newer torch that
    fastattn does not know raises unless it has its default. On other devices torch's own functions
    run where ours raise or have no kernel.

    Three differences from torch remain. Dropout draws another mask. Autograd keeps the output of
    every call, as torch's flash kernel does and its math kernel does not, so changing an output in
    place raises in backward. Third derivatives raise.

    Example:
        >>> import torch
        >>> import fastattn
        >>> from torch.nn import functional as F
        >>> q, k, v = torch.randn(3, 1, 8, 256, 64)
        >>> torchs = F.scaled_dot_product_attention
        >>> expected = torchs(q, k, v)
        >>> fastattn.patch()
        >>> torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)
        >>> F.scaled_dot_product_attention is torchs
        False
        >>> fastattn.unpatch()
        >>> F.scaled_dot_product_attention is torchs
        True
    """
    _take("patch")


def unpatch() -> None:
    """Undo one call of `patch`; the last one restores the function that was there before.

    `sdpa` blocks, of any thread, are left alone.

    Raises:
        RuntimeError: There is no patch to undo.

    Example:
        >>> import fastattn
        >>> fastattn.patch()
        >>> fastattn.unpatch()
        >>> fastattn.unpatch()
        Traceback (most recent call last):
        RuntimeError: unpatch: got no patch to undo, expected a call of patch() before it
    """
    with _lock:
        if not _holders["patch"]:
            raise RuntimeError(
                "unpatch: got no patch to undo, expected a call of patch() before it"
            )
        _release("patch")


@contextmanager
def sdpa() -> Generator[None]:
    """Run torch's scaled_dot_product_attention on fastattn inside a `with` block or a function.

    Inside, `patch` is in effect. It affects all threads, because activation checkpoints recompute
    in autograd's threads, and must do what forward did. With checkpoints, run backward in the
    block, too: after it torch's function would recompute, with other dropout. Blocks may be nested
    and overlap in any order, across threads. A block inside code that torch.compile traces breaks
    its graph: put it around the call.

    Returns:
        A context manager that is also a decorator.

    Example:
        >>> import torch
        >>> import fastattn
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.0)
        >>> x = torch.randn(2, 128, 64)
        >>> with fastattn.sdpa():
        ...     out = layer(x)
        >>> torch.testing.assert_close(out, layer(x))
    """
    _take("sdpa")
    try:
        yield
    finally:
        _release("sdpa")


def _take(holder: str) -> None:
    global _active, _buried, _torchs
    with _lock:
        _holders[holder] += 1
        function = F.scaled_dot_product_attention
        # During a patch, another library's function in our place stays; torch's is replaced again.
        stays = _active and not isinstance(function, BuiltinFunctionType)
        if not _active:
            fused_kernels.look()
            flex_patching.take()
            varlen_patching.take()
        if not stays and not _calls_ours(function):
            _torchs, _torch.scaled_dot_product_attention = function, _stand_in
            _script_as(function)
        _active, _buried = True, False


def _release(holder: str) -> None:
    global _active, _buried
    with _lock:
        _holders[holder] -= 1
        if any(_holders.values()):
            return
        _active = False
        flex_patching.release()
        varlen_patching.release()
        if F.scaled_dot_product_attention is _stand_in:
            _torch.scaled_dot_product_attention = _torchs
        else:
            _buried = True


def _calls_ours(function: Any) -> bool:
    """Return True if this function ends up calling ours. Then ours may not replace it, because each
    would call the other. A function of another library is tested by a call of the smallest size.
    """
    global _asking, _reached
    if function is _stand_in:
        return True
    if not _buried or isinstance(function, BuiltinFunctionType):
        return False
    _asking, _reached = threading.get_ident(), False
    x = torch.zeros(1, 1, 1, 1)
    try:
        with suppress(Exception):  # it may refuse such a call
            function(x, x, x)
        return _reached
    finally:
        _asking = 0


def _script_as(function) -> None:
    """Make torch.jit.script compile the stand-in to the operator of `function`."""
    with suppress(ImportError, AttributeError):
        from torch.jit import _builtins

        _builtins._register_builtin(_stand_in, _builtins._find_builtin(function))


def _stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    global _reached
    rest = attn_mask, dropout_p, is_causal
    named: dict[str, Any] = dict(scale=scale, enable_gqa=enable_gqa)
    if _asking and _asking == threading.get_ident():
        _reached = True
    elif why_torchs(query, key, value, attn_mask) is None:
        try:
            return _ours(query, key, value, *rest, **named)
        except (RuntimeError, ValueError, TypeError):
            pass  # torch computes it, or raises its own error
    if is_causal_bias(attn_mask):  # its handler accepts only the function in F, which is ours
        bias: Any = type(attn_mask)
        return bias._dispatch(query, key, value, *rest, **named)
    return _torchs(query, key, value, *rest, **named)


_stand_in.__name__ = "scaled_dot_product_attention"  # pickle uses __qualname__, which stays
_stand_in.__doc__ = F.scaled_dot_product_attention.__doc__


def why_torchs(query: Any, key: Any, value: Any, attn_mask: Any = None) -> str | None:
    """Return the reason why torch's function runs a call with these tensors; None if ours runs it.

    The reason does not depend on the call's other arguments.
    """
    if not _active:
        return "fastattn.patch() was undone"
    if type(query) not in PLAIN or type(key) not in PLAIN or type(value) not in PLAIN:
        if not all(map(nested.is_jagged, (query, key, value))):
            return "a tensor subclass, or no tensor"
    elif query.is_nested or min(query.ndim, key.ndim, value.ndim) < 2:
        return "no dense matrices"
    if attn_mask is not None and not is_causal_bias(attn_mask):
        if type(attn_mask) not in PLAIN:
            return "a mask that is a tensor subclass, or no tensor"
        if attn_mask.ndim < 2:
            return "a mask of fewer than two dimensions"
    if why := _watched():
        return why
    eager = not query.is_nested and not torch.compiler.is_compiling()
    if eager and query.numel() * key.shape[-2] < SMALL:
        return "so small that calling costs more than computing"
    if why := _chosen():
        return why
    device, dtype = query.device, query.dtype
    known = device.type in ("cpu", "cuda")  # torch cannot ask for autocast of every device
    if known and torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
    return fused_kernels.why_none(device, dtype, query.shape[-1], value.shape[-1])


def _watched() -> str | None:
    """The reason, if the call is traced, or a mode may test for torch's function."""
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        return "torch.jit: what is traced runs without fastattn"
    for at in range(torch._C._len_torch_function_stack()):
        if type(torch._C._get_function_stack_at(at)).__name__ != "DeviceContext":
            return "a mode of __torch_function__"
    return None


def _chosen() -> str | None:
    """The reason, if the call is exported, a setting asks for a kernel of torch's, or a transform
    is active."""
    if torch.compiler.is_exporting():
        return "torch.export: what is exported runs without fastattn"
    # Libraries such as x-transformers enable the kernels that they know: at least these two.
    if not (torch._C._get_flash_sdp_enabled() and torch._C._get_math_sdp_enabled()):
        return "sdpa_kernel(...) or torch.backends.cuda ruled out flash or math"
    if torch._C._get_sdp_priority_order() != _PRIORITY:
        return "sdpa_kernel(..., set_priority=True)"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "forward-mode AD"
    return None


# torch.compile calls it once, when it traces. Then torch chooses its own kernel, too. Code that is
# traced would not learn whether it is exported: Dynamo of torch 2.8 takes is_exporting() for True.
_chosen._dynamo_marked_constant = True  # ty: ignore
