"""The CUDA library with functions that return numbers in place of its kernels. Those of sm_90
decline what a test wants them to."""

import ctypes
import functools

from fastattn.backends.native import libraries
from tests.gpu_emulation.emulator import EMULATOR, KERNELS, Emulator

PASSES = range(4)


@functools.cache
def library():
    """library.cu with the functions of emu/kernel_classes.cu."""
    built = Emulator(KERNELS / "library.cu", EMULATOR / "kernel_classes.cu")
    return libraries.CudaLibrary(built.path)


def decline(why, passes=PASSES):
    """Let sm_90's kernels decline these passes with a reason; b"" for none."""
    entry = library().entry("classes_decline", None, ctypes.c_int64, ctypes.c_char_p)
    for each in passes:
        entry(each, why)


def seen():
    """The FaParams that sm_90's kernels were asked about last."""
    at = library().entry("classes_seen", ctypes.c_void_p)()
    return ctypes.string_at(at, libraries.PARAMS_SIZE)
