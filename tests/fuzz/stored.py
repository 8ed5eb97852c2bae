"""Draw keys as caches store them: in pages, and in eight and four bits."""

from dataclasses import replace

import torch

from fastattn.call.int4 import INT4, dequantised_int4, quantised_int4
from tests.support.error_budget import oracle
from tests.support.large_logit_rows import far_rows

from .draw import PackedVerdict, alone, rows_in


def paged(rng, batch):
    """The arguments of the same packed call with its keys in pages, each key once.

    Unused pages hold NaN. Unused table entries are out of range."""
    page = rng.choice((1, 5, 16, 33, 64, 256))
    given = {name: x for name, x in batch.given.items() if name != "cu_k"}
    lengths = torch.tensor([rows_in(keys) for keys in batch.keys], dtype=torch.int64)
    each = [-(-int(n) // page) for n in lengths]
    spare = rng.randint(1, 3)
    blocks = max(each, default=0) + rng.randint(0, 2)
    order = rng.sample(range(sum(each) + spare), sum(each) + spare)
    table = torch.tensor(
        [[rng.choice((-(10**9), 10**9, -1)) for _ in range(blocks)] for _ in each],
        dtype=torch.int64,
    ).view(len(each), blocks)
    pools = {}
    for name in ("k", "v", "k_scale", "v_scale"):
        if name in given:
            x = given[name]
            nonsense = {torch.int8: 99, INT4: 255}.get(x.dtype, torch.nan)
            pools[name] = torch.full((len(order), page, *x.shape[1:]), nonsense).to(x.dtype)
    at = 0
    for b, count in enumerate(each):
        for block in range(count):
            table[b, block] = order[at]
            first = batch.keys[b].start + block * page
            rows = slice(first, min(first + page, batch.keys[b].stop))
            for name, pool in pools.items():
                pool[order[at], : rows_in(rows)] = given[name][rows]
            at += 1
    if "mask" in given or "max_k" in given:
        given.setdefault("max_k", int(lengths.max()) if len(lengths) else 0)
    index = rng.choice((torch.int32, torch.int64))
    own = batch.given.get("key_lengths", lengths)
    return given | pools | dict(block_table=table.to(index), key_lengths=own.to(index))


def in_eight_bits(rng, batch):
    """The batch with keys and values in eight bits and a scale per row, and the numbers that these
    are, in float64."""
    storage = rng.choice((torch.int8, torch.float8_e4m3fn, torch.float8_e5m2))
    given, values = dict(batch.given), {}
    generator = torch.Generator().manual_seed(rng.randrange(2**20))
    for name in ("k", "v"):
        x = torch.randn(given[name].shape, generator=generator)
        x = (x * 40).round().clamp(-127, 127) if storage == torch.int8 else x
        scale = 0.01 + torch.rand(x.shape[:2], generator=generator) * 0.02
        if storage != torch.int8:
            scale = scale * 50
        given[name], given[f"{name}_scale"] = x.to(storage), scale
        values[name] = given[name].double() * scale[..., None].double()
    return replace(batch, given=given), values


def in_four_bits(rng, batch):
    """The same in four bits. D and Dv are multiples of 32."""
    given, values = dict(batch.given), {}
    generator = torch.Generator().manual_seed(rng.randrange(2**20))
    for name in ("k", "v"):
        x = torch.randn(given[name].shape, generator=generator)
        x = x * rng.choice((0.1, 1.0)) + rng.choice((-1.0, 0.0, 0.0, 2.0))
        given[name] = quantised_int4(x)
        values[name] = dequantised_int4(given[name], torch.float64)
    return replace(batch, given=given), values


class StoredVerdict(PackedVerdict):
    """The oracle's result for keys and values that are these `values`, before any rounding. Kernels
    may round them to the dtype of q: results may be off by what this changes."""

    def __init__(self, batch, values):
        rounded = {name: x.to(batch.dtype) for name, x in values.items()}
        super().__init__(_with(batch, rounded), backward=False)
        for b, problem in enumerate(_with(batch, values).alone):
            exact = oracle(problem, False, far_rows(problem))
            for name in self.exact:
                own, bound = (batch.part(name, x[name], b) for x in (self.exact, self.bounds))
                bound.add_((exact[name] - own).abs().nan_to_num(0))
                own.copy_(exact[name])


def _with(batch, keys):
    """The batch with these keys and values. They have no scales."""
    given = {name: x for name, x in batch.given.items() if name not in ("k_scale", "v_scale")}
    found = replace(batch, given=given | keys, alone=[])
    found.alone = [alone(found, b) for b in range(len(batch.rows))]
    return found
