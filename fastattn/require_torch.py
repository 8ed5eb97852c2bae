"""Check that PyTorch is installed. Imported first; if it is not, say how to install it."""

import sys

INSTALL = (
    "fastattn needs PyTorch, which is not here: `pip install torch`, or its smaller build "
    "for CPUs, `pip install torch --index-url https://download.pytorch.org/whl/cpu`"
)

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    if sys.argv[:1] == ["-m"]:  # while `python -m fastattn` looks for its module
        sys.exit(INSTALL)
    raise ModuleNotFoundError(INSTALL, name="torch") from None
