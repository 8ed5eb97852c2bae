"""On a GPU: calls with every pair of arguments and properties, from the rows of tests/features.

Hundreds of kernels are compiled for this file alone: skip it (--ignore) to save minutes.
"""

from dataclasses import replace

import pytest
import torch

from tests.features import factors
from tests.features.calls import Expected
from tests.features.checking import MAKE
from tests.support.gpu import moved, on_every_backend, on_gpu
from tests.support.marks import parametrize

pytestmark = on_gpu
FORMS = ("dense", "packed", "paged", "selected")
# float32 compiles slowly, and only for few columns.
FIXED = dict(dtype=("bfloat16", "float16"), D=(64, 16, 33, 128), Dv=(64, 16, 80, 128))


def rows(form):
    fixed = {name: levels for name, levels in FIXED.items() if name in factors.FORMS[form]}
    return factors.rows(form, **fixed)


def there(x):
    """A copy of x on the device with its memory layout, and its sign yet to be changed."""
    if isinstance(x, torch.Tensor) and x.is_neg():
        return torch._neg_view(moved(torch._neg_view(x)))
    return moved(x)


def on_device(call):
    tensors, given = ({n: there(x) for n, x in some.items()} for some in (call.tensors, call.given))
    found = replace(call, tensors=tensors, given=given, dout=there(call.dout))
    found.dlse = there(call.dlse)
    return found


@parametrize("form, row", [(form, row) for form in FORMS for row in rows(form)], fast=100)
@on_every_backend
def test_rows(name, form, row):
    call = MAKE[form](row)
    try:
        found = on_device(call).run(backend=name)
    except NotImplementedError as error:  # with the features that the backend does not declare
        pytest.skip(str(error))
    assert not Expected(call).about({name: x.cpu() for name, x in found.items()})
