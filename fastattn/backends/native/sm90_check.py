"""A check of the GPU instructions that the CUDA kernels of sm_90 rely on: products of warpgroups,
copies by tensor maps, mbarriers, setmaxnreg, stmatrix, named barriers.

The first call on a device that those kernels could serve runs all cases of sm90_probe.py, in some
tens of milliseconds. If one gives something else, reaches its limit of time or raises, that is a
warning, and other kernels serve the calls of this process.

FASTATTN_SM90=unchecked omits the check, and FASTATTN_SM90=off these kernels. There is no check
while a CUDA graph is captured or memory is full: kernels of sm_80 serve that call, and a later one
checks.
"""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import torch

from ...call.environment import setting
from ..shared import gpu
from .sm90_probe import NEVER, Case, cases, complaint, launch

SECONDS = 20.0  # for all of the check: a kernel that still runs then has hung


class _Check:
    """One run of all cases on a device, in a thread of its own: modes of torch, its current stream
    and its current device belong to threads, and a kernel that hangs must not stop the caller."""

    def __init__(self, library: Any, device: torch.device):
        self.library, self.device = library, device
        self.results: dict[str, str] = {}  # by case: what is wrong
        self.at, self.report = "torch", torch.zeros(2, dtype=torch.int32)
        self.thread = threading.Thread(target=self._run, name="fastattn: sm_90", daemon=True)

    def _run(self) -> None:
        try:
            with torch.cuda.device(self.device):
                stream = torch.cuda.Stream(self.device)
                with torch.cuda.stream(stream):
                    for case in cases():
                        self.results[case.name] = self._result(case, stream)
        except Exception as error:  # of CUDA, raised by torch: it can do no more
            first = (str(error).splitlines() or [""])[0]
            self.results[self.at] = f"{self.at}: {type(error).__name__}: {first}"

    def _result(self, case: Case, stream: torch.cuda.Stream) -> str:
        self.at = case.name
        self.report = torch.zeros(
            2, dtype=torch.int32
        ).pin_memory()  # the host reads it at any time
        ran = launch(self.library, case, self.device, self.report, stream.cuda_stream)
        stream.synchronize()
        return complaint(self.library, case, ran, self.report)

    def wait(self, seconds: float) -> dict[str, str]:
        self.thread.start()
        self.thread.join(seconds)
        found = dict(self.results)
        if self.thread.is_alive():
            what = NEVER.get(int(self.report[0]), "it has not ended")
            found[self.at] = f"{self.at}: after {seconds:.0f} s, {what}"
        return found


def run(library: Any, device: torch.device) -> dict[str, str]:
    """Run all cases on a GPU: for each one that was begun, what it did wrong, "" for nothing."""
    return _Check(library, device).wait(SECONDS)


# --- what follows from it ------------------------------------------------------------------------


_lock = threading.Lock()


class NotNow(Exception):
    """A later call has to run the check. The text says why."""


PASSING = ("captur", "out of memory")  # words of errors that say nothing of the instructions


def why_declined(library: Any, device: torch.device) -> str:
    """Why the kernels of sm_90 must not run on this device, "" if they may. The first call runs the
    check; if the device fails, it warns. Raises NotNow."""
    with _lock:
        return _found(library, device)


@functools.cache
def _found(library: Any, device: torch.device) -> str:
    if setting("FASTATTN_SM90") == "off":
        return "FASTATTN_SM90 is off"
    if setting("FASTATTN_SM90") == "unchecked":
        return ""
    with gpu.on(device):
        if torch.cuda.is_current_stream_capturing():
            raise NotNow("a CUDA graph is being captured before the check of sm_90 instructions")
    wrong = [x for x in run(library, device).values() if x]
    if not wrong:
        return ""
    if any(word in wrong[-1].lower() for word in PASSING):
        raise NotNow(f"the check of sm_90 instructions has to be run again: {wrong[-1]}")
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    why = f"the self-check of sm_90 instructions failed: {wrong[0]}{more}"
    warnings.warn(
        f"{why}. Other kernels serve this process. FASTATTN_SM90=off omits the check and these "
        "kernels, FASTATTN_SM90=unchecked the check alone; please report this message",
        stacklevel=2,
    )
    return why
