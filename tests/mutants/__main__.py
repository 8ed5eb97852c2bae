"""Plant faults by rules, at places drawn by a seed, and report which of them no fast test detects.

    python -m tests.mutants --count 100 --seed 0 --workers 2 --json out.json
    python -m tests.mutants --list --only csrc/cpu/mask

The unaltered tree must pass first. A fault that changes no object file and no bytecode, or does not
compile, is no fault: the next place is taken. More arguments go to pytest.
"""

import argparse
import itertools
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tests.support.checkout import ROOT

from .drawing import drawn, files
from .native import NotBuilt
from .tree import Tree

FOLDER = ROOT / "build" / "mutants"
LEAST, TIMES = 60, 5  # seconds; a run of so many times as long as without the fault has no end


def options():
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="places that an earlier run has taken")
    parser.add_argument("--only", default="", help="a folder or a file, from the root")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="plant none")
    parser.add_argument("--json", help="a file for the results")
    parser.add_argument("--trust", action="store_true", help="the tree is known to pass")
    return parser.parse_known_args()


def main():
    given, more = options()
    faults = itertools.islice(drawn(ROOT, given.seed, given.only), given.skip, None)
    if given.list:
        for fault, _ in zip(faults, range(given.count)):
            print(fault, *fault.diff((ROOT / fault.file).read_text()), sep="\n    ")
        return 0
    cores = max(1, (os.cpu_count() or 1) // given.workers)
    folders = [FOLDER / str(n) for n in range(given.workers)]
    with ThreadPoolExecutor(given.workers) as pool:
        trees = list(pool.map(lambda folder: Tree(ROOT, folder, cores, more), folders))
        native = any(x.startswith("csrc") for x in files(ROOT, given.only))
        if failed := not given.trust and unaltered(trees, native):
            print(f"the tree without a fault fails: {failed}")
            return 1
        trial = Trial(faults, given.count)
        list(pool.map(trial.work, trees))
    trial.report()
    if given.json:
        with open(given.json, "w") as file:
            json.dump(trial.results, file, indent=1)
    return 0


def unaltered(trees, native):
    """The failure of the tree without a fault; else None, and each kind of run has its limit.
    native: on the kernels in which faults are planted."""
    (tree, *_), limits = trees, {}
    library = {"FASTATTN_LIBRARY": str(tree.kernels.clean)} if native else {}
    for step, names, interpreted in [*tree.steps("fastattn/api.py")]:
        if failed := tree.tested(step, names, interpreted, library):
            return failed
        limits[step, interpreted] = LEAST + TIMES * tree.took
        print(f"without a fault {step} passes in {tree.took:.0f} s", flush=True)
    limits["near", True] = limits["near", False] = limits["others", False]
    for each in trees:
        each.limits = limits
    return None


class Trial:
    """Workers take one fault after the other until `count` were tried."""

    def __init__(self, faults, count):
        self.faults, self.left, self.lock = faults, count, threading.Lock()
        self.results, self.redrawn, self.taken = [], 0, 0

    def work(self, tree):
        while (fault := self.next()) is not None:
            begun = time.monotonic()
            try:
                with tree.planted(fault) as environment:
                    changed = environment is not None
                    failed = changed and tree.failure(fault.file, environment)
            except (NotBuilt, SyntaxError):
                changed = failed = False
            self.add(fault, changed, failed, time.monotonic() - begun)

    def next(self):
        with self.lock:
            self.left -= 1
            self.taken += self.left >= 0
            return next(self.faults, None) if self.left >= 0 else None

    def add(self, fault, changed, failed, seconds):
        with self.lock:
            if not changed:
                self.left += 1
                self.redrawn += 1
                return
            found = fault._asdict() | dict(detected_by=failed, seconds=round(seconds, 1))
            found["diff"] = fault.diff((ROOT / fault.file).read_text())
            self.results.append(found)
            print(f"{len(self.results)}: {fault}: {failed or 'SURVIVES'}", flush=True)

    def report(self):
        survivors = [x for x in self.results if not x["detected_by"]]
        for x in survivors:
            print(f"\n{x['file']}:{x['line']}: {x['rule']}", *x["diff"], sep="\n    ")
        total = len(self.results)
        counted = f"{self.redrawn} redrawn of {self.taken} places"
        print(f"\n{total - len(survivors)} of {total} faults detected, {counted}")


if __name__ == "__main__":
    sys.exit(main())
