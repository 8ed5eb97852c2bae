"""Which backend a call would run on, and why the others declined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ..api import no_values, prepare, prepare_packed
from ..backends import base
from ..backends.native import libraries
from ..backends.native.marshalling import kind
from ..backends.preference import KernelClasses, committed
from ..backends.shared import gpu
from ..call.qv import joined
from ..call.spec import BLOCK_KEYS, BLOCK_ROWS, AttentionSpec, Feature, Options, Tensors
from ..call.validation import describe
from ..score_mods.intervals import NONE
from ..score_mods.mod_text import ModText


@dataclass(frozen=True)
class Explanation:
    """Name the backend that would run a call.

    `str()` lists all backends.

    Attributes:
        spec: What kind of call it is: sizes, dtype, device, features.
        backend: The name of the backend that would run the call, or None.
        declined: By name, the reasons of every backend that cannot run it.
        unit: The instruction set of the CPU that the forward pass would run on; None for other
            backends.
        kernels: By pass, the class of the CUDA kernels that would run it with these tensors:
            "sm_90", "sm_80", or "sm_80: " and why those of sm_90 would not. Empty if the backend
            cuda cannot run the call.
        functions: What became of a score_mod and a mask_mod: arguments of the call, a program on
            each score, with the number of its operations and of the blocks that it hides, or a
            mask. "" without them.
        remarks: By name, what to know of a backend that can run the call on this GPU.
        measured: The file of measurements by which the backend comes before another, or by which
            the CPU runs on the instruction set of `unit`. "" if there is none.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k, v = torch.randn(3, 1, 8, 128, 64)
        >>> print(fastattn.explain(q, k, v, backend="reference").backend)
        reference
    """

    spec: AttentionSpec
    backend: str | None
    declined: dict[str, list[str]]
    unit: str | None = None
    kernels: dict[str, str] = field(default_factory=dict)
    functions: str = ""
    remarks: dict[str, str] = field(default_factory=dict)
    measured: str = ""

    def __str__(self) -> str:
        lines = [str(self.spec)]
        if self.functions:
            lines.append(f"  functions: {self.functions}")
        able = (
            "could run, but is not preferred" if self.backend else "could run, but is not asked for"
        )
        for name in base.names():
            if name == self.backend:
                verdict = f"would run, on {self.unit}" if self.unit else "would run"
                verdict += f", as measured ({self.measured})" if self.measured else ""
            else:
                verdict = "; ".join(self.declined.get(name, [able]))
            if name in self.remarks:
                verdict += f", {self.remarks[name]}"
            if name == "cuda" and self.kernels:
                verdict += f": {_by_class(self.kernels)}"
            lines.append(f"  {name}: {verdict}")
        return "\n".join(lines)


def explain(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Explanation:
    """Find the backend that `attention` or `attention_packed` would run on, without computing.

    Args:
        q: Queries, as in `attention`; with cu_q among the arguments, as in `attention_packed`.
        k: Keys.
        v: Values.
        **arguments: The other arguments of the call, by name.

    Shape:
        q: (B, H, M, D), or (T, H, D) with cu_q.
        k: (B, Hk, N, D), or (S, Hk, D) with cu_q.
        v: (B, Hk, N, Dv), or (S, Hk, Dv) with cu_q.

    Returns:
        An Explanation. Its backend is None if no backend can run the call. print() of it lists all
        backends.

    Raises:
        ValueError: As the call would.
        TypeError: As the call would.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k, v = torch.randn(3, 1, 8, 128, 64)
        >>> explanation = fastattn.explain(q, k, v, causal=True)
        >>> explanation.backend
        'cpu'
        >>> "no kernel for device 'cpu'" in explanation.declined["cuda"]
        True
    """
    arguments.pop("return_lse", None)  # does not change the choice
    if v is None:
        raise no_values(k)
    if (qv := arguments.pop("qv", None)) is not None:
        q, k = joined(q, k, v, qv)
    functions = any(arguments.get(name) is not None for name in ("score_mod", "mask_mod"))
    if arguments.get("seed") is None:
        arguments["seed"] = 0  # draw none: explain must not advance torch's generator
    if "cu_q" in arguments:
        names = ("cu_q", "cu_k", "block_table", "max_q", "max_k", "k_scale", "v_scale")
        packed = [arguments.pop(x, None) for x in names]
        used = arguments.pop("row_lengths", None)
        named: dict[str, Any] = dict(zip(names, packed), row_lengths=used)
        t, options = prepare_packed(q, k, v, **named, arguments=arguments, function="explain")
    else:
        t, options = prepare(q, k, v, arguments, "explain")
    spec = describe(t, options)
    requested = options.backend
    if requested:
        base.get(requested)  # raises for an unknown name
    declined = {name: why for name in base.names() if (why := base.why_not(name, spec, t.q.device))}
    able = [name for name in base.ordered(spec, t.q.device) if name not in declined]
    if requested:
        able = [name for name in able if name == requested]
    chosen = able[0] if able else None
    unit = libraries.cpu_unit(spec) if chosen == "cpu" else None
    kernels = {}
    if "cuda" not in declined:
        in_memory = t if kind(t) is not None else None  # fake tensors have no addresses
        kernels = cast(KernelClasses, base.get("cuda")).kernels(spec, t.q.device, in_memory)
    said = _functions(t, options, spec, arguments) if functions else ""
    chip = gpu.found(t.q.device)
    able_here = {name: base.get(name).support.on(chip) for name in base.names()}
    remarks = {x: c.remark for x, c in able_here.items() if c and c.remark and x not in declined}
    source = base.measured(spec, t.q.device, chosen or "") if not requested else ""
    if chosen == "cpu":
        source = libraries.cpu_measured()
    return Explanation(spec, chosen, declined, unit, kernels, said, remarks, source)


def _functions(t: Tensors, o: Options, spec: AttentionSpec, given: Mapping[str, Any]) -> str:
    """As in "mask_mod: a program of 7 values; of 64 blocks of 32 x 64 pairs 28 are skipped".

    given: the arguments of the call. Others were recognised in the functions.
    """
    said = []
    if given.get("window") is None and (o.left, o.right) != (None, None):
        said.append("causal" if (o.left, o.right) == (None, 0) else f"window {o.left, o.right}")
    recognised = dict(key_lengths=t.key_lengths, alibi_slopes=t.alibi_slopes, softcap=o.softcap)
    said += [name for name, x in recognised.items() if x is not None and given.get(name) is None]
    if not spec.score_mod:
        if t.mask is not None and given.get("mask") is None:
            said.append(f"a mask of shape {tuple(t.mask.shape)}")
        return "; ".join(said)
    said += ModText.parse(spec.score_mod).described()
    if t.mask_blocks is not None:
        skipped = int((t.mask_blocks == NONE).sum())
        size = f"{BLOCK_ROWS} x {BLOCK_KEYS}"
        said.append(f"of {t.mask_blocks.numel()} blocks of {size} pairs {skipped} are skipped")
    return "; ".join(said)


def _by_class(kernels: dict[str, str]) -> str:
    """As in "forward by sm_90, backward by sm_80 (sm_90: head dim 256 is over 128)"."""
    said = []
    for kernel in dict.fromkeys(kernels.values()):
        kind, _, why = kernel.partition(": ")
        passes = " and ".join(name for name, x in kernels.items() if x == kernel)
        said.append(f"{passes} by {kind}" + (f" (sm_90: {why})" if why else ""))
    return ", ".join(said)


def support_table() -> str:
    """What each backend declares, as the Markdown table in the README."""
    declared = [base.get(name).support for name in base.names()]
    rows = [
        ["", *base.names()],
        ["---"] * (1 + len(declared)),
        ["order of choice", *(_order(at, name) for at, name in enumerate(base.names(), 1))],
        ["devices", *(_listed(s.devices) for s in declared)],
        ["compute capability of a GPU", *map(_chips, declared)],
        ["dtypes", *map(_dtypes, declared)],
        [
            "D and Dv up to",
            *map(_head_dims, declared),
        ],
        *(
            [f.meaning, *("yes" if f & s.features else "no" for s in declared)]
            for f in Feature
            if f.meaning
        ),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _chips(support: base.Support) -> str:
    """The oldest GPU: "7.5 or newer"."""
    return f"{gpu.capability(support.chips[0].architecture)} or newer" if support.chips else ""


def _dtypes(support: base.Support) -> str:
    """All dtypes, and those of older GPUs that have fewer."""
    few = [x for x in support.chips if x.dtypes != support.dtypes]
    old = [f"on {gpu.capability(x.architecture)} {_named(x.dtypes)}" for x in few]
    return "; ".join([_named(support.dtypes), *old])


def _named(dtypes: Iterable[torch.dtype]) -> str:
    return _listed(str(x)[6:] for x in dtypes)


def _head_dims(support: base.Support) -> str:
    """The largest D and Dv of every pass, and of forward alone."""
    text = "any" if support.max_head_dim is None else str(support.max_head_dim)
    if support.forward_head_dims is not None:
        text += "; forward alone {}, {}".format(*support.forward_head_dims)
    for chips in support.chips:
        for dtype, most in chips.tangent_head_dims:
            where = f"on {gpu.capability(chips.architecture)} with {_named([dtype])}"
            text += f"; {where} {most} for forward mode and second derivatives"
    return text


def _order(at: int, name: str) -> str:
    """Its place among the backends, and the calls for which it comes before another."""
    calls: dict[str, list[str]] = {}
    for rule in committed():
        if rule.backend == name:
            where = f"before {rule.instead_of} on sm_{rule.architecture}"
            calls.setdefault(where, []).append(rule.calls())
    return "; ".join([str(at), *(f"{where} for {', '.join(x)}" for where, x in calls.items())])


def _listed(items: Iterable[str] | None) -> str:
    return "any" if items is None else ", ".join(sorted(items))
