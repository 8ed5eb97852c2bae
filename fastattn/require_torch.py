"""Check the Python, and that PyTorch is installed, and which. Imported first; if it is not there,
say how to install it."""

import sys
import sysconfig

INSTALL = (
    "fastattn needs PyTorch, which is not here: `pip install torch`, or its smaller build "
    "for CPUs, `pip install torch --index-url https://download.pytorch.org/whl/cpu`"
)
FREE_THREADED = (
    "fastattn does not run in a free-threaded Python: got a build without the global interpreter "
    "lock, expected the ordinary one. Its caches rely on the lock; kernels run on threads anyway"
)
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError(FREE_THREADED)

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    if sys.argv[:1] == ["-m"]:  # while `python -m fastattn` looks for its module
        sys.exit(INSTALL)
    raise ModuleNotFoundError(INSTALL, name="torch") from None

TORCH_VERSION = tuple(int(x) for x in torch.__version__.split(".")[:2])  # (2, 13)
