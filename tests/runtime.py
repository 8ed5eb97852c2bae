"""CUDA's runtime as the emulator has it (tests/emu/runtime.cpp): two devices with memory of their
own, streams, graphs, and calls that fail when they are told to."""

import ctypes
import weakref
from contextlib import contextmanager

import pytest
import torch
from emulated import emulator
from runners import every_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fastattn import native
from fastattn.backends import cuda

TEXT_BYTES = 1 << 16


class Runtime:
    """As new; one at a time. With `at_once` false work waits in its stream until `finish`, and
    memory that Python gives up is spoiled in the stream's order. `apart`, a kernel's parameters may
    point nowhere but to memory of its device. `wide`, it has the kernels of wide heads."""

    spoilers = ()  # of the one there is

    def __init__(self, at_once=True, apart=True, wide=False):
        for x in Runtime.spoilers:  # streams and memory of the last one are gone
            x.detach()
        self.emulator, self.at_once, self.apart = emulator(wide), at_once, apart
        self.library = self.emulator.library
        self.library.emu_allocate.restype = self.library.emu_stream.restype = ctypes.c_void_p
        self.library.emu_captured.restype = ctypes.c_long
        self.library.emu_runtime_reset()
        self.spoilers = Runtime.spoilers = []

    def stream(self, device=0):
        return self.library.emu_stream(device)

    def finish(self, *streams):
        """Run what waits in these streams, a kernel of each in turn."""
        left = [ctypes.c_void_p(x) for x in streams]
        while left:
            ran = [(x, *self.emulator.call("emu_run_waiting", x, 1)) for x in left]
            for _, _, found in ran:
                found.none()
            left = [x for x, waiting, _ in ran if waiting]

    @contextmanager
    def recording(self, stream):
        """Launches on the stream go to a graph: a list, whose one element is its number."""
        self.library.emu_capture(ctypes.c_void_p(stream))
        graph = []
        try:
            yield graph
        finally:
            graph.append(self.library.emu_captured(ctypes.c_void_p(stream)))

    def replay(self, graph):
        self.emulator.run("emu_replay", ctypes.c_long(*graph)).none()

    def fail(self, calls, code):
        """The call after so many more returns this code."""
        self.library.emu_runtime_fail(ctypes.c_long(calls), code)

    def driver(self, version, binary=80):
        """It knows CUDA up to this version, say 12040, and runs code of this architecture."""
        self.library.emu_runtime_driver(version, binary)

    def log(self):
        """What was called since the start."""
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self.library.emu_runtime_log(text, ctypes.c_size_t(TEXT_BYTES))
        return text.value.decode().splitlines()

    def launches(self):
        """(device, number of the stream, kernel) of each."""
        lines = [x.split() for x in self.log() if x.startswith("launch")]
        return [(int(x[3]), x[5], x[6]) for x in lines]

    def memory(self, like, device, stream=0):
        """A copy of a tensor's storage on a device, and the tensor in it: strides, offset and all.
        The memory is another's when, in the order of the stream, nobody has it any more."""
        storage = like.detach().untyped_storage()
        at = self.library.emu_allocate(device, ctypes.c_size_t(max(storage.nbytes(), 1)))
        assert at, "the device's memory is full"
        raw = (ctypes.c_char * max(storage.nbytes(), 1)).from_address(at)
        ctypes.memmove(at, storage.data_ptr(), storage.nbytes())
        if stream and not self.at_once:
            sizes = ctypes.c_void_p(at), ctypes.c_size_t(storage.nbytes())
            last = weakref.finalize(raw, self.library.emu_free, ctypes.c_void_p(stream), *sizes)
            last.atexit = False
            self.spoilers.append(last)
        there = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
        empty = torch.empty(0, dtype=like.dtype)
        return empty.set_(there, like.storage_offset(), like.shape, like.stride())


class OnDevice(TorchFunctionMode):
    """New tensors are the device's, but what comes of Tensor.cpu is the host's, and what is made of
    that alone."""

    def __init__(self, runtime, device, stream):
        self.runtime, self.device, self.stream, self.known = runtime, device, stream, set()

    def has(self, x):
        return x.untyped_storage().data_ptr() in self.known

    def there(self, x):
        if not isinstance(x, torch.Tensor) or self.has(x):
            return x
        x = self.runtime.memory(x, self.device, self.stream)
        self.known.add(x.untyped_storage().data_ptr())
        return x

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **kwargs or {})
        if function is torch.Tensor.cpu:
            return found.clone()
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if given and not any(map(self.has, given)):
            return found
        return tree_map(self.there, found)


class Binary(native.CudaLibrary):
    """The library of kernels; CPU tensors have no number of a device, so that is told."""

    def __init__(self, emulator, device):
        super().__init__(emulator.path)

        def run(params, which, number, multiprocessors, stream):
            assert number == -1
            numbers = (ctypes.c_int64(x) for x in (which, device, multiprocessors))
            params, stream = ctypes.c_char_p(params), ctypes.c_void_p(stream)
            code, found = emulator.call("fa_cuda_run", params, *numbers, stream)
            found.none()
            return code

        self.run, self.run_at = run, 0


class Launched(cuda.Cuda):
    """The backend as it is, on a device of the runtime: it gets tensors that are there, and what it
    allocates is there."""

    name = "launched"

    def __init__(self, runtime, device=0, stream=0):
        self.runtime, self.binary = runtime, Binary(runtime.emulator, device)
        self.mode = OnDevice(runtime, device, stream)

    @property
    def library(self):
        return self.binary

    def moved(self, t):
        return type(t)(*map(self.mode.there, t))

    def forward(self, spec, t):
        with self.mode:
            return super().forward(spec, self.moved(t))

    def backward(self, spec, t, *given):
        *given, wants = given
        with self.mode:
            return super().backward(spec, self.moved(t), *map(self.mode.there, given), wants)

    def weights(self, spec, t):
        with self.mode:
            return super().weights(spec, self.moved(t))

    def weights_backward(self, spec, t, dweights, wants):
        with self.mode:
            return super().weights_backward(spec, self.moved(t), self.mode.there(dweights), wants)


@contextmanager
def launching(runtime, stream=0, device=0):
    """Every call inside goes to a device of the runtime, on this stream of it."""
    backend = Launched(runtime, device, stream)
    with pytest.MonkeyPatch.context() as patch, every_call(backend):
        patch.setattr(cuda, "current_stream", lambda device: stream)
        runtime.library.emu_runtime_mode(runtime.at_once, runtime.apart)
        try:
            yield backend
        finally:  # the emulator is everybody's
            runtime.library.emu_runtime_mode(True, False)
