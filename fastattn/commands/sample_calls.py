"""Calls for `check`: the factors of a call, a row of them as tensors, and what the oracle computes.

Every call has sizes at the edges of tiles. Keys past a length are NaN; lengths of 0, rows of a mask
without a key, and windows that end before the first key make empty rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..api import attention, attention_packed
from ..call.quantisation import quantised
from ..call.spec import Place
from .covering import Row

ORACLE: Callable[..., Any] = reference.attention
PAGE = 16
FACTORS: dict[str, tuple[Any, ...]] = {
    "form": ("dense", "packed", "paged"),
    "dtype": ("bfloat16", "float32", "float16", "float64"),
    "M": (33, 1, 4, 130, 260),
    "N": (65, 1, 16, 300, 530),
    "D, Dv": (
        *((64, 64), (128, 128), (32, 32), (96, 64), (192, 128), (80, 80), (16, 40), (256, 256)),
        (33, 17),
    ),
    "heads": ((4, 4), (8, 2), (3, 1)),
    "band": ("no", "causal", "bottom_right", "window", "left"),
    "lengths": ("all", "some"),
    "mask": ("no", "bool", "float", "-inf", "of heads", "float32"),
    "alibi": ("no", "of heads", "of items"),
    "softcap": (None, 4.0),
    "sinks": ("no", "normal", "-inf"),
    "dropout": (0.0, 0.3),
    "scale": (None, -0.2),
    "sizes": ("normal", "large"),  # of queries
    "layout": ("contiguous", "transposed", "unaligned"),
    "stored": ("own", "int8", "float8_e4m3fn"),
    "grad": (True, False),
    "lse": (False, True),
}
BANDS: dict[str, dict[str, Any]] = {
    "no": {},
    "causal": dict(causal=True),
    "bottom_right": dict(causal="bottom_right"),
    "window": dict(window=(70, 3)),
    "left": dict(window=(5, None)),
}


def excludes(f: str, a: Any, g: str, b: Any) -> bool:
    """Level a of factor f excludes level b of g."""
    if (f, g) == ("form", "stored"):
        return a != "paged" and b != "own"
    if (f, g) == ("mask", "dtype"):  # a float32 mask is another dtype's beside 16 bits alone
        return a == "float32" and b in ("float32", "float64")
    return (f, g) == ("stored", "grad") and a != "own" and b


USUAL: Row = {name: some[0] for name, some in FACTORS.items()}
DECODED = dict(M=1, N=530, grad=False)
FIXED: tuple[Row, ...] = (  # decoding: in the array one row meets many keys in other forms, maybe
    USUAL | DECODED | {"D, Dv": (128, 128), "heads": (8, 2)},
    USUAL | DECODED | dict(dtype="float32", lse=True, band="bottom_right"),
    USUAL | DECODED | {"dtype": "float16", "D, Dv": (33, 17), "band": "window", "N": 300},
)


class Call(NamedTuple):
    """A call. wanted: those of its tensors that have a gradient."""

    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    given: dict[str, Any]
    wanted: tuple[str, ...]
    dout: Tensor
    dlse: Tensor | None  # None: the LSE is not returned
    keys: tuple[int, ...]  # of each sequence

    def run(self, backend: str, device: str) -> dict[str, Tensor]:
        """The results and gradients by name, on the CPU."""
        given = {name: moved(x, device) for name, x in self.given.items()}
        leaves = self._leaves(lambda x: moved(x, device))
        results = self.function(**leaves, **given, backend=backend, **self._asked())
        return self._found(results, leaves)

    def by_oracle(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What the oracle returns if it computes in `dtype`."""
        leaves = self._leaves(lambda x: x.to(dtype) if x.dtype.itemsize > 1 else x)
        if self.function is attention:
            return self._found(ORACLE(**leaves, **self.given, **self._asked()), leaves)
        parts = []
        for item in self._items(leaves, dtype):
            found = ORACLE(**item, **self._asked())
            found = found if isinstance(found, tuple) else (found,)
            parts.append([x[0].transpose(0, 1) for x in found])
        return self._found(tuple(map(torch.cat, zip(*parts))), leaves)

    def _asked(self) -> dict[str, Any]:
        return {} if self.dlse is None else dict(return_lse=True)

    def _leaves(self, made: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        leaves = {name: made(x).detach() for name, x in self.tensors.items()}
        for name in self.wanted:
            leaves[name].requires_grad_()
        return leaves

    def _found(self, results: Any, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = results if isinstance(results, tuple) else (results,)
        found = dict(zip(("out", "lse"), outputs))
        if self.wanted:
            incoming = [x.to(y) for x, y in zip((self.dout, self.dlse), outputs) if x is not None]
            grads = torch.autograd.grad(outputs, [leaves[x] for x in self.wanted], incoming)
            found |= {f"d{name}": x for name, x in zip(self.wanted, grads)}
        return {name: x.detach().cpu() for name, x in found.items()}

    def _items(self, leaves: dict[str, Tensor], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
        """The arguments of each sequence of a packed call, as those of a dense one."""
        given = dict(self.given)
        cu_q, cu_k, table = (given.pop(x, None) for x in ("cu_q", "cu_k", "block_table"))
        scales = {name: given.pop(f"{name}_scale", None) for name in "kv"}
        given = {name: x for name, x in given.items() if name not in ("max_q", "max_k")}
        for b in range(len(cu_q) - 1):
            rows = slice(int(cu_q[b]), int(cu_q[b + 1]))
            n = self.keys[b] if cu_k is None else int(cu_k[b + 1] - cu_k[b])
            own = {x: leaves[x] for x in ("mask", "sinks") if x in leaves} | given
            for x in own.keys() & {"mask", "key_lengths", "alibi_slopes"}:
                if own[x].ndim > 1 or x == "key_lengths":  # else slopes of heads
                    own[x] = own[x][b : b + 1]
            if table is not None:
                own.pop("key_lengths")
            if "mask" in own:
                own["mask"] = own["mask"][:, :, : rows.stop - rows.start, :n]
            own["q"] = leaves["q"][rows].transpose(0, 1)[None]
            for name in "kv":
                x, scale = leaves[name], scales[name]
                if scale is not None:
                    x = (x.double() * scale[..., None].double()).to(dtype)
                if cu_k is None:
                    x = x[table[b, : -(-n // PAGE)].long()].flatten(0, 1)[:n]
                else:
                    x = x[int(cu_k[b]) : int(cu_k[b + 1])]
                own[name] = x.transpose(0, 1)[None]
            yield own | dict(place=Place(item=b))


def made(row: Row, seed: int) -> Call:
    """The call of a row."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, row["dtype"])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    (H, Hk), (D, Dv), M, N = row["heads"], row["D, Dv"], row["M"], row["N"]
    B = 2 if row["form"] == "dense" else 3
    ms, ns = (M, M // 2 + 1, 0), (N // 2 + 1, N, N)  # of sequences; the last has no row

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def laid(*shape: int) -> Tensor:
        """In the memory that the row says: (B, H, M, D), (T, H, D) or (P, page, H, D)."""
        if row["layout"] == "unaligned":
            return randn(*shape[:-1], shape[-1] + 3)[..., 1:-2]
        if row["layout"] == "transposed":
            *outer, one, other, D = shape
            return randn(*outer, other, one, D).transpose(-3, -2)
        return randn(*shape)

    given: dict[str, Any] = dict(BANDS[row["band"]])
    if row["form"] == "dense":
        q, k, v = laid(B, H, M, D), laid(B, Hk, N, D), laid(B, Hk, N, Dv)
        out = (B, H, M, Dv)
        if row["lengths"] == "some":
            given["key_lengths"] = torch.tensor([N // 2 + 1, 0])
            k[0, :, N // 2 + 1 :] = v[0, :, N // 2 + 1 :] = torch.nan
            k[1] = v[1] = torch.nan
    else:
        given |= dict(cu_q=_offsets(ms), max_q=max(ms), max_k=max(ns))
        q, out = laid(sum(ms), H, D), (sum(ms), H, Dv)
        size: tuple[int, ...] = (sum(ns),)
        if row["form"] == "packed":
            given["cu_k"] = _offsets(ns)
            if row["lengths"] == "some":
                given["key_lengths"] = torch.tensor([0, N, N // 2])
        else:
            given |= _pages(ns, generator)
            size = (int(given["block_table"].max()) + 2, PAGE)
        k, v = laid(*size, Hk, D), laid(*size, Hk, Dv)
    if row["sizes"] == "large":
        q *= 8
    tensors = dict(q=q, k=k, v=v)
    if row["stored"] != "own":
        for name in "kv":
            tensors[name], scale = quantised(tensors[name].float(), getattr(torch, row["stored"]))
            given[f"{name}_scale"] = scale
    if row["mask"] != "no":
        planes = H if row["mask"] == "of heads" else 1
        kinds = {"bool": torch.bool, "float32": torch.float32}
        tensors["mask"] = _mask(row["mask"], (B, planes, M, N), generator).to(
            kinds.get(row["mask"], dtype)
        )
    if row["alibi"] != "no":
        shape = (H,) if row["alibi"] == "of heads" else (B, H)
        given["alibi_slopes"] = torch.rand(shape, generator=generator, dtype=wide)
    if row["sinks"] != "no":
        tensors["sinks"] = randn(H, dtype=wide)
        if row["sinks"] == "-inf":
            tensors["sinks"][0] = -torch.inf
    if row["dropout"]:
        given |= dict(dropout_p=row["dropout"], seed=seed + 1)
    given |= {name: row[name] for name in ("softcap", "scale") if row[name] is not None}
    wanted = tuple(x for x, y in tensors.items() if y.is_floating_point()) if row["grad"] else ()
    dlse = randn(*out[:-1], dtype=wide) if row["lse"] else None
    function = attention if row["form"] == "dense" else attention_packed
    return Call(function, tensors, given, wanted, randn(*out), dlse, ns)


def moved(x: Any, device: str) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x


def _offsets(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).int()


def _pages(ns: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """Pages in a random order; entries past a length are out of range."""
    counts = [-(-n // PAGE) for n in ns]
    order = torch.randperm(sum(counts) + 1, generator=generator).int()
    table = torch.full((len(ns), max(counts) + 1), -(10**6), dtype=torch.int32)
    for b, count in enumerate(counts):
        table[b, :count] = order[sum(counts[:b]) :][:count]
    return dict(block_table=table, key_lengths=torch.tensor(ns).int())


def _mask(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    shown = torch.rand(shape, generator=generator) < 0.7
    shown[..., shape[-2] // 2, :] = shape[-2] == 1  # a row without a key
    if kind == "bool":
        return shown
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.masked_fill(~shown, -torch.inf) if kind == "-inf" else x
