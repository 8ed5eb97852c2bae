"""The parent process: it starts the workers, counts cases and prints findings."""

import os
import queue
import shlex
import signal
import sys
import time
from collections import Counter

from tests.support.workers import Process

from . import NUMBERS

LONGEST = 120  # seconds that one case may take
COMMAND = [sys.executable, "-m", "tests.fuzz"]  # of a worker
ENOUGH = 50  # findings, after which the run stops


class Worker(Process):
    """A process that makes cases. When it dies, another one starts with the next case."""

    def __init__(self, options, index, lines):
        super().__init__(lines)
        self.options, self.next = options, index

    def begin(self, minutes):
        o = self.options
        command = [*COMMAND, "--worker", str(self.next)]
        command += ["--minutes", str(minutes), "--seed", str(o.seed), "--workers", str(o.workers)]
        command += ["--parts", o.parts] if o.parts else []
        self.start(command, env=environment(o))

    def is_stuck(self):
        return self.case is not None and self.silent_seconds() > LONGEST

    def skip(self):
        """Let the next process start after the current case."""
        number = int(self.case.partition(":")[2])
        self.next, self.case = number % NUMBERS + self.options.workers, None


def environment(options):
    threads = max(1, (os.cpu_count() or 1) // options.workers)
    return os.environ | dict(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive")


def settings():
    """The variables of the environment that say how calls run, for a command line."""
    for name, x in os.environ.items():
        if name == "TRITON_INTERPRET" or name.startswith("FASTATTN_"):
            yield f"{name}={shlex.quote(x)}"


class Watch:
    def __init__(self, options):
        self.options, self.begun = options, time.monotonic()
        self.end = self.begun + 60 * options.minutes
        self.lines = queue.Queue()
        self.workers = [Worker(options, index, self.lines) for index in range(options.workers)]
        self.cases, self.findings = Counter(), 0

    def minutes_left(self):
        return (self.end - time.monotonic()) / 60

    def run(self):
        for worker in self.workers:
            worker.begin(self.minutes_left())
        alive = set(self.workers)
        while alive and self.findings < ENOUGH and self.minutes_left() > 0:
            for worker in alive:
                if worker.is_stuck():
                    worker.process.kill()
            try:
                worker, line = self.lines.get(timeout=0.5)
            except queue.Empty:
                continue
            if line is not None:
                self.read(worker, line)
            elif not self.goes_on(worker):
                alive.discard(worker)
        self.stop()

    def stop(self):
        """A call that has not ended by now is not counted."""
        for worker in self.workers:
            worker.stop()

    def read(self, worker, line):
        if line.startswith("begin "):
            worker.case, worker.since = line.split()[1], time.monotonic()
        elif line.startswith("end"):
            self.cases[worker.case.partition(":")[0]] += 1
            if why := line[4:]:
                self.report(worker.case, why)
            worker.case = None

    def goes_on(self, worker):
        """After the end of a process: report why it died, and start another if time is left."""
        status = worker.process.returncode
        if status == 0:
            return False
        last = " ".join("".join(worker.errors[-30:]).split())[-600:]
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        if worker.case is None:  # outside of any case: another process would die as well
            self.report("-", f"a worker ended with {how}: {last}")
            return False
        stuck = worker.is_stuck()
        self.report(
            worker.case,
            f"no end within {LONGEST} s" if stuck else f"the process ended with {how}: {last}",
        )
        worker.skip()
        left = self.minutes_left()
        if left > 0:
            worker.begin(left)
        return left > 0

    def report(self, case, why):
        self.findings += 1
        again = shlex.join(["python", "-m", "tests.fuzz", "--case", case])
        print(f"FOUND {why}\n  repeat it: {' '.join([*settings(), again])}", flush=True)

    def conclude(self):
        """Print the totals and return the exit status."""
        print(", ".join(f"{name} {n:,}" for name, n in self.cases.most_common()))
        seconds, total = time.monotonic() - self.begun, sum(self.cases.values())
        print(
            f"fuzz: {seconds:.0f} s, {total:,} cases, {self.findings} findings "
            f"(seed {self.options.seed})"
        )
        return int(self.findings > 0 or total == 0)


INTERRUPTED = 130  # the exit status after Ctrl-C, as shells have it


def run(options):
    watch = Watch(options)
    try:
        watch.run()
    except KeyboardInterrupt:
        watch.stop()
        watch.conclude()
        return INTERRUPTED
    return watch.conclude()
