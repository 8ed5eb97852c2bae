"""Altered kernels: for the emulator by g++, and as PTX by nvcc. Only one head dim, in bfloat16, is
compiled, so that a fault is built in seconds; each content is built once, in build/faults.

Kernels of csrc/cuda/sm90 run as PTX alone. g++ compiles what launches them, without their bodies.
"""

import os
import re

from tests.gpu_emulation import emulator
from tests.gpu_emulation.emulator import Emulator
from tests.gpu_emulation.ptx import library
from tests.support import build_lock
from tests.support.checkout import ROOT

from . import table

FOLDER, SOURCES = ROOT / "build" / "faults", ROOT / "csrc"
SMALLEST = 32  # head dim; others are for slices that ask for them
FLAGS = [x for x in emulator.FLAGS if not x.startswith("-g")]
PASSES = sorted((SOURCES / "cuda/sm80").glob("*.cu"))
OF_SM80 = ("library", *(f"sm80/{x.stem}" for x in PASSES))
UNITS = (*OF_SM80, "sm90_absent")
OF_PASS = {
    "forward": ("forward",),
    "backward": ("forward", "backward"),
    "decode": ("decode",),
    "weights": ("forward", "weights", "weights_backward"),
}
HOPPER_DIM = 64
HOPPER_UNITS = tuple(f"sm90/{x}" for x in ("forward", "backward", "decode"))
HOPPER_FLAGS = (f"-DFA_CUDA_HAS_DIM(d)=((d)=={HOPPER_DIM})", "-DFA_WITHOUT_BODIES")
# What the host reads of sm90's headers.
OF_HOST = re.compile(r"\.h$|\.cu$|_launch\.cuh$|/schedule\.cuh$|/key_blocks\.cuh$")


def few_instances(dim):
    """A `Fault` that leaves csrc one head dim and bfloat16."""
    where = "cuda/sm80/instances.h"
    text = (SOURCES / where).read_text()
    dims = re.search(r"  const int64_t d = most.*?(?=\n\}\n)", text, re.S)[0]
    types = "return p.q.dtype == FA_BF16 ? use(ptx::BF16()) : use(ptx::F16());"
    edits = (
        table.Edit(where, dims, f"  return use(Dims<{dim}, {dim}>());"),
        table.Edit("cuda/kernel_choice.h", types, "return use(ptx::BF16());"),
    )
    return table.Fault("few instances", "", edits, "")


def few_hopper_instances():
    """A `Fault` that leaves the launches of sm90 one head dim, and bfloat16."""
    where = "cuda/sm90/instances.h"
    text = (SOURCES / where).read_text()
    dims = re.search(r"  const int64_t d = most.*?(?=\n\}\n)", text, re.S)[0]
    edit = table.Edit(where, dims, f"  return use(Dims<{HOPPER_DIM}, {HOPPER_DIM}>());")
    return table.Fault("few instances of sm90", "", (edit,), "")


def tree(dim, fault=None):
    """A folder with the sources of the kernels, altered."""
    files = [x for x in SOURCES.rglob("*.*h") if "cpu" not in x.parts]
    files += [SOURCES / f"cuda/{x}.cu" for x in (*UNITS, *HOPPER_UNITS)]
    texts = {str(x.relative_to(SOURCES)): x.read_text() for x in sorted(files)}
    for change in filter(None, (few_instances(dim), few_hopper_instances(), fault)):
        for where in {x.where for x in change.edits}:
            texts[where] = table.applied(change, where, texts[where])
    folder = FOLDER / build_lock.digest(texts)
    with build_lock.alone(f"faults-{folder.name}"):
        if not folder.exists():
            part = folder.with_suffix(f".{os.getpid()}")
            for where, text in texts.items():
                (part / where).parent.mkdir(parents=True, exist_ok=True)
                (part / where).write_text(text)
            part.rename(folder)
    return folder


def closure(path, known):
    """A source and all of our files that it includes, but for one that only the build writes."""
    if path not in known and path.exists():
        known.add(path)
        for name in re.findall(r'(?m)^#include "([^"]+)"', path.read_text()):
            closure((path.parent / name).resolve(), known)
    return known


def compiled(folder, unit, *flags):
    source = folder / "cuda" / f"{unit}.cu"
    command = [*emulator.compiler(), *FLAGS, *emulator.KERNEL_FLAGS, *flags]
    parts = sorted(emulator.EMULATOR.glob("*.h")) + sorted(closure(source, set()))
    target = FOLDER / f"{source.stem}-{library.digest(*command, *parts)}.o"
    return emulator.made(target, [*command, "-c", source])


class Altered(Emulator):
    """The small library of kernels, with a fault in the units of `passes`. Each instance is a
    separate library: PTX kernels that are added to one are in no other."""

    def __init__(self, name, dim, fault=None, passes=()):
        altered = {f"sm80/{x}" for one in passes for x in OF_PASS[one]} | {"library"}
        folders = {False: tree(SMALLEST), True: tree(dim, fault)}
        objects = [emulator.compiled(emulator.EMULATOR / f"{x}.cpp") for x in emulator.PARTS]
        # If several units have a function that none inlines, the linker takes the first.
        for wrong in (True, False):
            objects += [compiled(folders[wrong], x) for x in UNITS if (x in altered) == wrong]
        self.link(name, objects)

    def link(self, name, objects):
        path = FOLDER / f"{library.digest(name, *objects)}.so"
        self.load(emulator.made(path, [*emulator.compiler(), "-shared", "-s", *objects]))


class AlteredHopper(Altered):
    """The same with launches of sm90's kernels, with a fault in the code of the host."""

    def __init__(self, name, fault):
        of_host = any(OF_HOST.search(x.where) for x in fault.edits)
        plain, altered = tree(SMALLEST), tree(SMALLEST, fault if of_host else None)
        objects = [emulator.compiled(emulator.EMULATOR / f"{x}.cpp") for x in emulator.PARTS]
        objects += [compiled(plain, x) for x in OF_SM80]
        objects += [compiled(altered, x, *HOPPER_FLAGS) for x in HOPPER_UNITS]
        self.link(name, objects)
