"""The process that builds, starts the workers, counts cases and prints findings."""

import queue
import sys
import time
from collections import Counter

from tests.support.checkout import ROOT
from tests.support.workers import Process

from . import builds
from .parts import PARTS

COMMAND = [sys.executable, "-m", "tests.sanitize_cpu"]  # of a worker
LONGEST = 300  # seconds that one case may take, or a worker until its first
ENOUGH = 20  # findings, after which the run stops
REPORTS = ("ERROR: ", "runtime error: ", "WARNING: ThreadSanitizer", "FATAL: ")


class Worker(Process):
    """A process that makes every n-th call of a part. If it dies, another one continues after the
    call that ended it."""

    def __init__(self, options, part, built, index, lines):
        super().__init__(lines)
        self.options, self.part, self.built = options, part, built
        self.index, self.first, self.number = index, 0, None

    def begin(self, seed, until):
        o, sanitizers = self.options, self.part.sanitizers
        command = [*COMMAND, "--worker", f"{self.part.name}:{self.index}"]
        command += ["--libraries", self.built, "--first", str(self.first or self.index)]
        command += ["--seed", str(seed), "--until", str(until), "--workers", str(o.workers)]
        command += ["--case", o.case] if o.case else []
        before = builds.without_random_addresses() if sanitizers == builds.THREAD else []
        self.seed, self.is_done = seed, False
        self.start(
            [*before, *command],
            cwd=ROOT,
            env=builds.environment(sanitizers) | {"LD_PRELOAD": builds.preloaded(sanitizers)},
        )

    def is_stuck(self):
        return self.silent_seconds() > LONGEST

    def last_words(self):
        """The sanitizer's report, from its first line on."""
        text = [x.strip() for x in self.errors if x.strip()]
        first = next((i for i, x in enumerate(text) if any(s in x for s in REPORTS)), -8)
        return "\n    ".join(text[first:][:12])


class Watch:
    def __init__(self, options, end):
        self.options, self.end = options, end
        self.cases, self.findings = Counter(), 0

    def run(self, part, built, until):
        """The calls of a part once; with --minutes, until then with one seed after another."""
        seed = self.options.seed
        while self.sweep(part, built, seed, until) and self.options.minutes is not None:
            seed += 1

    def sweep(self, part, built, seed, until):
        """All calls of one seed; False if they were not made in time."""
        lines = queue.Queue()
        workers = [
            Worker(self.options, part, built, index, lines)
            for index in range(1 if self.options.case else self.options.workers)
        ]
        for worker in workers:
            worker.begin(seed, until)
        alive = set(workers)
        while alive and self.findings < ENOUGH:
            for worker in alive:
                if worker.is_stuck():
                    worker.process.kill()
            try:
                worker, line = lines.get(timeout=0.5)
            except queue.Empty:
                continue
            if line is not None:
                self.read(worker, line)
            elif not self.goes_on(worker, until):
                alive.discard(worker)
        for worker in workers:
            worker.stop()
        return all(x.is_done for x in workers) and time.time() < until

    def read(self, worker, line):
        word, _, rest = line.partition(" ")
        worker.since = time.monotonic()
        if word == "begin":
            number, worker.case = rest.split(" ", 1)
            worker.number = int(number)
        elif word == "end":
            self.cases[worker.part.name] += 1
            if rest:
                self.report(worker, rest)
            worker.case = None
        elif word == "done":
            worker.is_done = True

    def goes_on(self, worker, until):
        """After the end of a process: report why it died, and start another if time is left."""
        status = worker.process.returncode
        if status == 0:
            return False
        stuck = worker.is_stuck()
        why = f"no end within {LONGEST} s" if stuck else f"the process ended with status {status}"
        self.report(worker, f"{why}\n    {worker.last_words()}")
        if worker.case is None:  # outside of any call: another process would die as well
            return False
        self.cases[worker.part.name] += 1
        if self.options.case:
            return False
        worker.first = worker.number + self.options.workers
        is_left = time.time() < until
        if is_left:
            worker.begin(worker.seed, until)
        return is_left

    def report(self, worker, why):
        self.findings += 1
        case = worker.case or self.options.case
        again = f"python -m tests.sanitize_cpu --seed {worker.seed} --case {case}"
        print(f"FOUND {why}\n  repeat it: {again}", flush=True)

    def conclude(self, begun):
        seconds, total = time.time() - begun, sum(self.cases.values())
        for name, n in self.cases.items():
            print(f"{name}: {n:,} cases")
        print(f"sanitize-cpu: {seconds:.0f} s, {total:,} cases, {self.findings} findings")
        return int(self.findings > 0 or total == 0)


def run(options, usual):
    begun = time.time()
    end = begun + 60 * (usual if options.minutes is None else options.minutes)
    watch = Watch(options, end)
    names = [options.case.partition(":")[0]] if options.case else options.parts.split(",")
    parts, built = [PARTS[name] for name in names], {}
    for part in parts:
        since = time.time()
        try:
            built[part] = options.libraries or part.build()
        except builds.Failed as error:
            watch.findings += 1
            print(f"FOUND {part.name} does not build: {error}", flush=True)
        else:
            print(f"{part.name}: built in {time.time() - since:.0f} s", flush=True)
    parts = list(built)
    while parts and watch.findings < ENOUGH:
        shares, part = sum(x.share for x in parts), parts.pop(0)
        now = time.time()
        watch.run(part, built[part], now + (end - now) * part.share / shares)
    return watch.conclude(begun)
