"""Python as the CPU library's host: FaHost of csrc/abi.h."""

from __future__ import annotations

import ctypes
import struct
import threading


def python_host() -> bytes:
    """FaHost. Python runs the handlers of signals on its main thread alone."""
    names = "PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_CheckSignals"
    entries = (ctypes.cast(getattr(ctypes.pythonapi, x), ctypes.c_void_p).value for x in names)
    return struct.pack("=4Q", *entries, threading.main_thread().ident)
