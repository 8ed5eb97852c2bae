"""A fresh Python process that imports the same package, and these tests."""

import os
import subprocess
import sys
from pathlib import Path

import fastattn
from tests.support.checkout import ROOT


def python(*arguments, stdin=None, **environment):
    """A process that ran to its end, with its `stdout` and `stderr`. Fails if it failed."""
    folders = Path(fastattn.__file__).parents[1], ROOT, os.environ.get("PYTHONPATH")
    path = os.pathsep.join(str(x) for x in folders if x)
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        input=stdin,
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done
