"""Make what several tests need once, in the first process that needs it; the others wait."""

import fcntl
import hashlib
import pickle
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "once"


@contextmanager
def alone(name):
    """No other process is inside a block of this name at the same time."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def digest(*things):
    """A name for the contents of these files (given as Path) and for all other arguments."""
    found = hashlib.sha256()
    for x in things:
        found.update(x.read_bytes() if isinstance(x, Path) else repr(x).encode())
    return found.hexdigest()[:16]


def made(name, key, make):
    """`make()`, or its stored value if it was last called with this key."""
    with alone(name):
        path = FOLDER / f"{name}-{key}.pickle"
        if not path.exists():
            value = make()
            for old in FOLDER.glob(f"{name}-*.pickle"):
                old.unlink()
            path.write_bytes(pickle.dumps(value))
        return pickle.loads(path.read_bytes())
