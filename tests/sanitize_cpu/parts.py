"""What runs under which sanitizer."""

import itertools
import random
import threading
from pathlib import Path

from . import builds


class Part:
    """calls: what `make` takes, in the order of a seed; a call is one case."""

    name = sanitizers = ""
    share = 1.0  # of the time that is left after the builds

    def build(self):
        """Build, and return what a worker has to know of the result."""
        raise NotImplementedError

    def prepare(self, built):
        """Run in a worker, before the first call."""
        raise NotImplementedError

    def calls(self, seed):
        raise NotImplementedError

    def make(self, call, seed):
        raise NotImplementedError


def name_of(call):
    return "/".join(map(str, call))


def use(folder):
    """Use the libraries in this folder."""
    from fastattn.backends.native import libraries

    libraries._candidates = lambda name, variable="": [Path(folder) / name]
    libraries.cpu()
    libraries.poison(True)


class Address(Part):
    """The CPU kernels and the extension, every tensor between guard pages."""

    name, sanitizers, share = "address", builds.ADDRESS, 0.5

    def build(self):
        return str(builds.libraries(self.sanitizers))

    def prepare(self, built):
        from fastattn.backends import base

        from . import guards

        use(built)
        self.backend = guards.GuardedCpu()
        base.register(self.backend)

    def calls(self, seed):
        from fastattn.backends.native import libraries

        from . import calls, guards

        of_kernels = itertools.product(calls.all_of(libraries.cpu_isas()), guards.PLACES)
        others = ["cache", *(f"fuzz-{name}" for name in calls.of_fuzz())]
        others = itertools.product(itertools.product(others, range(40)), guards.PLACES)
        return calls.shuffled([(*call, place) for call, place in (*of_kernels, *others)], seed)

    def make(self, call, seed):
        import torch

        from fastattn.backends.native import libraries

        from . import calls

        *what, self.backend.place = call
        torch.set_num_threads(1 + what[1] % 2)
        if len(what) == 2:
            self.make_other(*what, 1000 * seed + what[1])
            return
        libraries.select_cpu_isa(what[-1])
        calls.make(tuple(what), seed)

    def make_other(self, name, n, number):
        from fastattn.backends.native import libraries

        from . import calls

        libraries.select_cpu_isa(libraries.cpu_isas()[n % len(libraries.cpu_isas())])
        if name == "cache":
            calls.cache(number)
        else:
            part = name.removeprefix("fuzz-")
            calls.of_fuzz()[part](random.Random(f"{part}:{number}"))


class Threads(Part):
    """The CPU kernels on several threads, called from several threads at once."""

    name, sanitizers, share = "threads", builds.THREAD, 0.2
    callers, threads = 3, 3

    def build(self):
        return str(builds.libraries(self.sanitizers))

    def prepare(self, built):
        from fastattn.backends.native import cpu, launcher

        use(built)
        cpu.get_num_threads = lambda: self.threads
        launcher.BRIEF = 0  # every call releases the GIL

    def calls(self, seed):
        from fastattn.backends.native import libraries

        from . import calls

        found = calls.all_of(libraries.cpu_isas(), head_dims=calls.OF_THREADS)
        return calls.shuffled(found, seed)

    def make(self, call, seed):
        from fastattn.backends.native import libraries

        from . import calls

        libraries.select_cpu_isa(call[-1])
        errors = []

        def one(of):
            try:
                calls.make(call, seed + of)
            except Exception as error:
                errors.append(error)

        callers = [threading.Thread(target=one, args=(n,)) for n in range(self.callers)]
        for x in callers:
            x.start()
        for x in callers:
            x.join()
        if errors:
            raise errors[0]


class Emulator(Part):
    """The CUDA kernels and their host side on the emulator, every tensor between guard pages."""

    name, sanitizers, share = "emulator", builds.ADDRESS, 0.3

    def build(self):
        builds.emulators()
        return ""

    def prepare(self, built):
        from fastattn.backends import base
        from tests.gpu_emulation.emulated import Emulated

        from . import guards

        class Guarded(guards.Guarded, Emulated):
            pass

        self.backend = Guarded(sm_count=4)
        base.register(self.backend)

    def calls(self, seed):
        from tests.gpu_emulation.emulated import DTYPES

        from . import calls, guards

        kinds = "dense", "weights", "packed", "paged"  # those that the CUDA kernels support
        found = calls.all_of([""], DTYPES, calls.HEAD_DIMS[:130], kinds)
        found = [(*x, guards.PLACES[i % 2]) for i, x in enumerate(calls.shuffled(found, seed))]
        return calls.shuffled(found, seed)

    def make(self, call, seed):
        from tests.gpu_emulation.ways import OF_CUDA
        from tests.support.backends import every_call

        from . import calls

        *what, self.backend.place = call
        levels = OF_CUDA | dict(M=(12, 1, 5), N=(40, 7, 33), qv=("no",))
        levels |= dict(grad=("no",)) if what[0] == "paged" else {}
        with every_call(self.backend):
            self.backend.findings.clear()
            calls.make(tuple(what), seed, self.backend.name, **levels)


PARTS = {part.name: part for part in (Address(), Threads(), Emulator())}
