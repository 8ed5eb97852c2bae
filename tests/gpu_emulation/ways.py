"""GPU kernels on a CPU as ways of the calls of tests/features, and the levels that they take:
`python -m tests.features dense emulator M=1` makes one call again."""

from tests.features import factors
from tests.features.test_calls import by_turns, cases
from tests.gpu_emulation.emulated import everywhere
from tests.gpu_emulation.ptx import triton

MULTIPROCESSORS = 8  # few rows of many keys are split among them
WAYS = {
    "emulator": lambda: everywhere(sm_count=MULTIPROCESSORS),
    "emulator-worst": lambda: everywhere(sm_count=MULTIPROCESSORS, pessimistic=True),
    "nvcc-80": lambda: everywhere(sm_count=MULTIPROCESSORS, ptx=True),
    "nvcc-90": lambda: everywhere(sm_count=MULTIPROCESSORS, ptx=True, architecture=90),
    **{f"triton-{x}": lambda x=x: triton.compiled(x, MULTIPROCESSORS) for x in (75, 80, 90, 100)},
}
# Edges of tiles of 64 and 128 rows and keys, and of the few rows that decode takes.
OF_BOTH = dict(
    B=(1, 2),
    M=(70, 1, 5, 16, 17, 63, 65, 129),
    N=(67, 1, 31, 33, 64, 65, 129, 300),
    heads=((2, 1), (4, 2), (5, 1)),
    dtype=("bfloat16", "float16"),
    page=(16, 20, 128),
)
# Kernels of head dims above 64 take minutes to build; qv has the columns of k and v together.
NARROW = dict(D=(24, 8, 17, 32), Dv=(24, 32, 3, 8), widths=((24, 24), (32, 16), (17, 3), (8, 32)))
MIDDLE = dict(D=(64, 40, 33), Dv=(64, 61, 33), widths=((64, 64), (33, 40)), qv=("no",))
WIDE = dict(D=(96, 65, 128, 160, 200, 255), Dv=(96, 61, 128, 192, 250, 256), qv=("no",))
WIDE |= dict(widths=((128, 128), (80, 72), (192, 128), (200, 256)))
# The CUDA kernels take no functions, and pages of their own dtype.
OF_CUDA = dict(mod=("no",), stored=("own",), pages=("shuffled", "shared"))
FORMS = ("dense", "packed", "paged")


def calls(names, forms=FORMS, most=None, **fixed):
    """Rows of each form by turns, as cases of a test. Each form has the ways `names` in turn, and
    begins with another one."""

    def rows(at, form):
        levels = OF_BOTH | fixed | (dict(grad=("no",)) if form == "paged" else {})
        levels = factors.of_form(form, levels)
        found = factors.rows(form, most=most, **levels)
        return [(form, row, names[(at + n) % len(names)]) for n, row in enumerate(found)]

    return cases(by_turns(*map(rows, range(len(forms)), forms)))
