"""Distinguish warnings of torch and Triton from those of this project.

`-W error` makes every warning an error. GPU tests run on the newest torch and Triton, and a new
warning of theirs is no fault of ours: tests marked `gpu` report it and go on.
"""

import sys
import warnings

THEIRS = ("torch", "triton")


class Foreign:
    """Replaces a warning filter's pattern for modules: it matches by the module that warned.

    The module that Python attributes a warning to is not enough: with stacklevel=2 it is the
    caller, which is ours, and a warning from C++ is attributed to the Python frame that called it.
    """

    def match(self, module):
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in ("warnings", "_py_warnings"):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] in THEIRS:
            return True
        # If the frame's code does not name `warn`, the warning came from C++ that it called.
        return not {"warn", "warn_explicit"} & set(frame.f_code.co_names)


def report_only():
    """Until the filters of this test are dropped, a foreign warning is reported, not raised."""
    warnings.simplefilter("default")  # inserts the first filter, which the next line replaces
    warnings.filters[0] = ("default", None, Warning, Foreign(), 0)
