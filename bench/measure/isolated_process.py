"""Run GPU work in a separate process, because a fault may end that process.

A peer is a library being measured. After an illegal memory access a process cannot use its GPU any
more, and a fault on the host ends the process. The caller then starts another process and goes on
without the peer that caused the fault. The caller itself uses no GPU: in exclusive compute mode a
GPU serves one process at a time.

The caller sends (function, arguments) through a pipe. The worker process answers with messages
(kind, value):

    "at"      the peer that is running now, or None
    "done"    the function has returned this value
    "raised"  the function raised; the value is the error in one line. The caller raises Raised.
    "lost"    the GPU is unusable; the value is the reason. The caller raises Died.

Errors cross the pipe as strings: Died and Raised are raised by the caller, from these messages.
Unusable is raised and caught in the worker.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator
from typing import Any

import torch

EXIT_TIMEOUT = 5.0  # seconds to wait for a process to end after a request


class Died(ChildProcessError):
    """Raised in the caller: the worker process has ended, or cannot use its GPU any more. The text
    gives the reason. `at` is the peer that was running, or None."""

    def __init__(self, at: str | None, how: str):
        super().__init__(how)
        self.at = at


class Raised(ValueError):
    """Raised in the caller: the function raised in the worker process. The text is its error in one
    line. The process continues and takes the next call."""


class Process:
    """A worker process. It starts at the first call, and again at the first call after it ended. It
    imports `modules` first."""

    def __init__(self, *modules: str):
        self.modules = modules
        self.worker: Any = None
        self.pipe: Any = None

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *about: Any) -> None:
        self.close()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function in the process and return its result. Raises Died and Raised."""
        if self.worker is None:
            self._start()
        peer, kind = None, ""
        try:
            self.pipe.send((function, args))
            while True:
                kind, value = self.pipe.recv()
                if kind == "done":
                    return value
                if kind == "raised":
                    raise Raised(value)
                if kind == "lost":
                    raise Died(peer, value)
                peer = value
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.worker.join(EXIT_TIMEOUT)
            raise Died(peer, _ending(self.worker.exitcode)) from None
        finally:
            if kind not in ("done", "raised"):  # the process died, or the caller was interrupted
                self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child_pipe = context.Pipe()
        self.worker = context.Process(target=_serve, args=(child_pipe, self.modules), daemon=True)
        self.worker.start()
        child_pipe.close()  # otherwise recv would not notice the worker's end

    def close(self) -> None:
        """End the process, which releases its GPU."""
        worker, self.worker = self.worker, None
        if worker is None:
            return
        self.pipe.close()
        for end in (worker.terminate, worker.kill):
            end()
            worker.join(EXIT_TIMEOUT)
            if worker.exitcode is not None:
                break


def once(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function in a process that ends after the call; return its result."""
    with Process() as process:
        return process.call(function, *args)


def _ending(status: int | None) -> str:
    """How a process ended, from its exit status, in words."""
    if status is not None and status < 0:
        known = -status in set(signal.Signals)  # real-time signals have no names
        name = signal.Signals(-status).name if known else f"signal {-status}"
        return f"its process died of {name}"
    return f"its process ended with status {status}"


# ------------------------------------------------------------------------------- inside the process

_pipe: Any = None  # to the caller; None in a process that is not a worker


class Unusable(Exception):
    """This process cannot use its GPU any more. `_answer` catches it, reports it as "lost" and ends
    the process."""


@contextlib.contextmanager
def at(peer: str) -> Generator[None, None, None]:
    """If the process ends inside this context, `Died.at` is that peer."""
    _send("at", peer)
    try:
        yield
    except Unusable:  # send nothing more: `Died.at` stays this peer
        raise
    except BaseException:
        _send("at", None)
        raise
    _send("at", None)


def recover(reason: str) -> None:
    """Free memory that an error left allocated. Raises Unusable if the GPU is unusable."""
    gc.collect()
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        raise Unusable(f"{reason}; the GPU was lost to its process") from None


def _serve(pipe: Any, modules: tuple[str, ...]) -> None:
    """The main function of a worker: answer calls until the caller closes the pipe."""
    global _pipe
    _pipe = pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller gets it too, and ends this process
    for name in modules:
        importlib.import_module(name)
    with contextlib.suppress(EOFError):
        while True:
            function, args = pipe.recv()
            _answer(function, args)


def _answer(function: Callable[..., Any], args: tuple) -> None:
    """Run one call and send its messages."""
    reason, result = "", None
    try:
        try:
            result = function(*args)
        except Unusable:
            raise
        except Exception as error:
            reason = one_line(error)
        # `recover` must run after the except block: Python deletes `error` at the end of the block.
        # Until then its traceback keeps the frames, and their tensors, so they cannot be freed.
        if reason:
            recover(reason)
        _send("raised" if reason else "done", reason or result)
    except Unusable as error:
        _send("lost", str(error))
        os._exit(1)  # skip all cleanup: freeing memory of that GPU would raise or hang


def _send(kind: str, what: Any) -> None:
    """Send a message to the caller, or nothing if this process is not a worker."""
    if _pipe is not None:
        _pipe.send((kind, what))


def one_line(error: BaseException) -> str:
    """An error as one line."""
    first_line = (str(error).splitlines() or [""])[0]
    return f"raised {type(error).__name__}: {first_line[:200]}"
