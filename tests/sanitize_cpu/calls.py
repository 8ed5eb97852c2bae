"""The calls that are made under sanitizers: for every head dim from 1 to 130, every instruction set
and every dtype, a random call of each kind, with the arguments and properties that
tests/features/factors.py lists. A number determines the call.
"""

import itertools
import random
import zlib

import torch

import fastattn
from tests.features import factors
from tests.features.checking import MAKE
from tests.fuzz import draw
from tests.support import cache_model, tangents
from tests.support.cases import DTYPES

HEAD_DIMS = (*range(1, 131), 513, 576, 777, 1000)
OF_THREADS = HEAD_DIMS[::12]  # sizes of the calls that run under ThreadSanitizer, which is slow
MOST = 70  # rows or keys


def widths(rng, D):
    """D, and a width of values that is as often another one."""
    return D, rng.choice((D, rng.choice([x for x in HEAD_DIMS if x <= max(D, 130)])))


def call(form, rng, D, dtype, backend, **levels):
    """Make a call of this form, backward too if a result has a gradient."""
    D, Dv = widths(rng, D)
    if "stored" in factors.FORMS[form] and "stored" not in levels and rng.random() < 0.2:
        D, Dv = (-(-x // 32) * 32 for x in (D, Dv))  # blocks of four bits
        levels["stored"] = ("int4",)
    if D + Dv > 1024:  # with qv, a head has the columns of both
        levels["qv"] = ("no",)
    levels |= dict(dtype=(dtype,), D=(D,), Dv=(Dv,), widths=((D, Dv),))
    row = draw.row(rng, form, MOST, **factors.of_form(form, levels))
    MAKE[form](row).run(backend=backend)


def problem(rng, D, dtype, levels):
    D, Dv = widths(rng, D)
    levels = factors.of_form("dense", levels) | dict(D=(D,), Dv=(Dv,))
    return draw.problem(rng, DTYPES[dtype], MOST, far=False, **levels)


def weights(rng, D, dtype, backend, **levels):
    """Probabilities, their mean over heads, and the gradients of both."""
    made = problem(rng, D, dtype, levels)
    given = {x: y for x, y in made.tensors().items() if x not in ("v", "return_lse")}
    leaves = [x for x in made.needs_grad if x != "v"]
    given |= {x: given[x].detach().requires_grad_() for x in leaves}
    found = fastattn.attention_weights(**given, average_heads=rng.random() < 0.5, backend=backend)
    torch.autograd.grad(found, [given[x] for x in leaves], torch.randn_like(found))


def derivatives(rng, D, dtype, backend, **levels):
    """`jvp`, with forward's results and with none, and the tangent of backward."""
    made = problem(rng, D, dtype, levels)
    tangents.passes(backend, made, *tangents.directions(made), known=rng.random() < 0.5)


def indexer(rng, D, dtype, backend, **levels):
    """An indexer's choice of keys."""
    B, H, M, N = (
        rng.randint(1, 2),
        rng.choice((1, 5, 16, 33)),
        rng.randint(1, 9),
        rng.randint(0, MOST),
    )
    wide, dtype = torch.randn(B, H, M), DTYPES[dtype]
    q, k = torch.randn(B, H, M, D, dtype=dtype), torch.randn(B, N, D, dtype=dtype)
    fastattn.lightning_index(q, k, wide, rng.randint(0, 20), causal=rng.random() < 0.5)


KINDS = {form: lambda *x, form=form, **levels: call(form, *x, **levels) for form in factors.FORMS}
KINDS |= dict(weights=weights, derivatives=derivatives, indexer=indexer)


def cache(number):
    """A cache as a state machine."""
    cache_model.run(number, 40)


def of_fuzz():
    """The parts of `tests.fuzz` by name. Each takes a random generator."""
    from tests.fuzz.parts import PARTS

    return PARTS


def all_of(isas, dtypes=DTYPES, head_dims=HEAD_DIMS, kinds=KINDS):
    """(kind, head dim, dtype, instruction set) of every call. Tiles compute no float64."""
    return [
        x
        for x in itertools.product(kinds, head_dims, dtypes, isas)
        if not (x[2] == "float64" and x[3].startswith("amx_"))
    ]


def shuffled(calls, seed):
    found = list(calls)
    random.Random(seed).shuffle(found)
    return found


def make(call, seed, backend="cpu", **levels):
    """Make a call of `all_of`: another one for each seed. levels: of factors, if not all."""
    name, D, dtype, _ = call
    rng = random.Random(zlib.crc32(f"{call}:{seed}".encode()))
    KINDS[name](rng, D, dtype, backend, **levels)
