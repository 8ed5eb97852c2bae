"""The emulator's CUDA runtime (emu/runtime.cpp): two devices with separate memory, streams,
graphs, and calls that fail on demand."""

import ctypes
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fastattn.backends.native import cuda, libraries
from tests.gpu_emulation.emulated import emulator
from tests.support.backends import every_call

TEXT_BYTES = 1 << 16


class Runtime:
    """A new runtime; only one exists at a time. With `at_once` false, work waits in its stream
    until `finish`, and memory that Python frees is overwritten in the stream's order. With `apart`,
    a kernel's parameters may point only to memory of its device. With `wide`, it has the kernels of
    wide heads."""

    spoilers = ()  # of the current runtime

    def __init__(self, at_once=True, apart=True, wide=False):
        for x in Runtime.spoilers:  # streams and memory of the last runtime are gone
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
        """Run the work that waits in these streams, one kernel of each in turn."""
        left = [ctypes.c_void_p(x) for x in streams]
        while left:
            ran = [(x, *self.emulator.call("emu_run_waiting", x, 1)) for x in left]
            for _, _, found in ran:
                found.none()
            left = [x for x, waiting, _ in ran if waiting]

    @contextmanager
    def recording(self, stream):
        """Record launches on the stream to a graph: a list of one element, the graph's number."""
        self.library.emu_capture(ctypes.c_void_p(stream))
        graph = []
        try:
            yield graph
        finally:
            graph.append(self.library.emu_captured(ctypes.c_void_p(stream)))

    def replay(self, graph):
        self.emulator.run("emu_replay", ctypes.c_long(*graph)).none()

    def fail(self, calls, code):
        """Make the call after `calls` more return this code."""
        self.library.emu_runtime_fail(ctypes.c_long(calls), code)

    def driver(self, version, binary=80):
        """Set the newest CUDA version that the driver supports, as 12040, and its architecture."""
        self.library.emu_runtime_driver(version, binary)

    def log(self):
        """The runtime calls since the start."""
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self.library.emu_runtime_log(text, ctypes.c_size_t(TEXT_BYTES))
        return text.value.decode().splitlines()

    def launches(self):
        """(device, number of the stream, kernel) of each launch."""
        lines = [x.split() for x in self.log() if x.startswith("launch")]
        return [(int(x[3]), x[5], x[6]) for x in lines]

    def memory(self, like, device, stream=0):
        """A copy of a tensor's storage on a device, and the tensor in it with its strides and
        offset. The memory may be reused once, in the order of the stream, nothing refers to it."""
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
    """New tensors are on the device. Results of Tensor.cpu are on the host, and so are results of
    operations on host tensors only."""

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


class Binary(libraries.CudaLibrary):
    """The library of kernels. CPU tensors have no device number, so `device` is passed instead."""

    def __init__(self, emulator, device):
        super().__init__(emulator.path)

        def run(params, which, number, *chip_and_stream):
            assert number == -1
            *chip, stream = chip_and_stream
            numbers = (ctypes.c_int64(x) for x in (which, device, *chip))
            params, stream = ctypes.c_char_p(params), ctypes.c_void_p(stream)
            code, found = emulator.call("fa_cuda_run", params, *numbers, stream)
            found.none()
            return code

        self.run, self.run_at = run, 0


class Launched(cuda.Cuda):
    """The CUDA backend on a device of the runtime, which has the copied inputs and all results."""

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

    def backward(self, spec, t, outs, grads, needs_grad):
        given = (tuple(map(self.mode.there, x)) for x in (outs, grads))
        with self.mode:
            return super().backward(spec, self.moved(t), *given, needs_grad)

    def weights(self, spec, t):
        with self.mode:
            return super().weights(spec, self.moved(t))

    def weights_backward(self, spec, t, dweights, needs_grad):
        with self.mode:
            return super().weights_backward(
                spec, self.moved(t), self.mode.there(dweights), needs_grad
            )


@contextmanager
def launching(runtime, stream=0, device=0):
    """Every call inside runs on a device of the runtime, on this stream."""
    backend = Launched(runtime, device, stream)
    with pytest.MonkeyPatch.context() as patch, every_call(backend):
        patch.setattr(cuda, "current_stream", lambda device: stream)
        runtime.library.emu_runtime_mode(runtime.at_once, runtime.apart)
        try:
            yield backend
        finally:  # other tests share the emulator
            runtime.library.emu_runtime_mode(True, False)
