"""Make what several tests need once, in the first process that needs it; the others wait."""

import fcntl
import hashlib
import os
import pickle
from contextlib import contextmanager
from pathlib import Path

from tests.support.checkout import ROOT

FOLDER = ROOT / "build" / "once"


@contextmanager
def alone(name):
    """An exclusive lock between processes: only one at a time is inside a block of this name."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def digest(*things):
    """A hash, 16 hex digits, of the contents of files (given as Path) and the repr of the rest."""
    found = hashlib.sha256()
    for x in things:
        found.update(x.read_bytes() if isinstance(x, Path) else repr(x).encode())
    return found.hexdigest()[:16]


def made(name, key, make):
    """`make()`, or its stored value if there is one for this key. The folder keeps only the newest
    key of each name."""
    with alone(name):
        path = FOLDER / f"{name}-{key}.pickle"
        if not path.exists():
            value = make()
            for old in FOLDER.glob(f"{name}-*.pickle"):
                old.unlink()
            # Rename a complete file: a process that is killed while it writes leaves no truncated
            # pickle. The suffix is not .pickle, so that nothing reads or lists it.
            partial = path.with_suffix(".partial")
            partial.write_bytes(pickle.dumps(value))
            os.replace(partial, path)
        return pickle.loads(path.read_bytes())
