"""The smallest calls that detect a fault, by name: a shape, then features of cases.py, joined by +.
Prefixes: `ptx `, nvcc's kernels as compiled; `sm90 `, those of csrc/cuda/sm90; `triton `, Triton's.

A slice yields its complaints about the kernels in use; findings and refusals are raised. More
slices are in dense_masks.py, hopper.py and launches.py.
"""

import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.backends.triton import tile_configs
from tests.cuda.test_cuda_emulated import shifted, with_heads_apart, with_wide_rows
from tests.cuda.test_cuda_scale import far
from tests.gpu_emulation.emulated import everywhere
from tests.gpu_emulation.ptx import triton
from tests.semantics import test_packed, test_paged
from tests.semantics.test_weights import about_weights
from tests.support import large_logits
from tests.support import vmap_dropout as folded_calls
from tests.support.cases import FEATURE, Dims, build, negative_logits
from tests.support.edge_cases import inside_nan
from tests.support.error_budget import Verdict

from . import builds

MANY = 8  # multiprocessors: decode splits its keys
TILE = tile_configs.Config(32, 32, 4, 2)  # of Triton's kernels

# Name: the pass that it runs, and the sizes.
SHAPES = {
    "forward": ("forward", Dims(1, 2, 1, 70, 150, 24, 24)),
    "grouped": ("forward", Dims(2, 4, 2, 37, 67, 24, 24)),
    "full columns": ("forward", Dims(1, 2, 1, 70, 150, 32, 32)),
    "wide": ("forward", Dims(1, 1, 1, 70, 70, 256, 256)),
    "backward": ("backward", Dims(1, 2, 1, 70, 150, 24, 24)),
    "as many rows": ("backward", Dims(1, 1, 1, 150, 150, 24, 24)),
    "few rows": ("backward", Dims(1, 1, 1, 35, 37, 24, 24)),
    "many blocks of keys": ("backward", Dims(1, 1, 1, 20, 1100, 24, 24)),
    "full gradients": ("backward", Dims(1, 2, 1, 70, 150, 32, 32)),
    "decode": ("decode", Dims(2, 4, 2, 3, 300, 24, 24)),
    "many tiles": ("decode", Dims(2, 4, 2, 3, 700, 24, 24)),
    "many rows": ("decode", Dims(1, 10, 2, 4, 300, 24, 24)),  # 20 rows in a tile of 64
    "weights": ("weights", Dims(1, 2, 1, 70, 150, 24, 24)),
    "mean weights": ("weights", Dims(1, 4, 2, 150, 70, 24, 24)),
    # Of sm90: tiles of 128 rows and 192 keys in forward, 128 keys and 96 or 128 rows in backward.
    "several tiles": ("forward", Dims(1, 2, 1, 200, 570, 64, 64)),
    "one tile": ("forward", Dims(1, 1, 1, 90, 150, 64, 64)),
    "several blocks of keys": ("backward", Dims(1, 2, 1, 300, 300, 64, 64)),
    "more rows than keys": ("backward", Dims(1, 1, 1, 300, 100, 64, 64)),
    "several splits": ("decode", Dims(2, 8, 2, 5, 700, 64, 64)),
    "one split": ("decode", Dims(1, 4, 2, 3, 150, 64, 64)),
}
DIM = {"wide": 256}  # of the kernels, where it is not the smallest


def parts(name):
    """(engine, shape, features)"""
    engine, shape, features = re.fullmatch(r"(?:(ptx|sm90|triton) )?([^+]*)(.*)", name).groups()
    return engine or "", shape, [FEATURE[x] for x in features.split("+")[1:]]


def dim_of(name):
    return DIM.get(parts(name)[1], builds.SMALLEST)


def passes(name):
    """Which of the library's passes the slice runs."""
    shape = parts(name)[1]
    return (SHAPES[shape][0],) if shape in SHAPES else OTHERS[shape].passes


def problem_of(name):
    _, shape, features = parts(name)
    return build(SHAPES[shape][1], features, torch.bfloat16)


def judged(name):
    """Complaints about a shape with features."""
    kind = SHAPES[parts(name)[1]][0]
    problem = problem_of(name)
    if kind == "weights":
        return about_weights(None, problem, name.startswith("mean"))
    return Verdict(problem, backward=kind == "backward").complaints(fastattn.attention)


# -- others ----------------------------------------------------------------------------------------


def named(*passes, **more):
    def add(function):
        vars(function).update(passes=passes, **more)
        OTHERS[function.__name__.replace("_", " ")] = function
        return function

    return add


OTHERS = {}


@named("forward")
def between_nan():
    """In memory NaN precedes and follows the keys of a head."""
    problem = build(Dims(1, 2, 1, 70, 75, 24, 24), (), torch.bfloat16)
    problem = replace(problem, k=inside_nan(problem.k), v=inside_nan(problem.v))
    return Verdict(problem, backward=False).complaints(fastattn.attention)


@named("forward")
def cut_off():
    """Rounding errs to both sides: a mean of positive values is off by less than with
    truncation."""
    problem = problem_of("forward")
    problem.v.abs_()
    exact = problem.to(torch.float64).run(fastattn.reference.attention, backward=False)["out"]
    found = problem.run(fastattn.attention, backward=False)["out"].double()
    off = float((found - exact).mean() / exact.mean())
    return [f"the mean is off by {off:.1e}"] if abs(off) > 2.0**-12 else []


@named("forward")
def no_conflicts():
    """No access to shared memory has bank conflicts."""
    with everywhere(banks=True) as backend:
        problem_of("forward").run(fastattn.attention, backward=False)
    (found,) = backend.findings
    return [f"{what}: {x} conflicts" for what, (_, x) in found.banks.items() if x]


def moved(shape, ways):
    """Another layout of a key or a query in memory changes no bit."""
    problem = problem_of(shape)
    right = problem.run(fastattn.attention, backward=False)["out"]
    for way in ways:
        for what in "qk":
            other = replace(problem, **{what: way(getattr(problem, what))})
            if not torch.equal(other.run(fastattn.attention, backward=False)["out"], right):
                yield f"{what}, {way.__name__}: other bits"


@named("forward")
def not_aligned():
    return moved("forward", (shifted, with_wide_rows, with_heads_apart))


@named("decode")
def not_aligned_in_decoding():
    return moved("decode", (shifted, with_wide_rows, with_heads_apart))


@named("forward")
def rows_far_apart():
    """More elements apart than 32 bits can count."""
    near = build(Dims(1, 1, 1, 70, 67, 24, 24), (), torch.bfloat16)
    spread = replace(near, k=far(near.k, 2))
    found, right = (x.run(fastattn.attention, backward=False)["out"] for x in (spread, near))
    return [] if torch.equal(found, right) else ["other bits"]


@named("backward", "weights")
def far_from_zero():
    return large_logits.complaints(large_logits.far_logits(torch.bfloat16, M=37, N=70))


@named("forward")
def nothing_seen():
    """Some rows of a tile see nothing, in a plain kernel."""
    problem = build(Dims(1, 1, 1, 100, 70, 24, 24), [FEATURE["bottom_right"]], torch.bfloat16)
    return Verdict(problem, backward=False).complaints(fastattn.attention)


@named("forward")
def a_key_short_of_a_tile():
    """Logits are negative, so a zero key past the end would take a row's weight."""
    problem = build(Dims(1, 1, 1, 70, 127, 32, 32), (), torch.bfloat16)
    return Verdict(negative_logits(problem), backward=False).complaints(fastattn.attention)


@named("backward")
def hidden_nan():
    """A key of NaN that a bool mask hides changes no bit, under a softcap, except of dq, which sums
    zeros times the keys."""
    problem = build(Dims(1, 2, 1, 40, 70, 24, 24), [FEATURE["softcap"]], torch.bfloat16)
    hidden = torch.arange(70) % 3 == 1
    problem.kwargs["mask"] = ~hidden
    right = problem.run(fastattn.attention)
    problem.k[:, :, hidden, 0] = torch.nan
    found = problem.run(fastattn.attention)
    names = [x for x in right if x != "dq" and not torch.equal(found[x], right[x])]
    return [f"{name}: other bits" for name in names]


def with_softcap(cap, size):
    problem = problem_of("forward")
    problem.q.mul_(size)
    problem.kwargs["softcap"] = cap
    return Verdict(problem, backward=False).complaints(fastattn.attention)


@named("forward")
def weak_cap():
    """A cap far above the scores: cancellation in 1 - 2 / (1 + e^2x) costs more than the scores."""
    return with_softcap(1e6, 1.0)


@named("forward")
def softcap_of_large_logits():
    return with_softcap(65.0, 50.0)


@named("forward")
def masks_at_odd_elements():
    problem = problem_of("forward+float_mask")
    problem.kwargs["mask"] = shifted(problem.kwargs["mask"])
    return Verdict(problem, backward=False).complaints(fastattn.attention)


@named("forward")
def mask_two_keys_short():
    """Two keys short of a whole tile."""
    problem = build(Dims(1, 2, 1, 70, 126, 24, 24), [FEATURE["float_mask"]], torch.bfloat16)
    return Verdict(problem, backward=False).complaints(fastattn.attention)


@named("forward")
def largest_scores():
    """Scores of 100 at one key, another one in each item: relative to a lower maximum they
    overflow."""
    problem = build(Dims(8, 1, 1, 40, 70, 32, 32), (), torch.bfloat16)
    problem.q[:] = 2
    problem.k[:] *= 0.1
    for key in range(8):
        problem.k[key, :, key] = 16
    return Verdict(problem, backward=False).complaints(fastattn.attention)


def with_strong_sinks(name):
    """The sinks take most of each row."""
    problem = problem_of(name)
    problem.kwargs["sinks"] = problem.kwargs["sinks"] + 6
    return Verdict(problem, backward=False).complaints(fastattn.attention)


@named("decode")
def sinks_above_all():
    return with_strong_sinks("decode+sinks")


@named("forward", "backward")
def folded():
    """Examples that vmap folds into one call."""
    passes = ("forward", "backward")
    return folded_calls.complaints(None, torch.bfloat16, ["items heads"], passes)


@named("forward")
def odd_columns():
    problem = build(Dims(1, 2, 1, 21, 37, 17, 17), (), torch.bfloat16)
    return Verdict(problem, backward=False).complaints(fastattn.attention)


@named("backward")
def two_items_with_sinks():
    problem = build(Dims(2, 2, 1, 70, 67, 24, 24), [FEATURE["sinks"]], torch.bfloat16)
    return Verdict(problem).complaints(fastattn.attention)


@named("forward")
def packed():
    """Sequences that begin and end inside of tiles."""
    made = test_packed.batch((), torch.bfloat16, ((37, 41), (0, 3), (40, 64), (5, 9)), 32)
    return test_packed.complaints(made, made.run(backward=False))


@named("forward")
def packed_decode():
    """The longest is the last: a fault that uses its length for all does not write past the end."""
    made = test_packed.batch((), torch.bfloat16, ((1, 141), (2, 0), (3, 170)), 32)
    return test_packed.complaints(made, made.run(backward=False))


def in_pages(page):
    """The first page is of NaN."""
    made = test_packed.batch((), torch.bfloat16, ((37, 41), (0, 3), (40, 70), (5, 9)), 32)
    given = test_paged.in_pages(made, page)
    for x in "kv":
        given[x] = torch.cat([torch.full_like(given[x][:1], torch.nan), given[x]])
    given["block_table"] += 1
    return test_packed.complaints(made, dict(out=fastattn.attention_packed(**given)))


@named("forward")
def pages_of_20():
    """Their rows are gathered."""
    return in_pages(20)


@named("forward")
def pages_of_64():
    """Two tiles each."""
    return in_pages(64)


@named("decode")
def packed_splits():
    made = test_packed.batch((), torch.bfloat16, ((1, 341), (2, 0), (3, 570)), 32)
    return test_packed.complaints(made, made.run(backward=False))


@named("backward")
def packed_backward():
    made = test_packed.batch([FEATURE["sinks"]], torch.bfloat16, ((37, 41), (0, 3), (5, 9)), 32)
    return test_packed.complaints(made, made.run())


# -- where they run --------------------------------------------------------------------------------


# A missing synchronisation of sm90's kernels shows in some order of warps, or with copies that are
# done early or late. Few blocks take all tasks, one after the other; many split keys.
ORDERS = tuple(dict(schedule=x, lazy=x < 3) for x in (1, 2, 3))


@contextmanager
def backend_of(name, **options):
    """Inside, every call runs the kernels that the slice is for."""
    engine, shape, _ = parts(name)
    if engine == "triton":
        with triton.compiled() as found, pytest.MonkeyPatch.context() as patch:
            patch.setattr(tile_configs, "config", lambda *about: TILE)
            yield found
    elif engine == "sm90":
        with everywhere(architecture=90, ptx=True, **options) as found:
            yield found
        classes = {x.partition(":")[0] for x in found.kernels}
        expected = {"sm_90", "sm_80"} if hasattr(OTHERS.get(shape), "others") else {"sm_90"}
        assert classes == expected, f"{name} runs on {found.kernels}"
    elif getattr(OTHERS.get(shape), "launches", False):
        yield None  # it makes its own runtime
    else:
        few_rows = MANY * ("decode" in passes(name))
        with everywhere(sm_count=few_rows, ptx=engine == "ptx") as found:
            yield found


def complaints(name):
    """A slice's complaints about the kernels in use."""
    engine, shape, _ = parts(name)
    chip = dict(sm_count=MANY if "decode" in passes(name) else 1)
    for options in [chip | x for x in ORDERS] if engine == "sm90" else [{}]:
        with backend_of(name, **options):
            if found := list(judged(name) if shape in SHAPES else OTHERS[shape]()):
                return found
    return []
