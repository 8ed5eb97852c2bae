"""Worker processes that make calls, and what they print: for `fuzz` and `sanitize_cpu`."""

import subprocess
import threading
import time
import traceback
from pathlib import Path


class Process:
    """A worker process. `lines` gets (self, line) for each line that it prints, and (self, None) at
    its end.

    case: the call that it makes, or None. since: the time of its last line.
    """

    def __init__(self, lines):
        self.lines, self.case, self.errors = lines, None, []

    def start(self, command, **more):
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
        )
        self.case, self.since = None, time.monotonic()
        self.readers = [
            threading.Thread(target=read, args=(self.process,), daemon=True)
            for read in (self._read_errors, self._read_lines)
        ]
        for reader in self.readers:
            reader.start()

    def _read_errors(self, process):
        with process.stderr as stream:
            self.errors = list(stream)

    def _read_lines(self, process):
        with process.stdout as stream:
            for line in stream:
                self.lines.put((self, line.rstrip("\n")))
        process.wait()
        self.readers[0].join()
        self.lines.put((self, None))

    def silent_seconds(self):
        return time.monotonic() - self.since

    def stop(self):
        self.process.kill()
        for reader in self.readers:
            reader.join()


def fill_with_nan():
    """Fill uninitialised memory of torch with NaN, as conftest.py does for the tests."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def in_one_line(error):
    """An exception's message, the line that raised it, and its notes (PEP 678)."""
    notes = " ".join(getattr(error, "__notes__", ()))
    where = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(where.filename).name}:{where.lineno}"
    return " ".join(f"{type(error).__name__}: {error} {notes} ({at})".split())
