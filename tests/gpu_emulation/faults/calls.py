"""The smallest calls that detect a fault, by name: a shape, then features of cases.py, joined by +.
`sm90 ` before it: the kernels of csrc/cuda/sm90, as nvcc compiles them.

A call yields complaints about its results; findings of the emulator and refusals are raised.
"""

import functools
import re
from contextlib import contextmanager

import pytest
import torch

import fastattn
from tests.gpu_emulation import emulated, runtime
from tests.gpu_emulation.emulated import everywhere
from tests.gpu_emulation.ptx import ours
from tests.semantics.test_weights import about_weights
from tests.support.cases import FEATURE, Dims, build, with_nan_behind
from tests.support.error_budget import Verdict

from . import builds, table

NO_FAULT = table.Fault("no fault", "", (), "")
MANY = 8  # multiprocessors: decode splits its keys
# A missing synchronisation of sm90's kernels shows in some order of warps, or with copies that are
# done early or late. Few blocks take all tasks, one after the other; many split keys.
ORDERS = tuple(dict(schedule=x, lazy=x < 3) for x in (1, 2, 3))
# Name: the pass that it runs, and the sizes.
SHAPES = {
    "forward": ("forward", Dims(1, 2, 1, 70, 150, 24, 24)),
    "backward": ("backward", Dims(1, 2, 1, 70, 150, 24, 24)),
    "many blocks of keys": ("backward", Dims(1, 1, 1, 20, 1100, 24, 24)),
    "decode": ("decode", Dims(2, 4, 2, 3, 300, 24, 24)),
    "many tiles": ("decode", Dims(2, 4, 2, 3, 700, 24, 24)),
    "many rows": ("decode", Dims(1, 10, 2, 4, 300, 24, 24)),  # 20 rows in a tile of 64
    "mean weights": ("weights", Dims(1, 4, 2, 150, 70, 24, 24)),
    "dense mask": ("forward", Dims(2, 2, 1, 150, 333, 24, 24)),
    "dense mask gradients": ("backward", Dims(2, 2, 1, 150, 450, 24, 24)),
    # Of sm90: tiles of 192 rows and 128 keys in forward, 128 keys and 64 or 128 rows in backward.
    "several tiles": ("forward", Dims(1, 2, 1, 200, 570, 64, 64)),
    "several blocks of keys": ("backward", Dims(1, 2, 1, 300, 300, 64, 64)),
    "blocks of keys in any order": ("backward", Dims(1, 2, 1, 300, 300, 64, 64)),
    "blocks of two heads": ("backward", Dims(1, 2, 2, 70, 150, 64, 64)),
    "several splits": ("decode", Dims(2, 8, 2, 5, 700, 64, 64)),
    "nan behind lengths": ("forward", Dims(2, 2, 1, 70, 300, 64, 64)),
}


def parts(name):
    """(of sm90?, shape, features)"""
    hopper, shape, features = re.fullmatch(r"(sm90 )?([^+]*)(.*)", name).groups()
    return bool(hopper), shape, [FEATURE[x] for x in features.split("+")[1:]]


def judged(name):
    """Complaints about a shape with features."""
    _, shape, features = parts(name)
    kind, dims = SHAPES[shape]
    problem = build(dims, features, torch.bfloat16)
    if kind == "weights":
        return about_weights(None, problem, True)
    if shape == "nan behind lengths":
        return nan_behind_lengths(problem)
    if shape.startswith("dense mask"):
        problem.kwargs["mask"] = blocks(dims.N)
    given = dict(deterministic="any order" not in shape)
    return Verdict(problem, backward=kind == "backward").complaints(fastattn.attention, **given)


def blocks(n):
    """A mask in which heads and items see different blocks, adjacent or far away, and one more at
    the end. The last rows see nothing."""
    i, j = torch.arange(150)[:, None], torch.arange(n)
    first = torch.tensor([0, 128, 0, 256]).view(2, 2, 1, 1)
    end = (j > n - 50) & (i >= 70)
    return ((j >= first) & (j < first + 128) & (i // 64 * 9 <= j - first) | end) & (i < 128)


def nan_behind_lengths(problem):
    """NaN behind the lengths of keys changes no bit."""
    lengths = torch.tensor([201, 17])
    given = problem, with_nan_behind(problem, lengths)
    right, found = (fastattn.attention(x.q, x.k, x.v, key_lengths=lengths) for x in given)
    return [] if torch.equal(right, found) else ["other bits"]


def complaints(name):
    """A call's complaints about the kernels in use."""
    hopper, shape, _ = parts(name)
    count = MANY if SHAPES[shape][0] == "decode" else int(hopper)
    if not hopper:
        with everywhere(sm_count=count):
            return list(judged(name))
    for order in ORDERS:
        with everywhere(architecture=90, ptx=True, sm_count=count, **order) as backend:
            found = list(judged(name))
        assert {x.partition(":")[0] for x in backend.kernels} == {"sm_90"}, backend.kernels
        if found:
            return found
    return []


def detect(fault, name=None):
    """The complaints of a call about the fault, as text, "" if it has none. A fault that does not
    compile raises AssertionError."""
    name = name or fault.seen_by
    with altered(fault, name):
        try:
            return "\n".join(complaints(name))
        except (AssertionError, RuntimeError) as caught:
            if re.search("findings: |fa_cuda_run returns|CUDA error", str(caught)):
                return str(caught)
            raise


@contextmanager
def altered(fault, name):
    """Inside, the kernels are built from altered sources. g++ compiles the host's code of sm90's
    kernels, and nvcc the kernels."""
    hopper, shape, _ = parts(name)
    with pytest.MonkeyPatch.context() as patch:
        # The edits are part of the name: PTX kernels that were added to a library stay there.
        if hopper:
            made, of_source = builds.AlteredHopper(f"{name} {fault}", fault), ours.ptx
            kernels = builds.tree(builds.SMALLEST, fault) / "cuda"
            patch.setattr(ours, "ptx", lambda *names: of_source(*names, kernels=kernels))
        else:
            passes = (SHAPES[shape][0],)
            made = builds.Altered(f"{name} {fault}", builds.SMALLEST, fault, passes)
        for module in (emulated, runtime):
            patch.setattr(module, "emulator", lambda *which: made)
        for cached in ("executor", "binary"):
            again = functools.cache(getattr(emulated, cached).__wrapped__)
            patch.setattr(emulated, cached, again)
        yield
