"""Ranks of torch.distributed for tests: processes on this machine, over gloo, started once and used
many times. They run functions of a test module, by name."""

import datetime
import importlib
import math
import multiprocessing
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch

TIMEOUT = 120  # seconds that a rank waits for another; tests of a missing rank wait less


class Ranks:
    """`most` processes; `run` uses the first few of them."""

    def __init__(self, most, timeout=TIMEOUT):
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")  # which imports torch once
        context.set_forkserver_preload([__name__, "fastattn.distributed", "torch.distributed"])
        self.pipes, self.processes = [], []
        for rank in range(most):
            ours, child_pipe = context.Pipe()
            given = rank, most, str(Path(self.folder.name) / "store"), timeout, child_pipe
            self.processes.append(context.Process(target=serve, args=given, daemon=True))
            self.pipes.append(ours)
            self.processes[-1].start()
            child_pipe.close()

    def run(self, ranks, function, *args):
        """The result, or the exception, of each of the first ranks. The function's first argument
        is their group; or, if `ranks` are the sizes of a mesh of all ranks, that mesh."""
        count = ranks if isinstance(ranks, int) else math.prod(ranks)
        for pipe in self.pipes[:count]:
            pipe.send((ranks, function.__module__, function.__name__, args))
        return [self._answer(rank) for rank in range(count)]

    def results(self, ranks, function, *args):
        """The same, but the first exception is raised."""
        found = self.run(ranks, function, *args)
        for x in found:
            if isinstance(x, Exception):
                raise x
        return found

    def _answer(self, rank):
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return RuntimeError("gone")

    def end(self):
        for x in self.processes:
            x.kill()
            x.join()
        self.folder.cleanup()


def serve(rank, most, store, timeout, pipe):
    """The main function of a rank's process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=timeout)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, most), rank=rank, world_size=most, timeout=wait
    )
    groups = {n: dist.new_group(range(n), timeout=wait) for n in range(1, most + 1)}
    if most == 4:
        groups[2, 2] = init_device_mesh("cpu", (2, 2))
    while True:
        ranks, module, name, args = pipe.recv()
        try:
            found = getattr(importlib.import_module(module), name)(groups[ranks], *args)
        except Exception as error:
            found = error
        pipe.send(found)


@contextmanager
def ranks(most, timeout=TIMEOUT):
    found = Ranks(most, timeout)
    try:
        yield found
    finally:
        found.end()
