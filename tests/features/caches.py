"""A row of a covering array as a call of `KVCache.attention`, after a history of changes.

Each item's keys and values are known. What the cache has of them is read back, by its pages, scales
and offset, and must be as near as its storage allows; the oracle then takes what was read.
"""

import torch

from fastattn import KVCache
from fastattn.call.int4 import dequantised_int4
from tests.features.arguments import Draw, of_scores
from tests.features.calls import Call, int4_sizes, offsets, sequences
from tests.support.cases import laid

JUNK = 5  # keys of each item that a history drops
# How far a number may be from what was appended, as a part of its row's range.
STEP = {"int8": 0.5 / 127, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "int4": 0.51 / 15}


def cached(row):
    draw = Draw(row)
    (H, Hk), (D, Dv), B, M, N = row["heads"], row["widths"], row["B"], row["M"], row["N"]
    ms, ns = [M] * B, [N, N // 2 + 1, 1][:B]
    if row["rows"] == "of any number":
        ms = [M, 0, M // 2 + 1][:B]
    T, S = sum(ms), sum(ns)
    q, k, v = draw.qkv((T, H, D), (S, Hk, D), (S, Hk, Dv))
    if row["offset"]:
        k[..., -1] += 6
    if row["latent"]:
        v = k[..., :Dv]
    cache = filled(draw, row, k, v, ns)
    values, sizes = contents(cache, row, k, v, ns)
    if row["rows"] == "of each item":
        q = q.unflatten(0, (B, M)).transpose(1, 2)
        dout, more = draw.randn(B, H, M, Dv), {}
    else:
        dout, more = draw.randn(T, H, Dv), dict(cu_q=offsets(ms, torch.int64), max_q=max(ms))
    tensors, given = of_scores(draw, row, B, H, max(ms), max(ns))
    tensors = dict(q=laid(q, row["q_layout"]), **tensors)
    given |= dict(more, allow_empty_rows=True)
    call = Call(row, cache.attention, tensors, given, dout, draw)
    sequences(call, ms, ms, ns, lambda b: lambda x: x[b], values, sizes)
    return call


def filled(draw, row, k, v, ns):
    """A cache that has these keys in the end."""
    (_, Hk), (D, Dv) = row["heads"], row["widths"]
    history, storage = row["history"], row["stored"]
    dtypes = {"own": None, "int4": "int4"}
    cache = KVCache(
        len(ns),
        Hk,
        D,
        **(dict(latent=Dv) if row["latent"] else dict(value_dim=Dv)),
        capacity=4 if history == "grown" else max(ns) + JUNK,
        grow=history in ("grown", "forked"),
        page_size=row["page"],
        dtype=draw.dtype,
        storage=dtypes[storage] if storage in dtypes else getattr(torch, storage),
    )
    keys, values = (list(x.split(ns)) for x in (k, v))
    other = [draw.randn(JUNK, *x.shape[1:]) for x in (k, v)]
    junk = [[x] * len(ns) for x in other]

    def add(to, keys, values):
        of_keys = () if row["latent"] else (torch.cat(values),)
        cu = offsets([len(x) for x in keys], torch.int32)
        to.append(torch.cat(keys), *of_keys or (None,), cu)

    if history == "by one":
        add(cache, [x[:-1] for x in keys], [x[:-1] for x in values])
        last = [torch.stack([x[-1:].transpose(0, 1) for x in some]) for some in (keys, values)]
        cache.append(*last[: 1 if row["latent"] else 2])
    elif history == "truncated":
        add(cache, *[[torch.cat(x) for x in zip(*some)] for some in zip((keys, values), junk)])
        cache.truncate(ns)
    elif history == "evicted":
        add(cache, *[[torch.cat(x) for x in zip(*some)] for some in zip(junk, (keys, values))])
        cache.evict(JUNK)
    elif history in ("forked", "grown"):
        half = [len(x) // 2 for x in keys]
        add(cache, *[[x[:n] for x, n in zip(some, half)] for some in (keys, values)])
        if history == "forked":
            before, cache = cache, cache.fork()
            add(before, *junk)
        add(cache, *[[x[n:] for x, n in zip(some, half)] for some in (keys, values)])
    else:
        if history == "freed":
            add(cache, *junk)
            cache.free()
        add(cache, keys, values)
    return cache


def contents(cache, row, k, v, ns):
    """Keys and values of each item as the cache has them, in float64 if of few bits; and sizes."""
    found, sizes = {}, {}
    for name, appended, less in (("k", k, cache.key_offset), ("v", v, None)):
        pages, scales = getattr(cache, f"{name}_pages"), getattr(cache, f"{name}_scales")
        found[name], sizes[name] = [], []
        for b, own in enumerate(appended.split(ns)):
            used = cache.block_table[b, : -(-len(own) // cache.page_size)]
            x = pages[used].flatten(0, 1)[: len(own)]
            if row["stored"] == "own":
                assert torch.equal(x, own), f"{name} of item {b} is not what was appended"
            else:
                scale = None if scales is None else scales[used].flatten(0, 1)[: len(own)]
                x, size = whole_numbers(x, scale, own.double(), less, row["stored"])
                sizes[name].append(size)
            found[name].append(x)
        if row["latent"]:
            for some in (found, sizes):
                some["v"] = [x[..., : v.shape[-1]] for x in some["k"]]
            break
    return found, sizes if row["stored"] != "own" else {}


def whole_numbers(x, scale, own, less, storage):
    """The numbers that x and its scales are, and their sizes. They must be near `own`."""
    if scale is None:
        x, size = dequantised_int4(x, torch.float64), int4_sizes(x)
    else:
        x = x.double() * scale[..., None].double()
        size = x.abs()
    if less is not None:
        x, size = x + less, size + less.abs()
    error, most = (x - own).abs().amax(), (own if less is None else own - less).abs().amax()
    assert error <= STEP[storage] * 2 * most, f"{storage}: {error} from what was appended"
    return x, size
