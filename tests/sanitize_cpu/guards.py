"""Tensors between guard pages, and backends that pass such tensors to their kernels.

A sanitizer sees the accesses of code that it compiled. It does not see masked loads and stores, the
instructions of tiles in inline assembly, or what torch allocated. A guard page stops all of these.
"""

import ctypes
import mmap
from contextlib import ExitStack, contextmanager

import torch

from fastattn.backends.native.cpu import Cpu
from fastattn.backends.native.launcher import convert

PAGE = mmap.PAGESIZE
NO_ACCESS, READ_AND_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
FIRST, LAST = "first", "last"  # the data begins right after a guard page, or ends right before one
PLACES = (FIRST, LAST)

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@contextmanager
def guarded(size, place):
    """The address of so many bytes between two guard pages."""
    inside = -(-size // PAGE) * PAGE
    begin = libc.mmap(None, inside + 2 * PAGE, NO_ACCESS, ANONYMOUS, -1, 0)
    if begin == ctypes.c_void_p(-1).value or libc.mprotect(begin + PAGE, inside, READ_AND_WRITE):
        raise OSError(ctypes.get_errno(), "no memory between guard pages")
    try:
        yield begin + PAGE + (inside - size if place == LAST else 0)
    finally:
        libc.munmap(begin, inside + 2 * PAGE)


def extent(x):
    """The bytes from a tensor's first element to its last, that one included."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def at(address, size, like):
    """A tensor in existing memory, with the layout of `like`."""
    raw = (ctypes.c_char * size).from_address(address)
    storage = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())


@contextmanager
def moved(tensors, place):
    """Copies of tensors (or None), each between guard pages; afterwards they are copied back. A
    tensor that occurs several times has one copy."""
    with ExitStack() as stack:
        copies, known = [], {}
        for x in tensors:
            if x is None or x.numel() == 0:  # there is no byte to guard
                copies.append(x)
                continue
            key = x.data_ptr(), tuple(x.shape), x.stride()
            if key not in known:
                size = extent(x)
                address = stack.enter_context(guarded(size, place))
                ctypes.memmove(address, x.data_ptr(), size)
                known[key] = address, size
            copies.append(at(*known[key], x))
        yield copies
        for (target, *_), (address, size) in known.items():
            ctypes.memmove(target, address, size)


class Guarded:
    """A mixin of a `Launcher`: its kernels get all tensors between guard pages, data at `place`. A
    kernel that writes to an argument is an error."""

    place = LAST
    launches = 0

    def _launch(self, which, like, t, after):
        t = convert(like.spec, t) if like.spec.given else t
        with moved((*t, *after), self.place) as copies:
            given = [x for x in copies[: len(t)] if x is not None and x.numel()]
            before = [contents(x) for x in given]
            super()._launch(which, like, type(t)(*copies[: len(t)]), tuple(copies[len(t) :]))
            assert before == [contents(x) for x in given], "a kernel wrote to an argument"
        Guarded.launches += 1


def contents(x):
    return ctypes.string_at(x.data_ptr(), extent(x))


class GuardedCpu(Guarded, Cpu):
    """Takes the place of the CPU backend when it is registered."""
