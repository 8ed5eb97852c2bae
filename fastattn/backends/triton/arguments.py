"""The arguments of a call in the form that kernels take: operands, optional tensors, constants,
sizes."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ...call import quantisation
from ...call.environment import setting
from ...call.spec import BY_HEAD, PLACED, Argument, AttentionSpec, Feature, Tensors
from ...score_mods.mod_text import ModText
from ...score_mods.recognition import inputs_of
from ..base import broadcast_strides
from ..shared import gpu
from . import tile_configs
from .program_source import functions
from .runtime import kernels

TINY, HUGE = 1e-18, 1e18  # the range of units of scores by which slopes can be divided
MOST = 1e38  # the bound for a call's real numbers, which float32 can hold


def longest(spec: AttentionSpec) -> tuple[int, int]:
    """M and N; in a packed batch, those of its longest sequence: no more than all sequences have,
    unless a mask has more."""
    if spec.packed and spec.mask_shape is None:
        return min(spec.M, spec.T), spec.N if spec.paged else min(spec.N, spec.S)
    return spec.M, spec.N


def blocks(n: int, size: int) -> int:
    """How many blocks of `size` cover n."""
    return -(-n // size)


def padded(head_dim: int) -> int:
    """The columns of a tile: a power of two that tensor cores take."""
    return max(16, 1 << max(head_dim - 1, 0).bit_length())


def columns(head_dim: int) -> tuple[int, int]:
    """The columns of q and k in the products of forward: BD, and BX of a second one or 0.

    A power of two and a smaller one where they pad less than the next power: 192 are 128 and 64,
    576 are 512 and 64. Up to 128 a second product would cost more than it saves.
    """
    whole = padded(head_dim)
    first = whole // 2
    rest = padded(head_dim - first)
    return (first, rest) if whole > 128 and rest < first else (whole, 0)


def is_latent(spec: AttentionSpec, t: Tensors) -> bool:
    """True if v is the first columns of k in memory, all those of a first product of forward: its
    tiles are read once."""
    return (
        t.v is not None
        and spec.Dv < spec.D
        and spec.Dv == columns(spec.D)[0]
        and spec.storage is None
        and (t.k.data_ptr(), t.k.stride()) == (t.v.data_ptr(), t.v.stride())
    )


def precision() -> str:
    """How the user wants float32 to be multiplied: "tf32" or "ieee" if torch's settings say so,
    "ieee" by FASTATTN_FLOAT32, else "parts": on tensor cores where that is faster, with errors of
    the size of IEEE's."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        asked = matmul.fp32_precision
    else:  # before torch 2.9, where "ieee" looks like no setting
        asked = "tf32" if matmul.allow_tf32 else "none"
    if asked in ("tf32", "ieee"):
        return asked
    return "ieee" if setting("FASTATTN_FLOAT32") == "vector" else "parts"


def describable(x: Tensor) -> bool:
    """True if a tensor descriptor can read x: 16-bit, with the address of every row a multiple of
    16 bytes."""
    *outer, last = x.stride()
    return (
        x.dtype.itemsize == 2
        and last == 1
        and outer[-1] > 0
        and x.numel() > 0
        and x.data_ptr() % 16 == 0
        and all(s % 8 == 0 for s in outer)
    )


def operand(x: Tensor | None) -> Any:
    """An Operand of (B,H,M,D), or of the first of these dimensions."""
    if x is None:
        return None
    strides = x.stride()
    if len(strides) < 4:
        strides += (0,) * (4 - len(strides))
    return kernels().operand((x, *strides))


def bits(x: Tensor | None) -> Tensor | None:
    """8-bit rows viewed as int8, because `tile.widened` decodes float8 itself."""
    return None if x is None else x.view(torch.int8)


def step(page: int) -> int:
    """The largest power of two that divides a page, 256 at most: kernels divide by it at no cost,
    and a tile of a size that divides it is inside one page."""
    return math.gcd(page, 256)


def pages(spec: AttentionSpec, table: Tensor | None) -> Any:
    if table is None:
        return None
    room = min(spec.blocks * spec.page, gpu.MAX_LENGTH) if spec.P else 0
    steps = spec.page // step(spec.page)
    return kernels().tile.Pages(table.contiguous(), spec.blocks, steps, spec.P, room)


def offsets(cu: Tensor | None, total: int) -> Any:
    return None if cu is None else kernels().score.Offsets(cu.contiguous(), total)


def broadcast(x: Tensor) -> Any:
    """An Operand of whatever broadcasts to (B, H, M, N): strides of 0 where it repeats."""
    return kernels().tile.Operand(x, *broadcast_strides(x))


def extras(spec: AttentionSpec, t: Tensors) -> Any:
    """The optional tensors, in the dtypes that kernels read."""
    if not spec.given and t.seed is None:
        return _no_extras()
    mask = t.mask
    if mask is not None:
        mask = broadcast(mask.view(torch.uint8) if mask.dtype == torch.bool else mask)
    return kernels().score.Extras(
        mask=mask,
        lengths=None if t.key_lengths is None else t.key_lengths.to(torch.int64).contiguous(),
        **{a.field: by_head(spec, a, getattr(t, a.name)) for a in BY_HEAD},
        seed=t.seed if spec.dropout_p > 0 else None,
        cu_q=offsets(t.cu_q, spec.T),
        cu_k=offsets(t.cu_k, spec.S),
        pages=pages(spec, t.block_table),
        k_scale=operand(t.k_scale),
        v_scale=operand(t.v_scale),
        dropout_batch_period=spec.dropout_batch_period or None,
        dropout_head_period=spec.dropout_head_period or None,
        captured=captured(spec, t),
    )


def by_head(spec: AttentionSpec, a: Argument, x: Tensor | None) -> Any:
    """Numbers of heads: contiguous (H,), or an Operand of (B,H) if items may have their own."""
    if x is None:
        return None
    x = x.to(torch.float32)
    if len(a.shapes) == 1:
        return x.contiguous()
    return operand(x if x.ndim == 2 else x.expand(spec.B, spec.H))


def captured(spec: AttentionSpec, t: Tensors) -> Any:
    floats, ints = t.captured_floats, t.captured_ints
    if floats is None and ints is None:
        return None
    floats, ints = (None if x is None else x.contiguous() for x in (floats, ints))
    return kernels().score.Captured(floats, ints, spec.floats, spec.ints)


def structured(spec: AttentionSpec) -> bool:
    """True if a mask, or what a mask_mod shows, is looked at for its structure before it is used.
    Not with row_invariant: the order of keys would depend on the tile."""
    shape = (1,) * 4 + (spec.mask_shape or ())
    if spec.packed or spec.weights or spec.row_invariant:
        return False
    masked, items, heads = reads(spec.score_mod)
    if not masked and shape[-2] == 1:
        return False
    planes = spec.B if items else shape[-4], spec.H if heads else shape[-3]
    return tile_configs.structured(spec.B * spec.H, math.prod(planes), spec.M, spec.N)


@functools.lru_cache(maxsize=512)
def reads(text: str) -> tuple[bool, bool, bool]:
    """Whether programs have a mask_mod, and whether it reads the index of the item and of the head.

    text: of `ModText`; "" without programs.
    """
    mask = ModText.parse(text).mask if text else None
    if mask is None:
        return False, False, False
    inputs = inputs_of(mask)
    return True, "b" in inputs, "h" in inputs


def scaled(spec: AttentionSpec) -> bool:
    """True if logits are scores times a positive number. Not with an additive mask or a score_mod,
    which have the unit of logits."""
    added = spec.mask_shape is not None and spec.mask_dtype != torch.bool
    added = added or functions(spec).score_mod is not None
    return TINY < (spec.softcap or spec.scale) < HUGE and not added


@functools.cache
def _no_extras():
    return kernels().score.Extras(None, None, None, None, None)


@functools.lru_cache(maxsize=4096)
def flags(spec: AttentionSpec, precision: str, tma: bool, latent: bool = False):
    """The features that a call uses, as constants for Triton's compiler."""
    masked = spec.mask_shape is not None
    made = functions(spec)
    varies = [n > 1 for n in (1,) * 4 + (spec.mask_shape or ())][-4:]
    return kernels().score.Flags(
        scaled=scaled(spec),
        left=spec.left < spec.rows + spec.keys,
        right=spec.right < spec.rows + spec.keys,
        bottom_right=spec.bottom_right,
        place=bool(spec.features & Feature.PLACE),
        packed=spec.packed,
        step=step(spec.page) if spec.paged else 0,
        lengths="key_lengths" in spec.given,
        aligned=spec.N % 16 == 0 and (masked or spec.weights),
        gqa=spec.H != spec.Hk,
        mask="" if not masked else "bool" if spec.mask_dtype == torch.bool else "add",
        mask_rows=varies[2],
        block_mask=(masked or made.mask_mod is not None) and structured(spec),
        softcap=spec.softcap > 0,
        **{str(a.feature.name).lower(): a.name in spec.given for a in BY_HEAD},
        dropout=spec.dropout_p > 0,
        fours=spec.at_key % 4 == 0,
        precision=precision,
        tma=tma,
        kept="" if spec.storage is None else quantisation.NAMES[spec.storage],
        latent=latent,
        in_order=spec.row_invariant and spec.left < spec.rows + spec.keys,
        **made._asdict(),
    )


@functools.lru_cache(maxsize=4096)
def scalars(spec: AttentionSpec, together: int) -> tuple[Any, ...]:
    """The sizes, as score.SIZES lists them, and the Reals."""
    score = kernels().score
    M, N = longest(spec)
    threshold = min(int(spec.dropout_p * 2**32), 2**32 - 1)
    sizes = dict(
        B=spec.B,
        H=spec.H,
        group=spec.H // max(spec.Hk, 1),
        M=M,
        N=N,
        left=min(spec.left, gpu.MAX_LENGTH),
        right=min(spec.right, gpu.MAX_LENGTH),
        threshold=threshold - (threshold >> 31 << 32),
        together=together,
        **{name: getattr(spec, name) for name in PLACED},
    )
    unit = spec.softcap or spec.scale or 1.0
    reals = score.Reals(
        scale=float(spec.scale),
        unit=unit * score.LOG2E.value,
        per_unit=1 / unit if scaled(spec) else 1.0,
        softcap=float(spec.softcap),
        per_softcap=min(max(2 * score.LOG2E.value * spec.scale / unit, -MOST), MOST),
        factor=1 / (1 - spec.dropout_p) if spec.dropout_p < 1 else 0.0,
        share=1 / max(spec.H, 1) if spec.average_heads else 1.0,
    )
    return *(sizes[name] for name in score.SIZES), reals
