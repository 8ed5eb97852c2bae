"""The calls that are made under sanitizers: for every head dim from 1 to 130, every instruction set
and every dtype, a random call of each kind. A number determines the call.
"""

import itertools
import random
import zlib
from dataclasses import replace

import torch

import fastattn
from tests.semantics.test_packed import batch
from tests.semantics.test_paged import in_pages, of_scores
from tests.semantics.test_storage import NAMES, kept
from tests.support import cache_model, tangents
from tests.support.cases import DTYPES, FEATURES, Dims, build

HEAD_DIMS = (*range(1, 131), 513, 576, 777, 1000)
OF_THREADS = HEAD_DIMS[::12]  # sizes of the calls that run under ThreadSanitizer, which is slow
SCORES = [f for f in FEATURES if of_scores((f,)) and f.group not in ("queries", "place", "dout")]


class Sizes:
    """How large calls are: at most so many rows, keys and sequences, and values of any width."""

    def __init__(self, rows, keys, sequences):
        self.rows, self.keys, self.sequences = rows, keys, sequences

    def dims(self, rng, D):
        heads, group = rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3))
        M, N = rng.randint(1, self.rows), rng.randint(1, self.keys)
        Dv = rng.choice((D, D, rng.choice(HEAD_DIMS)))
        return Dims(rng.choice((1, 2)), heads * group, heads, M, N, D, Dv)

    def packed(self, rng):
        """(rows, keys) of each sequence; the first is the longest in both, as `batch` requires."""
        found = [
            (rng.randint(0, self.rows), rng.randint(0, self.keys))
            for _ in range(rng.randint(1, self.sequences))
        ]
        return [tuple(map(max, zip(*found, strict=True))), *found]


SMALL = Sizes(40, 70, 4)
KINDS = {}


def kind(make):
    KINDS[make.__name__] = make
    return make


def features(rng, among=FEATURES):
    """Up to three, of different groups."""
    found = {}
    for feature in rng.sample(among, rng.randint(0, 3)):
        found.setdefault(feature.group, feature)
    return tuple(found.values())


def problem(rng, D, dtype, sizes):
    found = build(sizes.dims(rng, D), features(rng), dtype, seed=rng.randrange(2**20))
    some = tuple(x for x in found.needs_grad if rng.random() < 0.7) or found.needs_grad
    return replace(found, needs_grad=found.needs_grad if found.dlse is not None else some)


@kind
def dense(rng, D, dtype, sizes, backend):
    """Forward and backward."""
    problem(rng, D, dtype, sizes).run(fastattn.attention, backend=backend)


@kind
def weights(rng, D, dtype, sizes, backend):
    """Probabilities, their mean over heads, and the gradients of both."""
    made = problem(rng, D, dtype, sizes)
    given = {x: y for x, y in made.tensors().items() if x not in ("v", "return_lse")}
    leaves = [x for x in made.needs_grad if x != "v"]
    given |= {x: given[x].detach().requires_grad_() for x in leaves}
    found = fastattn.attention_weights(**given, average_heads=rng.random() < 0.5, backend=backend)
    if leaves:
        torch.autograd.grad(found, [given[x] for x in leaves], torch.randn_like(found))


@kind
def derivatives(rng, D, dtype, sizes, backend):
    """`jvp`, with forward's results and with none, and the tangent of backward."""
    made = problem(rng, D, dtype, sizes)
    tangents.passes(backend, made, *tangents.directions(made), known=rng.random() < 0.5)


def packed_batch(rng, D, dtype, sizes):
    return batch(features(rng, SCORES), dtype, sizes.packed(rng), D)


@kind
def packed(rng, D, dtype, sizes, backend):
    """Forward and backward."""
    packed_batch(rng, D, dtype, sizes).run(backend=backend)


@kind
def paged(rng, D, dtype, sizes, backend):
    given = in_pages(packed_batch(rng, D, dtype, sizes), rng.choice((1, 3, 16, 64)))
    fastattn.attention_packed(**given, backend=backend)


@kind
def selected(rng, D, dtype, sizes, backend):
    """Forward and backward of keys that each row selects, and an indexer's choice."""
    dims = sizes.dims(rng, D)
    size = rng.choice((1, 4, 16))
    heads, blocks = rng.choice((1, 5, 16, 33)), -(-dims.N // size)
    chosen = fastattn.lightning_index(
        torch.randn(dims.B, heads, dims.M, D, dtype=dtype),
        torch.randn(dims.B, blocks, D, dtype=dtype),
        torch.randn(dims.B, heads, dims.M),
        rng.randint(0, 20),
    )
    q = torch.randn(dims.B, dims.H, dims.M, D, dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(dims.B, dims.Hk, dims.N, width, dtype=dtype, requires_grad=True)
        for width in (D, dims.Dv)
    )
    given = dict(block=size, causal=rng.random() < 0.5, dropout_p=rng.choice((0.0, 0.2)), seed=1)
    out = fastattn.attention_selected(q, k, v, chosen, backend=backend, **given)
    out.backward(torch.randn_like(out))


@kind
def quantised(rng, D, dtype, sizes, backend):
    """Keys and values in eight bits and in four, in a row and in pages."""
    storage = rng.choice((*NAMES, "int4"))
    made = packed_batch(rng, -(-D // 32) * 32 if storage == "int4" else D, dtype, sizes)
    made.given, _ = kept(made, NAMES.get(storage, storage))
    given = in_pages(made, rng.choice((1, 5, 16))) if rng.random() < 0.5 else made.given
    with torch.no_grad():
        fastattn.attention_packed(**given, backend=backend)


@kind
def new_rows(rng, D, dtype, sizes, backend):
    """Rows that a cache quantises as it appends them, and reads."""
    heads, storage = rng.choice((1, 3)), rng.choice((None, "int4", *NAMES.values()))
    D = -(-D // 32) * 32 if storage == "int4" else D
    n, page_size = rng.randint(1, sizes.keys), rng.choice((None, 1, 7))
    capacity = dict(capacity=2 * sizes.keys, page_size=page_size)
    made = fastattn.KVCache(2, heads, D, **capacity, dtype=dtype, storage=storage)
    k, v = torch.randn(2, 2, heads, n, D).to(dtype)
    made.append(k, v)
    made.append(k[0].transpose(0, 1), v[0].transpose(0, 1), torch.tensor([0, n // 2, n]))
    with torch.no_grad():
        made.attention(k[:, :, -1:], backend=backend)


def cache(number):
    """A cache as a state machine."""
    cache_model.run(number, 40)


def of_fuzz():
    """The parts of `tests.fuzz` by name. Each takes a random generator."""
    from tests.fuzz.parts import PARTS

    return PARTS


def all_of(isas, dtypes=DTYPES, head_dims=HEAD_DIMS, kinds=None):
    """(kind, head dim, dtype, instruction set) of every call. Tiles compute no float64."""
    return [
        x
        for x in itertools.product(kinds or KINDS, head_dims, dtypes, isas)
        if not (x[2] == "float64" and x[3].startswith("amx_"))
    ]


def shuffled(calls, seed):
    found = list(calls)
    random.Random(seed).shuffle(found)
    return found


def make(call, seed, backend="cpu", sizes=SMALL):
    """Make a call of `all_of`: another one for each seed."""
    name, D, dtype, _ = call
    rng = random.Random(zlib.crc32(f"{call}:{seed}".encode()))
    KINDS[name](rng, D, DTYPES[dtype], sizes, backend)
