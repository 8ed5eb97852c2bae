"""A row of a covering array as a call of `attention`, `attention_packed` or `attention_selected`,
and what the float64 oracle says of it.

A call of any form is a sum of pieces: dense `Problem`s that the oracle and its error budget take. A
dense call is one piece, a packed one has a piece for each sequence, a selected one for each row and
group of heads. Pieces are made of the call's tensors by indexing, and the same indexing of the
elements' addresses says where a piece's result or gradient belongs: it is added there. So pages
that sequences share, keys that rows share and masks that broadcast need no code of their own.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional as F

import fastattn
from fastattn.call.int4 import BLOCK_BYTES, NUMBERS, dequantised_int4, quantised_int4
from fastattn.call.quantisation import LARGEST, quantised
from tests.features.arguments import (
    Draw,
    functions,
    of_scores,
    place_of,
    spread,
    wanted,
    without_functions,
)
from tests.features.factors import LISTED
from tests.support.cases import Problem, laid
from tests.support.error_budget import Verdict, oracle
from tests.support.large_logit_rows import far_rows

OF_A_SEQUENCE = ("causal", "window", "alibi_slopes", "softcap", "scale", "dropout_p", "seed")
OF_A_SEQUENCE += ("mask", "key_lengths", "return_lse")
# Arguments that ask kernels for bits: the oracle has none of them.
OF_KERNELS = "row_invariant", "deterministic"


@dataclass
class Piece:
    problem: Problem
    # Of each result of the problem: (a result of the call, columns that belong there, addresses).
    to: dict
    exact: Problem | None = None  # with keys that kernels may round to the dtype of q


@dataclass
class Call:
    row: dict
    function: Callable
    tensors: dict  # those that may require a gradient
    given: dict  # other arguments
    dout: torch.Tensor
    draw: Draw
    pieces: list = field(default_factory=list)

    def __post_init__(self):
        self.wants = wanted(self.row, self.tensors)
        self.dlse = None
        if "return_lse" in self.given:
            self.dlse = self.draw.randn(*self.dout.shape[:-1], dtype=self.draw.wide)

    @property
    def incoming(self):
        return self.dout, self.dlse

    def run(self, **more):
        """{"out", "lse", "dq", ...}."""
        x = {n: t.detach().requires_grad_(n in self.wants) for n, t in self.tensors.items()}
        leaves = [x[n] for n in self.wants]
        mods = functions(self.row, self.row["heads"][0], x.pop("table", None))
        result = self.function(**self.given, **x, **mods, **more)
        outs = result if isinstance(result, tuple) else (result,)
        found = dict(zip(("out", "lse"), outs, strict=False))
        if leaves:
            grads = torch.autograd.grad(outs, leaves, self.incoming[: len(outs)])
            found |= {"d" + n: grad for n, grad in zip(self.wants, grads, strict=True)}
        return {n: t.detach() for n, t in found.items()}

    def addresses(self):
        """Of each tensor, and of out and the LSE, the places of its elements."""
        of = self.tensors | dict(out=self.dout, lse=self.dout[..., 0])
        return {n: torch.arange(math.prod(x.shape)).view(x.shape) for n, x in of.items()}

    def add(self, part, kwargs, keys=None, sizes=None):
        """Add a piece. part(name, x): what it has of a tensor of the call, laid out as in a dense
        call. keys: its k and v, if these are not tensors of the call as they are; and their sizes,
        where a kernel adds larger numbers to make them."""
        x = {n: part(n, t) for n, t in self.tensors.items()}
        at = {n: part(n, t) for n, t in self.addresses().items()}
        if keys:
            x |= {n: t.to(x["q"].dtype) for n, t in keys.items()}
        out, lse = part("out", self.dout), None if self.dlse is None else part("lse", self.dlse)
        to = {n: [(n, slice(None), at[n])] for n in ("out", "lse")}
        to |= {"d" + n: [("d" + n, slice(None), at[n])] for n in at if n not in ("qv", "table")}
        q, k, v, qv, table = (x.pop(n, None) for n in ("q", "k", "v", "qv", "table"))
        if qv is not None:
            D = q.shape[-1]
            q, k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
            to["dq"] = [("dq", slice(D), at["q"]), ("dqv", slice(D, None), at["qv"])]
            to["dk"] = [("dk", slice(D), at["k"]), ("dv", slice(D, None), at["v"])]
        shape = *q.shape[:3], k.shape[2]
        kwargs, of_table = without_functions(self.draw, kwargs | x, table, *shape)
        mask = kwargs.get("mask")
        if of_table is not None:
            to["dmask"] = [("dtable", slice(None), of_table)]
        elif "dmask" in to:  # of a mask that functions may have expanded
            to["dmask"] = [("dmask", slice(None), at["mask"].expand(mask.shape))]
        has_grad = mask is not None and mask.is_floating_point()
        needs = ["q", "k", "v"] + ["sinks"] * ("sinks" in kwargs) + ["mask"] * has_grad
        problem = Problem("", q, k, v, kwargs, out, lse, tuple(needs), sizes or {})
        rounded = keys and keys["k"].dtype != q.dtype
        wide = replace(problem.to(torch.float64), **keys) if rounded else None
        self.pieces.append(Piece(problem, to, wide))


class Expected(Verdict):
    """The sums of the pieces' results, and of their error budgets."""

    def __init__(self, call):
        self.call = call
        of = {"out": call.dout, "lse": call.dlse} | {"d" + n: call.tensors[n] for n in call.wants}
        of = {name: x for name, x in of.items() if x is not None}
        self.dtypes = {name: x.dtype for name, x in of.items()}
        self.exact, self.bounds = (
            {name: torch.zeros(x.shape, dtype=torch.float64) for name, x in of.items()}
            for _ in range(2)
        )
        for piece in call.pieces:
            self._add(piece, bool(call.wants))

    def _add(self, piece, backward):
        verdict = Verdict(piece.problem, backward)
        exact, bounds = verdict.exact, verdict.bounds
        if piece.exact is not None:
            rounded, exact = exact, oracle(piece.exact, False, far_rows(piece.exact))
            for n, bound in bounds.items():  # kernels round elsewhere: some other number is as far
                error = (rounded[n] - exact[n]).abs().nan_to_num(0)
                bounds[n] = bound + 2 * (error.max() if error.numel() else 0)
            if "lse" in bounds and self.call.row["stored"] in ("int8", "int4"):
                bounds["lse"] += rounded_queries(piece.exact)
        for result in exact:
            for name, columns, at in piece.to.get(result, ()):
                if name not in self.exact:
                    continue
                for whole, own in ((self.exact, exact), (self.bounds, bounds)):
                    part = own[result] if result == "lse" else own[result][..., columns]
                    whole[name].view(-1).index_add_(
                        0, at.flatten(), part.expand(at.shape).flatten()
                    )


def rounded_queries(problem):
    """How far a score may be off, since kernels round queries to multiples of a 32767th of their
    row's largest number where keys are in few bits: int4.py, docs/guides/decoding.md."""
    k = problem.sizes.get("k", problem.k).abs().nan_to_num(0).sum(-1)
    scale = problem.kwargs.get("scale")
    scale = 1 / math.sqrt(problem.q.shape[-1]) if scale is None else abs(scale)
    return scale * problem.q.abs().amax((1, 3)) / 65534 * (k.max() if k.numel() else 0)


# ---------------------------------------------------------------------------------------- the forms


def dense(row):
    draw = Draw(row)
    (H, Hk), (B, M, N, D, Dv) = row["heads"], (row[n] for n in ("B", "M", "N", "D", "Dv"))
    q, k, v = draw.qkv((B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv))
    place, lengths = place_of(row), None
    if row["lengths"] != "no":
        most = N if place.keys is None else place.keys
        half = place.key + N // 2
        some = [most, 0, half, place.key + 1] if B > 1 else [half + 1]
        lengths = torch.tensor(lengths_of(row, some))
        for b, n in enumerate((lengths - place.key).clamp(0, N).tolist()):
            k[b, :, n:] = v[b, :, n:] = torch.nan
    tensors = {n: laid(x, row[f"{n}_layout"]) for n, x in dict(q=q, k=k, v=v).items()}
    if row["qv"] != "no":
        tensors["qv"] = draw.randn(B, H, M, Dv)
    if row["qv"] == "adjacent":
        both = torch.cat((k, v), -1)
        tensors |= dict(k=both[..., :D], v=both[..., D:])
    if row["qv"] == "overlapping":  # v begins where k's first row ends, but its rows are Dv apart
        memory = torch.cat((k.flatten(), draw.randn(D + v.numel())))
        tensors["k"] = memory[: k.numel()].view(k.shape)
        tensors["v"] = memory[D : D + v.numel()].view(v.shape)
    more, given = of_scores(draw, row, B, H, M, N)
    if lengths is not None:
        given["key_lengths"] = draw.small(lengths.to(integers(row["lengths"])))
    dout = laid(draw.randn(B, H, M, Dv), row["dout_layout"])
    call = Call(row, fastattn.attention, tensors | more, given, dout, draw)
    call.add(lambda name, x: x, {n: x for n, x in given.items() if n not in OF_KERNELS})
    return call


def problem(row):
    """A dense call without functions and qv, as the one `Problem` that it is."""
    return dense(row).pieces[0].problem


def lengths_of(row, some):
    """The number of keys of each item: some of these, or those that the row names."""
    return list(LISTED.get(row["lengths"], some[: row["B"]]))


def integers(name):
    return torch.int64 if name in LISTED else getattr(torch, name)


def counts(row):
    """The numbers of rows and of keys of each sequence."""
    M, N = row["M"], row["N"]
    if ns := LISTED.get(row["counts"]):
        return (M,) * len(ns), ns
    return {
        "falling": ((M, M // 2 + 1, 1), (N // 2 + 1, N, 1)),
        "equal": ((M, M), (N, N)),
        "some empty": ((0, M, M // 3), (N, N // 2 + 3, 0)),
    }[row["counts"]]


def offsets(sizes, dtype):
    return F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).to(dtype)


def packed(row):
    """A packed call, of keys one after the other or in pages, of the dtype of q or of few bits."""
    draw = Draw(row)
    (H, Hk), (D, Dv), (ms, ns) = row["heads"], row["widths"], counts(row)
    B, storage = len(ms), row.get("stored", "own")
    index = getattr(torch, row["index"])
    if row.get("pages", "none") == "none":
        size, keys_of, given = consecutive(ns, index)
    else:
        size, keys_of, given = in_pages(draw, row, ns, index)
    if row.get("lengths", "no") != "no":
        seen = [n if b == 0 else n // 2 for b, n in enumerate(ns)]
        given["key_lengths"] = draw.small(torch.tensor(seen).to(getattr(torch, row["lengths"])))
    used = ms
    if row["used"] == "fewer":  # sequences of more rows than these, of which they use these
        ms = [m + 3 * (b != 1) for b, m in enumerate(ms)]
        given["row_lengths"] = draw.small(torch.tensor(used).to(index))
    T = sum(ms)
    if row["longest"] != "unsaid":
        spare = 3 * (row["longest"] == "spare")
        given |= dict(max_q=max(ms) + spare, max_k=max(ns) + spare)
    q, k, v = draw.qkv((T, H, D), (*size, Hk, D), (*size, Hk, Dv))
    read, seen = torch.zeros(size, dtype=torch.bool), given.get("key_lengths", torch.tensor(ns))
    places = torch.arange(read.numel()).view(size)
    for b, n in enumerate(seen.tolist()):
        read.view(-1)[keys_of(b)(places)[:n]] = True
    tensors, values, sizes = {"q": laid(q, row["q_layout"], heads=-2)}, {}, {}
    for name, x in (("k", k), ("v", v)):
        if storage == "own":
            x[~read] = torch.nan
            tensors[name] = laid(x, row[f"{name}_layout"], heads=-2)
            continue
        tensors[name], scale, values[name] = stored(draw, x.shape, storage, row["scale_layout"])
        if storage == "int4":
            sizes[name] = int4_sizes(tensors[name])
        if row[f"{name}_layout"] == "permuted":
            tensors[name] = laid(tensors[name], "permuted")
        if scale is not None:
            if scale.ndim == read.ndim + 1:
                scale[~read] = torch.nan
            given[f"{name}_scale"] = spread(scale, row["scale_layout"])
    if row["qv"] != "no":
        tensors["qv"] = draw.randn(T, H, Dv)
    if row["qv"] == "adjacent":
        both = torch.cat((tensors["v"], tensors["k"]), -1)
        tensors |= dict(v=both[..., :Dv], k=both[..., Dv:])
    most = max(ns) if "cu_k" in given else given["block_table"].shape[1] * row["page"]
    longest = given.get("max_q", max(ms)), given.get("max_k", most)
    more, others = of_scores(draw, row, B, H, *longest)
    given |= others | dict(cu_q=offsets(ms, index))
    call = Call(row, fastattn.attention_packed, tensors | more, given, draw.randn(T, H, Dv), draw)
    sequences(call, ms, used, ns, keys_of, values, sizes)
    return call


def consecutive(ns, index):
    """(the shape of rows of keys, for each sequence a function from k to its keys, arguments)"""
    starts = offsets(ns, torch.int64).tolist()
    return (
        (starts[-1],),
        lambda b: lambda x: x[starts[b] : starts[b + 1]],
        dict(cu_k=offsets(ns, index)),
    )


def in_pages(draw, row, ns, index):
    """The same for keys in pages."""
    page = row["page"]
    each = [-(-n // page) for n in ns]
    P = sum(each) + 2
    order = torch.arange(P)
    if row["pages"] != "ascending":
        order = torch.randperm(P, generator=draw.generator)
    table, used = torch.full((len(ns), max(each) + 1), -(10**6)), 0
    for b, count in enumerate(each):
        table[b, :count] = order[used : used + count]
        if row["pages"] == "shared":  # with the first sequence, and twice in one
            first = min(each[0], count)
            table[b, :first] = table[0, :first]
            table[b, 1:2] = table[b, :1]
        used += count
    given = dict(block_table=table.to(index), key_lengths=torch.tensor(ns).to(index))
    return (P, page), lambda b: lambda x: x[table[b, : each[b]]].flatten(0, 1)[: ns[b]], given


def stored(draw, shape, storage, scales):
    """Rows in fewer bits, their scales, and the numbers that they are, in float64. A third of the
    rows are of usual numbers, of any codes, and of the smallest (subnormal) ones. scales: those of
    rows, "of heads", or "one" of all."""
    x = draw.randn(*shape, dtype=torch.float32)
    if storage == "int4":
        x = quantised_int4(x * 0.7 + 0.3)
        return x, None, dequantised_int4(x, torch.float64)
    dtype = getattr(torch, storage)
    most = LARGEST[dtype]
    small = {torch.int8: 3.0, torch.float8_e4m3fn: 2**-5, torch.float8_e5m2: 2**-13}[dtype]
    numbers, scale = quantised(x, dtype)
    kind, exponents = draw.integers(0, 3, shape[:-1]), draw.rand(*shape).float()
    powers = exponents.round(decimals=2) if dtype == torch.int8 else 2 ** (-14 * exponents)
    codes = draw.randn(*shape).sign().float() * most * powers
    tiny = (draw.rand(*shape).float() * 2 - 1) * small
    numbers = torch.where(kind[..., None] == 1, codes, numbers.float())
    numbers = torch.where(kind[..., None] == 2, tiny, numbers)
    numbers = (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
    scale = torch.where(kind == 1, 3 / most, torch.where(kind == 2, 1 / small, scale)).float()
    if scales == "of heads":
        scale = 3 / most / torch.arange(1.0, shape[-2] + 1)
    elif scales == "one":
        scale = torch.tensor(2 / most)
    return numbers, scale, numbers.double() * scale[..., None].double()


def int4_sizes(x):
    """The sizes of rows of blocks: a kernel may sum numbers times scales, and minima, apart."""
    minima = x.unflatten(-1, (-1, BLOCK_BYTES)).clone()
    minima[..., :NUMBERS] = 0
    minima = dequantised_int4(minima.flatten(-2), torch.float64)
    return dequantised_int4(x, torch.float64) - minima + minima.abs()


def sequences(call, ms, used, ns, keys_of, values, sizes):
    """Add a piece for each sequence of a packed call, and one for the rows that it does not use.
    values: the numbers that k and v are, if these are in few bits, and their sizes; keys_of(b): a
    function from k or v to the keys of b."""
    ends = offsets(ms, torch.int64).tolist()
    kwargs = {n: call.given[n] for n in OF_A_SEQUENCE if n in call.given}
    if "block_table" in call.given:
        kwargs.pop("key_lengths", None)
    place = place_of(call.row)
    for b, (m, n) in enumerate(zip(used, ns, strict=True)):
        parts = [(slice(ends[b], ends[b] + m), keys_of(b), n)]
        if ends[b] + m < ends[b + 1]:
            parts.append((slice(ends[b] + m, ends[b + 1]), no_keys, 0))
        for rows, keys, count in parts:
            M = rows.stop - rows.start
            part = functools.partial(of_sequence, b=b, rows=rows, keys=keys, M=M, N=count)
            given = {x: y for x, y in kwargs.items() if count or x != "key_lengths"}
            own = {name: part(name, x) for name, x in given.items()}
            own["place"] = place._replace(item=place.item + b)
            few = ({x: part(x, y) for x, y in some.items()} for some in (values, sizes))
            call.add(part, own, *few)


def no_keys(x):
    return x.flatten(0, -3)[:0]


def of_sequence(name, x, b, rows, keys, M, N):
    """The part of an argument, or of its addresses, that sequence b sees, as in a dense call."""
    if name in ("q", "qv", "out", "lse"):
        return x[b : b + 1] if x.ndim - (name != "lse") == 3 else x[rows].transpose(0, 1)[None]
    if name in ("k", "v"):
        return keys(x).transpose(0, 1)[None]
    if name in ("alibi_slopes", "key_lengths"):
        return x if name == "alibi_slopes" and x.ndim == 1 else x[b : b + 1]
    if name == "mask":
        x = x[b : b + 1] if x.ndim == 4 and x.shape[0] > 1 else x
        x = x[..., :M, :] if x.ndim > 1 and x.shape[-2] > 1 else x
        return x[..., :N] if x.shape[-1] > 1 else x
    return x


def selected(row):
    draw = Draw(row)
    (H, Hk), (B, M, N, D, Dv) = row["heads"], (row[n] for n in ("B", "M", "N", "D", "Dv"))
    G = {"one": 1, "by key head": Hk, "by head": H}[row["lists"]]
    q, k, v = draw.qkv((B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv))
    more, given = of_scores(draw, row, B, H, M, N)
    length = [N] * B
    if row["lengths"] != "no":
        length = lengths_of(row, [N // 2 + 1, 0])
        for b, n in enumerate(length):
            k[b, :, n:] = v[b, :, n:] = torch.nan
        given["key_lengths"] = draw.small(torch.tensor(length).to(integers(row["lengths"])))
    tensors = {n: laid(x, row[f"{n}_layout"]) for n, x in dict(q=q, k=k, v=v).items()} | more
    indices = named(draw, row, (B, G, M), -(-N // row["block"]))
    arguments = given | dict(indices=indices.to(getattr(torch, row["index"])), block=row["block"])
    call = Call(row, fastattn.attention_selected, tensors, arguments, draw.randn(B, H, M, Dv), draw)
    shown = torch.zeros(B, G, M, -(-N // row["block"]) + 1, dtype=torch.bool)
    shown.scatter_(-1, indices.masked_fill(indices < 0, shown.shape[-1] - 1), True)
    shown = shown[..., :-1].repeat_interleave(row["block"], -1)[..., :N]  # (B,G,M,N)
    if row["dropout"] == "no":
        call.add(lambda name, x: x, given | dict(mask=shown.repeat_interleave(H // G, 1)))
        return call
    # Dropout counts the keys that a row sees: each row and group is a call of its own.
    given = {n: x for n, x in given.items() if n not in ("causal", "key_lengths")}
    for b in range(B):
        for g in range(G):
            for i in range(M):
                end = length[b]
                if row["causal"] != "no":
                    end = min(end, 1 + i + (length[b] - M) * (row["causal"] == "bottom_right"))
                keys = shown[b, g, i, : max(end, 0)].nonzero()[:, 0]
                heads, of = slice(g * H // G, (g + 1) * H // G), slice(None)
                if G > 1:
                    of = slice(g * Hk // G, g * Hk // G + 1)
                part = functools.partial(of_row, b=b, heads=heads, key_heads=of, i=i, keys=keys)
                call.add(part, given | dict(place=fastattn.Place(item=(b * G + g) * M + i)))
    return call


def named(draw, row, shape, blocks):
    """The blocks that each row names, of which there are `blocks`."""
    if row["named"] == "every":
        return torch.arange(blocks).expand(*shape, blocks)
    shape = *shape, min(blocks + 2, 70)
    if row["named"] == "ascending, repeated":  # without -1, which would end the order
        indices = draw.integers(0, blocks, shape).sort(-1).values
        again = indices[..., 1::3]
        again.copy_(indices[..., 0::3][..., : again.shape[-1]])
        return indices
    indices = draw.integers(-1, blocks, shape)
    indices[0, 0, shape[2] // 2] = -1  # a row of no block
    if row["named"] == "ascending":
        indices = indices.masked_fill(indices < 0, blocks).sort(-1).values
        again = F.pad(indices[..., 1:] == indices[..., :-1], (1, 0))
        indices = indices.masked_fill(again, blocks).sort(-1).values
        indices = indices.masked_fill(indices == blocks, -1)
    return indices


def of_row(name, x, b, heads, key_heads, i, keys):
    """The part of an argument of a selected call, or of its addresses, that row i sees."""
    if name in ("k", "v"):
        return x[b : b + 1, key_heads][:, :, keys]
    return x[heads] if name == "sinks" else x[b : b + 1, heads, i : i + 1]
