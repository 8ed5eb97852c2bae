"""The tensors and arguments that a row names: random values, the same in every run."""

import zlib

import torch
from torch.nn import functional as F

import fastattn
from tests.support.cases import DTYPES, laid


class Draw:
    """Random tensors that depend on the row alone."""

    def __init__(self, row):
        self.row = row
        self.dtype = DTYPES[row["dtype"]]
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.generator = torch.Generator().manual_seed(zlib.crc32(repr(row).encode()))

    def randn(self, *shape, dtype=None):
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return x.to(dtype or self.dtype)

    def rand(self, *shape):
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, low, high, shape):
        return torch.randint(low, high, shape, generator=self.generator)

    def qkv(self, *shapes):
        """Queries and keys are plain, large, or so that every logit is near -24: there one key that
        leaks, with a logit of 0, takes the whole row."""
        q, k, v = (self.randn(*shape, dtype=torch.float64) for shape in shapes)
        D, kind = q.shape[-1], self.row["values"]
        if kind == "large":
            q = q * 4
        if kind == "leaks":
            scale = self.row["scale"] if isinstance(self.row["scale"], float) else D**-0.5
            size = (24 / (D * abs(scale))) ** 0.5 if scale else 1.0
            signs = torch.tensor([1.0 if d % 3 else -1.0 for d in range(D)]).double()
            q, k = size * signs * (1 + 0.05 * q), -size * signs * (1 + 0.05 * k)
            q = -q if scale < 0 else q
        if kind == "rising":  # along the keys in every other row; it falls in the rows between
            h, i, j = (
                torch.arange(q.shape[1])[:, None],
                *map(torch.arange, (q.shape[2], k.shape[2])),
            )
            q, k = 0.1 * q + 2 - 4 * ((h + i) % 2)[..., None], 0.1 * k + j[:, None] / 40
        return [x.to(self.dtype) for x in (q, k, v)]

    def small(self, x):
        """A small tensor, or a mask, in the memory that the row names."""
        return spread(x, self.row["small_layout"])


def spread(x, layout):
    """ "strided": other numbers are between its elements, "padded": between its rows."""
    if layout == "contiguous" or not x.ndim:
        return x
    if layout == "shifted":
        return laid(x, layout)
    if layout == "columns":
        return laid(x, layout) if x.ndim > 1 else x
    if layout == "padded":
        return F.pad(x, (0, 3), value=1)[..., :-3]
    wide = torch.stack((x, torch.full_like(x, 1) if x.dtype == torch.bool else x + 1), -1)
    return wide.flatten(-2)[..., ::2]


def of_scores(draw, row, B, H, M, N):
    """The arguments that act on scores: (tensors that may require a gradient, others)."""
    tensors, given = {}, {}
    small = dict(own=draw.dtype, float64=torch.float64).get(row.get("small_dtype"), draw.wide)
    given["causal"] = {"no": False, "aligned": False, "top_left": True}.get(
        row["causal"], row["causal"]
    )
    given |= {n: row[n] for n in ("window", "softcap", "scale") if row.get(n, "no") != "no"}
    if (place := place_of(row)) != fastattn.Place():
        given["place"] = place
    if row.get("alibi", "no") != "no":
        shape = (H,) if row["alibi"] == "H" else (B, H)
        given["alibi_slopes"] = draw.small(draw.rand(*shape).to(small))
    if row["sinks"] != "no":
        sinks = draw.randn(H, dtype=small)
        if row["sinks"] != "normal":
            sinks[::2] = float(row["sinks"])
        tensors["sinks"] = draw.small(sinks)
    if row["dropout"] != "no":
        forms = {"seed": int, "tensor": torch.tensor, "matrix": lambda x: torch.tensor([[x]])}
        given |= dict(dropout_p=0.3, seed=forms[row["dropout"]](2**63 - 25))
    if row.get("mask", "no") != "no":
        mask = draw.small(mask_of(draw, row, B, H, M, N))
        (given if mask.dtype == torch.bool else tensors)["mask"] = mask
    if row.get("mod", "no") == "table":
        tensors["table"] = draw.randn(H, span(row), dtype=draw.wide)
    if row.get("row_invariant"):
        given["row_invariant"] = True
    if "deterministic" in row:  # also False: torch's flag, which is the default, is set in tests
        given["deterministic"] = row["deterministic"]
    if row["lse"] != "no":
        given["return_lse"] = True
    return tensors, given


def mask_of(draw, row, B, H, M, N):
    sizes = dict(B=B, H=H, M=M, N=N)
    kind, shape = row["mask"], [sizes.get(x, 1) for x in row["mask_shape"]]
    hidden = draw.rand(*shape) < 0.3
    if "blocks" in kind:  # some planes, rows and keys of them, in pieces that kernels skip or see
        whole = [-(-n // size) for n, size in zip(shape, (1, 1, 32, 64)[4 - len(shape) :])]
        hidden = draw.rand(*whole) < 0.5
        for dim, (n, size) in enumerate(zip(shape, (1, 1, 32, 64)[4 - len(shape) :])):
            hidden = hidden.repeat_interleave(size, dim).narrow(dim, 0, n)
    if "stairs" in kind:  # the first keys, more in each row; none in the first row
        i, j = torch.arange(shape[-2] if len(shape) > 1 else 1)[:, None], torch.arange(shape[-1])
        hidden = (j < 37 * i % (shape[-1] + 1)).expand(torch.broadcast_shapes(shape, (1, 1)))
        hidden = hidden.reshape(shape).clone()
    if "rows" in kind and len(shape) > 1 and shape[-2] > 1:
        hidden[..., shape[-2] // 2 :, :] = True
    if kind in ("bool", "empty rows", "blocks", "stairs"):
        return ~hidden
    dtype = torch.float32 if kind == "float32" else draw.dtype
    least = torch.finfo(dtype).min if kind == "finfo.min" else -torch.inf
    return draw.randn(*shape, dtype=dtype).masked_fill(hidden, least)


def place_of(row):
    place = dict(bottom_right=True) if row["causal"] == "aligned" else {}
    if row.get("place", "no") != "no":
        place |= dict(head=1, item=2)
        if "counts" not in row and "history" not in row:
            place |= dict(row=3, key=6, rows=3 + row["M"] + 4, keys=6 + row["N"] + 7)
    return fastattn.Place(**place)


def wanted(row, tensors):
    """The names of the tensors that require a gradient."""
    others = [name for name in tensors if name not in ("q", "k", "v")] or [*tensors][:3]
    some = dict(all=[*tensors], no=[], q=["q"], k=["k"], v=["v"], kv=["k", "v"], others=others)
    found = some[row["grad"]]
    if row["grad"] == "q" and "table" in tensors:
        found = ["q", "table"]
    return tuple(found)


# --------------------------------------------------------------------------- functions of the score


def span(row):
    """The number of entries of a table of distances."""
    return 4 * (row["M"] + row["N"]) + 32


PLACES = torch.tensor([[0, 0], [1, 2], [5, 1], [-3, 4], [2, 2], [6, 6], [0, -4], [3, 1]])
SHOWN = {  # what mask_mods show; the last two have a structure that is recognised
    "mask_mod": lambda b, h, i, j: (i // 7 >= j // 11) | (j % 5 == 0),
    "of heads": lambda b, h, i, j: i + 3 * h >= j + 2 * b,
    "some rows": lambda b, h, i, j: (i % 40 > 5) & (j > 7) & ((i // 7 >= j // 11) | (j % 5 == 0)),
    "near": lambda b, h, i, j: (PLACES[i % 8] - PLACES[j % 8]).square().sum(-1) < 20,
    "band": lambda b, h, i, j: (j <= i + 2) & (i - j < 40),
    "blocks": lambda b, h, i, j: i // 48 == j // 48,
}


def by_distance(h, i, j):
    """What a score_mod that is recognised as ALiBi adds."""
    return -0.05 * (h + 1) * (i - j).abs()


def functions(row, H, table):
    """The functions of the score as arguments of a call."""
    if row.get("mod", "no") == "no":
        return {}
    if row["mod"] in SHOWN:
        return dict(mask_mod=SHOWN[row["mod"]])
    if row["mod"] == "alibi":
        return dict(score_mod=lambda s, b, h, i, j: s + by_distance(h, i, j))
    if row["mod"] == "softcap":
        return dict(score_mod=lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0))
    half = span(row) // 2

    def looked_up(s, b, h, i, j):
        at = torch.clamp(i - j + half, 0, 2 * half - 1)
        return s + table[torch.clamp(h, max=H - 1), at]

    return dict(score_mod=looked_up)


def without_functions(draw, kwargs, table, B, H, M, N):
    """The arguments of the same call by a mask and a softcap, for the oracle; and, of each element
    of the mask, its address in the table, if there is one."""
    place = kwargs.get("place") or fastattn.Place()
    first = place.item, place.head, place.row, place.key
    b, h, i, j = (
        (at + torch.arange(n)).view([n if dim == x else 1 for x in range(4)])
        for dim, (at, n) in enumerate(zip(first, (B, H, M, N)))
    )
    mask, kind = kwargs.get("mask"), draw.row.get("mod", "no")
    if kind == "softcap":
        return kwargs | dict(softcap=3.0), None
    if kind in SHOWN:
        keep = SHOWN[kind](b, h, i, j)
        if mask is None:
            mask = keep
        elif mask.dtype == torch.bool:
            mask = mask & keep
        else:
            mask = torch.where(keep, mask, -torch.inf)
        return kwargs | dict(mask=mask), None
    if kind == "alibi":
        at, bias = None, by_distance(h.double(), i, j).to(draw.wide)
    elif kind == "table":
        half = span(draw.row) // 2
        heads = h.clamp(max=table.shape[0] - 1)
        at = heads * table.shape[1] + (i - j + half).clamp(0, 2 * half - 1)
        bias = table.reshape(-1)[at]
    else:
        return kwargs, None
    mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    return kwargs | dict(mask=mask), None if at is None else at.expand(mask.shape)
