"""Tell warnings of torch and Triton from those of this project.

`-W error` makes every warning an error. On a GPU the newest torch and Triton run that are there,
and a new warning of theirs is no fault of ours: tests marked `gpu` report it and go on.
"""

import sys
import warnings

THEIRS = ("torch", "triton")


class Foreign:
    """In the place of a filter's pattern for modules: it matches by the module that warned.

    The module that a warning is attributed to does not say it: with stacklevel=2 that is the
    caller, which is ours, and a warning of C++ is attributed to the Python frame that called it.
    """

    def match(self, module):
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in ("warnings", "_py_warnings"):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] in THEIRS:
            return True
        # Code that does not name `warn` has not raised it itself: the C++ that it called has.
        return not {"warn", "warn_explicit"} & set(frame.f_code.co_names)


def report_only():
    """Until the filters of this test are dropped, a foreign warning is reported, not raised."""
    warnings.simplefilter("default")  # it is the first filter now, and has its pattern next
    warnings.filters[0] = ("default", None, Warning, Foreign(), 0)
