"""Check that PyTorch is installed, and which. Imported first; if it is not there, say how to
install it."""

import sys

INSTALL = (
    "fastattn needs PyTorch, which is not here: `pip install torch`, or its smaller build "
    "for CPUs, `pip install torch --index-url https://download.pytorch.org/whl/cpu`"
)

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    if sys.argv[:1] == ["-m"]:  # while `python -m fastattn` looks for its module
        sys.exit(INSTALL)
    raise ModuleNotFoundError(INSTALL, name="torch") from None

TORCH_VERSION = tuple(int(x) for x in torch.__version__.split(".")[:2])  # (2, 13)
