"""Which class of CUDA kernels runs a pass: those of sm_90 on compute capability 9.0 alone, unless
they decline; else those of sm_80. In place of the kernels are functions that return numbers."""

import ctypes
import dataclasses
import struct

import pytest
import torch

from fastattn.backends.native import libraries
from fastattn.call.spec import AttentionSpec
from tests.gpu_emulation import kernel_classes
from tests.gpu_emulation.emulated import binary
from tests.gpu_emulation.emulator import needs_emulator

pytestmark = needs_emulator
MANY = 2  # multiprocessors
OTHERS = (0, 75, 80, 86, 89, 91, 100, 103, 110, 120, 121)  # architectures, 0 of a CPU
SPEC = AttentionSpec(
    B=1, H=2, Hk=2, M=40, N=40, D=8, Dv=8, dtype=torch.float16, device="cuda", scale=1.0
)
FEW = dataclasses.replace(SPEC, M=3)
PASSES = {  # (spec, pass): what its kernels of sm_80 and of sm_90 return, and their workspaces
    (SPEC, libraries.FORWARD): (8000, 9000 + MANY, 8001, 9001),
    (FEW, libraries.FORWARD): (8010 + MANY, 9000 + MANY, 8011, 9001),
    (SPEC, libraries.BACKWARD): (8020, 9020 + MANY, 8021, 9021),
    (SPEC, libraries.WEIGHTS): (8030, 8030, 0, 0),
    (SPEC, libraries.WEIGHTS_BACKWARD): (8040, 8040, 8041, 8041),
}
every_pass = pytest.mark.parametrize("spec, which", PASSES)


@pytest.fixture(scope="module")
def library():
    return kernel_classes.library()


@pytest.fixture
def decline(library):
    """A function that sets the reason of sm_90's kernels to decline, b"" for none."""
    yield lambda why: kernel_classes.decline(why)
    kernel_classes.decline(b"")


def results(library, spec, which, architecture):
    """The code of a run, and the bytes of its workspace."""
    params = libraries.form(spec)
    code = library.run(params, which, 0, MANY, architecture, None)
    return code, library.workspace(params, which, MANY, architecture)


@every_pass
def test_a_chip_of_9_0_gets_the_kernels_of_sm_90(spec, which, library, decline):
    old, new, _, new_bytes = PASSES[spec, which]
    served = new != old
    decline(b"")
    assert results(library, spec, which, 90) == (new, new_bytes)
    name = library.kernels(libraries.form(spec), which, 90).decode()
    assert name == "sm_90" if served else name.startswith("sm_80: the weights have no kernel")


@every_pass
@pytest.mark.parametrize("architecture", OTHERS)
def test_other_chips_get_those_of_sm_80(architecture, spec, which, library, decline):
    old, _, old_bytes, _ = PASSES[spec, which]
    decline(b"")
    assert results(library, spec, which, architecture) == (old, old_bytes)
    assert library.kernels(libraries.form(spec), which, architecture) == b"sm_80"


@every_pass
def test_what_they_decline_runs_on_those_of_sm_80(spec, which, library, decline):
    old, _, old_bytes, _ = PASSES[spec, which]
    why = "head dim 320 is over 256"
    decline(why.encode())
    assert results(library, spec, which, 90) == (old, old_bytes)
    name = library.kernels(libraries.form(spec), which, 90).decode()
    assert name == f"sm_80: {why}" or "weights" in name


def test_a_long_reason_is_cut(library, decline):
    why = b"x" * 1000
    decline(why)
    name = library.kernels(libraries.form(SPEC), libraries.FORWARD, 90)
    assert 200 < len(name) < 1000 and (b"sm_80: " + why).startswith(name)


def test_row_invariant_calls_have_one_class(library, decline):
    """Which class serves depends on addresses, and the classes differ in bits."""
    decline(b"")
    for spec in (SPEC, FEW):
        invariant = dataclasses.replace(spec, row_invariant=True)
        for which in (libraries.FORWARD, libraries.BACKWARD):
            assert results(library, invariant, which, 90)[0] // 1000 == 8
            name = library.kernels(libraries.form(invariant), which, 90).decode()
            assert name.startswith("sm_80: row_invariant")


def test_sizes_of_packed_batches_are_clamped_first(library, decline):
    """The kernels of both classes get the rows that there are, not the most that may be."""
    decline(b"")
    packed = dataclasses.replace(SPEC, M=1 << 20, T=11)
    params = bytearray(libraries.form(packed))
    libraries.POINTER.pack_into(params, libraries.offset("cu_q"), 64)
    library.kernels(bytes(params), libraries.FORWARD, 90)
    (seen,) = struct.unpack_from("=q", kernel_classes.seen(), libraries.offset("M"))
    assert seen == 11


def test_the_class_that_runs_a_call_says_how_it_splits(library, decline):
    integer = ctypes.c_int64
    splits = library.entry("fa_cuda_splits", integer, ctypes.c_char_p, integer, integer)
    decline(b"")
    few = libraries.form(FEW)
    assert [splits(few, MANY, chip) for chip in (80, 90, 120)] == [7, 9, 7]
    decline(b"any")
    assert splits(few, MANY, 90) == 7


@pytest.mark.parametrize("which", [libraries.FORWARD, libraries.BACKWARD])
def test_a_library_without_kernels_of_sm_90_says_so(which):
    name = binary().kernels(libraries.form(SPEC), which, 90).decode()
    assert name == "sm_80: no kernel of this class is built"
