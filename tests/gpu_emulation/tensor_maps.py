"""Tensor maps that the emulator's driver encodes. The library must contain emu/hopper.cu."""

import ctypes

import numpy as np

from tests.gpu_emulation.emulator import EMULATOR, Emulator, aligned

SOURCE = EMULATOR / "hopper.cu"
BYTES, ALIGN = 128, 64  # of a map
# Of cuda.h.
UINT8, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = 0, 6, 7, 8, 9
TYPES = {1: UINT8, 2: BFLOAT16, 4: FLOAT32, 8: FLOAT64}  # {bytes of an element: a type}


def with_driver(**options):
    return Emulator(SOURCE, **options)


def numbers(given, kind):
    """An array, or none where there is a null pointer."""
    return None if given is None else np.ascontiguousarray(given, kind)


def encode(
    emulator,
    address,
    dims,
    strides,
    box,
    type=BFLOAT16,
    rank=None,
    element_strides=None,
    interleave=0,
    swizzle=0,
    promotion=0,
    fill=0,
    map_at=0,
):
    """(the driver's code, the bytes of the map). None for an array passes a null pointer, and
    `map_at` None one for the map; else the map is so many bytes after a multiple of 64."""
    rank = len(dims) if rank is None else rank
    element_strides = [1] * 5 if element_strides is None else element_strides
    arrays = [numbers(dims, np.uint64), numbers(strides, np.uint64), numbers(box, np.uint32)]
    arrays += [numbers(element_strides or None, np.uint32)]
    memory = aligned(BYTES + ALIGN, np.uint8, 2 * ALIGN)
    code, found = emulator.call(
        "encode_map",
        None if map_at is None else ctypes.c_void_p(memory.ctypes.data + map_at),
        type,
        rank,
        ctypes.c_void_p(address),
        *(None if x is None else x.ctypes.data_as(ctypes.c_void_p) for x in arrays),
        *(interleave, swizzle, promotion, fill),
    )
    found.none()
    return code, bytes(memory[map_at or 0 :][:BYTES])


def of_tensor(emulator, tensor, **other):
    """The map of a tensor with dims, strides, box and swizzle, of elements of `size` bytes."""
    fields = {x: getattr(tensor, x) for x in ("dims", "strides", "box", "swizzle")}
    fields |= dict(address=tensor.memory.ctypes.data, type=TYPES[tensor.size])
    code, map = encode(emulator, **fields | other)
    assert code == 0
    return map
