"""On a GPU: calls with every pair of arguments and properties, from the rows of tests/features.

Hundreds of kernels are compiled for this file alone: skip it (--ignore) to save minutes.
"""

from dataclasses import replace

import pytest
import torch

from tests.features import factors
from tests.features.calls import Expected
from tests.features.checking import MAKE
from tests.features.test_calls import by_turns
from tests.support.gpu import (
    compiled,  # noqa: F401  a fixture
    compiling,
    judged,
    moved,
    on_gpu,
)
from tests.support.marks import parametrize

pytestmark = [*on_gpu, pytest.mark.usefixtures("compiled")]
FORMS = ("dense", "packed", "paged", "selected")
# Around tiles of a GPU. Few rows of 650 keys and more are split among programs.
OF_16_BITS = dict(
    dtype=("bfloat16", "float16"),
    M=(17, 1, 5, 16, 64, 65, 129, 200),
    N=(33, 1, 64, 65, 129, 257, 650, 1500),
    D=(64, 16, 33, 128, 256),
    Dv=(64, 16, 80, 128, 200),
    widths=((64, 64), (32, 32), (16, 3), (128, 64), (96, 160), (3, 17), (192, 128), (200, 256)),
    window=(*factors.SCORES["window"], (300, 190)),  # whole blocks between its two edges
)
# float32 compiles slowly, and in seconds only for few columns.
OF_32_BITS = OF_16_BITS | dict(dtype=("float32",), D=(16,), Dv=(16,), widths=((16, 8), (8, 16)))


def rows(form, fixed, most=None):
    return factors.rows(form, most=most, **factors.of_form(form, fixed))


CASES = by_turns(*([(form, row) for row in rows(form, OF_16_BITS)] for form in FORMS))
CASES += by_turns(*([(form, row) for row in rows(form, OF_32_BITS, most=40)] for form in FORMS))


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


@parametrize("form, row", CASES, ids=[f"{n:03}-{x[0]}" for n, x in enumerate(CASES)], fast=100)
@judged
def test_rows(name, form, row):
    call = MAKE[form](row)
    try:
        found = on_device(call).run(backend=name)
    except NotImplementedError as error:  # with the features that the backend does not declare
        pytest.skip(str(error))
    if not compiling.now:
        assert not Expected(call).about({name: x.cpu() for name, x in found.items()})
