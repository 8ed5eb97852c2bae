"""A copy of the checkout, for faults and their tests: the checkout itself stays as it is."""

import functools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import fastattn

from .native import Kernels
from .python_rules import alike

# The copy's package is imported, not the installed one.
NO_EDITABLE = """import sys
sys.meta_path[:] = [x for x in sys.meta_path if type(x).__name__ != "ScikitBuildRedirectingFinder"]
"""
PYTEST = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
# The tests of a folder, where its name is another one.
TESTED_IN = dict(dispatch="torch_api", dropin="torch_api", flash_attn="integrations", amx="cpu")
TESTED_IN |= dict(kernels="triton", score="score_mods")
# Tests that build or copy the installed package, which the copy is not.
OF_INSTALLED = ["broken_library", "types", "wheel"]
MEMORY = 20 << 30  # a fault may ask for any amount; a test reserves 9 GB that it does not use
DEFAULT, NEAR = "semantics", 8  # files that are likely to fail
MOST = 1800  # seconds of a run


def git(*arguments):
    command = ["git", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def copy(root, folder):
    """The files of a checkout as they are now, in a clone."""
    shutil.rmtree(folder, ignore_errors=True)
    git("clone", "-q", "--shared", root, folder)
    changed = git("-C", root, "diff", "--name-only", "--no-renames", "HEAD")
    for name in changed + git("-C", root, "ls-files", "-o", "--exclude-standard"):
        (folder / name).unlink(missing_ok=True)
        if (root / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


class Tree:
    def __init__(self, root, folder, cores, more=()):
        left_out = [f"--ignore=tests/package/test_{x}.py" for x in OF_INSTALLED]
        self.root, self.more, self.limits = folder / "tree", [*PYTEST, *left_out, *more], {}
        copy(root, self.root)
        (self.root / "fastattn" / "kernels").symlink_to("../kernels")
        libraries = next(x for x in (Path(y) / "lib" for y in fastattn.__path__) if x.is_dir())
        (self.root / "fastattn" / "lib").symlink_to(libraries)
        (self.root / "build").mkdir()
        for built in (root / "build").glob("*-*.*.*"):  # packages beside the environment
            (self.root / "build" / built.name).symlink_to(built)
        for built in ("emu", "ptx", "once"):  # by the contents of their sources: see build_lock.py
            if (root / "build" / built).exists():
                shutil.copytree(root / "build" / built, self.root / "build" / built)
        site = folder / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(NO_EDITABLE)
        self.environment = os.environ | {
            "PYTHONPATH": f"{site}:{self.root}",
            "OMP_NUM_THREADS": str(cores),
        }

    @functools.cached_property
    def kernels(self):
        return Kernels(self.root / "csrc", self.root.parent / "kernels", "native")

    @functools.cached_property
    def tiles(self):
        return Kernels(self.root / "csrc", self.root.parent / "tiles", "amx_model")

    @contextmanager
    def planted(self, fault):
        """Inside, the fault is there. Yields what tests need in the environment; None if the fault
        changes no code."""
        path = self.root / fault.file
        native = fault.file.startswith("csrc")
        kernels = native and (self.tiles if "/amx/" in fault.file else self.kernels)  # built first
        before = path.read_text()
        path.write_text(fault.plant(before))
        try:
            if native:
                library = kernels.altered(path)
                yield library and {"FASTATTN_LIBRARY": str(library)}
            else:
                same = path.suffix == ".py" and alike(before, fault.plant(before))
                yield None if same else {}
        finally:
            path.write_text(before)

    def steps(self, file):
        """(name, arguments of pytest, in Triton's interpreter?) of the runs that make the tests of
        `make test`, the likeliest to fail first."""
        if file.startswith("tests"):
            yield "near", [str(Path(file).parents[1])], False
            return
        near = self.near(file)
        others = ["tests", *(f"--ignore={x}" for x in ("tests/features", *near))]
        if near and ("kernels/" in file or "triton" in file):
            yield "near", near, True
        yield "features", ["tests/features"], False
        if near:
            yield "near", near, False
        yield "others", others, False
        if not file.startswith("csrc") and (marked := self.interpreted()):
            yield "others", marked, True

    def interpreted(self):
        """The files with tests in Triton's interpreter, as in the Makefile."""
        paths = sorted((self.root / "tests").rglob("test_*.py"))
        marked = [path for path in paths if "mark.interpreter" in path.read_text()]
        return [str(path.relative_to(self.root)) for path in marked]

    def near(self, file):
        """The files of tests that are about this file: in the folder of its name, naming it."""
        *folders, name = Path(file).with_suffix("").parts
        named = re.compile(rf"\b{re.escape(name)}\b")
        ranked = []
        for path in sorted((self.root / "tests").rglob("test_*.py")):
            at = path.relative_to(self.root / "tests").parts[0]
            inside = at in {TESTED_IN.get(x, x) for x in folders}
            names = len(named.findall(path.read_text()))
            rank = 4 * inside + (at == DEFAULT) + min(names, 3) + 4 * (name in path.stem)
            if rank > 1:
                ranked.append((-rank, str(path.relative_to(self.root))))
        return [x for _, x in sorted(ranked)[:NEAR]]

    def failure(self, file, environment):
        """The first test that fails, or that does not end; None if all pass."""
        for step, files, interpreted in self.steps(file):
            if found := self.tested(step, files, interpreted, environment):
                return found
        return None

    def tested(self, step, files, interpreted, environment):
        marks = ["-m", "interpreter and not slow"] if interpreted else []
        env = self.environment | environment | ({"TRITON_INTERPRET": "1"} if interpreted else {})
        command = [sys.executable, "-m", "pytest", *self.more, *marks, *files]
        limit, begun = self.limits.get((step, interpreted), MOST), time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
        )
        try:
            said = process.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            return f"no end after {limit:.0f} s of {step}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.took = time.monotonic() - begun
        if process.returncode in (0, 5):  # 5: no test
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", said, re.M)
        return failed[1] if failed else f"{step}: " + " ".join(said.split()[-12:])
