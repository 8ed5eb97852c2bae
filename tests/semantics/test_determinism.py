"""Results are bitwise equal for any threads, repeats, batch, heads, forks and interpreters."""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch

import fastattn
from tests.features import checking, factors
from tests.support.backends import (
    declares,
    every_backend,
    every_dtype,
    not_interpreted,
    on_variants,
)
from tests.support.cases import DTYPES, FEATURE, Dims, build
from tests.support.marks import parametrize

pytestmark = not_interpreted

EVERYTHING = tuple(
    FEATURE[name]
    for name in ("causal", "softcap", "alibi", "key_bias_grad", "sinks", "dropout", "lse_loss")
)
# One head that all threads share; a few heads of uneven size; many small heads.
SHAPES = {
    "one_head": Dims(1, 1, 1, 517, 517, 24, 24),
    "gqa": Dims(2, 6, 2, 130, 201, 16, 40),
    "many_heads": Dims(5, 4, 4, 33, 33, 8, 8),
    "one_query": Dims(3, 4, 2, 1, 700, 32, 32),
    "two_queries": Dims(1, 2, 1, 2, 5000, 64, 64),  # enough keys for three threads
    "one_query_of_groups": Dims(1, 8, 2, 1, 5001, 32, 32),  # all threads share its keys
}
# Calls of other forms, of sizes that threads share.
SIZES = dict(M=(2, 130), N=(1500, 300), grad=("all",))
SELECTED = dict(grad=("all",), B=(1,), M=(160,), N=(300, 129), heads=((32, 2),), lists=("one",))
OTHERS = [("packed", 4, SIZES), ("selected", 4, SELECTED)]
PAGES = SIZES | dict(page=(16, 64))
OTHERS += [("paged", 4, PAGES | dict(stored=("own",)))]
STORED = PAGES | dict(grad=("no",))  # what is stored in fewer bits has no gradients
OTHERS += [("paged", 2, STORED | dict(stored=(x,))) for x in factors.PAGED["stored"][1:]]
ROWS = [
    (form, row) for form, most, levels in OTHERS for row in factors.rows(form, most=most, **levels)
]


def same(found, first, where):
    for name, value in first.items():
        assert torch.equal(found[name], value), f"{where}: {name} differs"


@every_dtype
@every_backend
@parametrize("shape", SHAPES, fast=1)
@parametrize("kind", ["plain", "everything"], fast=1)
def test_threads_and_repeats(name, dtype, shape, kind, threads):
    declares(name, DTYPES[dtype])
    features = EVERYTHING if kind == "everything" else ()
    problem = build(SHAPES[shape], features, DTYPES[dtype])
    for isa in on_variants(name, DTYPES[dtype]):
        threads(1)
        first = problem.run(fastattn.attention, backend=name)
        for count in (2, 3, 7, 16, 2, 1):
            threads(count)
            found = problem.run(fastattn.attention, backend=name)
            same(found, first, f"{count} threads, {isa}")


@pytest.mark.parametrize("form, row", ROWS)
def test_threads_of_other_forms(form, row, threads):
    call = checking.MAKE[form](row)
    for way in checking.ways(row):
        if way == "reference":  # torch's own threads
            continue
        with checking.on(way) as more:
            threads(1)
            first = call.run(**more)
            threads(3)
            same(call.run(**more), first, f"3 threads, {way}")


WAKES = """
import os
import torch
import fastattn
torch.set_num_threads(16)
q, k = torch.randn(1, 8, 1, 128), torch.randn(1, 8, 2048, 128)
before = len(os.listdir("/proc/self/task"))
fastattn.attention(q, k, k, backend="cpu")
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads by /proc")
def test_decoding_of_one_row_wakes_all_threads():
    """One row has few multiply-adds, but reads 16 MB."""
    found = subprocess.run([sys.executable, "-c", WAKES], capture_output=True, text=True)
    assert int(found.stdout) == 15, found.stdout + found.stderr


PAGE_FAULTS = """
    import resource
    import torch
    import fastattn
    for rows, keys in ((1, 1024), (1024, 32)):
        q, k, v = (torch.randn(16, 8, n, 64).requires_grad_() for n in (rows, keys, keys))
        dout = torch.ones_like(q)
        faults = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for _ in range(3):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                out = fastattn.attention(q, k, v, backend="cpu")
                torch.autograd.grad(out, (q, k, v), dout)
                faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        assert min(faults[3:]) < 1.3 * max(faults[1:3]), (rows, keys, faults)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts Linux's page faults")
def test_threads_do_not_write_to_the_same_new_pages():
    """Rows of heads lie side by side in results. Threads that write to one new page at once take a
    page fault each: there were twice as many as on one thread."""
    in_new_process(PAGE_FAULTS)


@every_backend
def test_many_repeats(name, threads):
    """250 repeats: they show a race that goes wrong once in a hundred runs."""
    problem = build(Dims(1, 2, 1, 150, 150, 16, 16), EVERYTHING, torch.float32)
    threads(3)
    first = problem.run(fastattn.attention, backend=name)
    for at in range(250):
        same(problem.run(fastattn.attention, backend=name), first, f"repeat {at}")


def part(problem, batch, heads):
    """The problem restricted to some batch items and heads."""
    whole = dict(q=problem.q, k=problem.k, v=problem.v, dout=problem.dout, dlse=problem.dlse)
    cut = {x: y[batch, heads] for x, y in whole.items() if y is not None}
    kwargs = dict(problem.kwargs)
    for given, at in (("mask", batch), ("key_lengths", batch)):
        if given in kwargs:
            kwargs[given] = kwargs[given][at]
    for given in ("alibi_slopes", "sinks"):
        if given in kwargs:
            kwargs[given] = kwargs[given][heads]
    needs_grad = tuple(x for x in problem.needs_grad if x in "qkv")
    return replace(problem, kwargs=kwargs, needs_grad=needs_grad, **cut)


@every_dtype
@every_backend
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
def test_batch_and_heads_around_it_do_not_matter(name, dtype, lengths):
    """An item alone, first, last, or among many: the same bits. (Dropout depends on b and h.)"""
    declares(name, DTYPES[dtype])
    names = ("causal", "softcap", "alibi", "key_bias_grad", "lse_loss") + ("lengths",) * lengths
    features = tuple(FEATURE[x] for x in names)
    problem = build(Dims(5, 3, 3, 150, 170, 16, 24), features, DTYPES[dtype])
    if lengths:
        problem.kwargs["key_lengths"] = torch.tensor([170, 0, 85])[torch.arange(len(problem.q)) % 3]
        problem.k.nan_to_num_(0.5), problem.v.nan_to_num_(0.5)
    everything = slice(None)
    for isa in on_variants(name, DTYPES[dtype]):
        whole = part(problem, everything, everything).run(fastattn.attention, backend=name)
        for batch, heads in (
            (slice(0, 1), everything),
            (slice(len(problem.q) - 1, None), everything),
            (slice(1, 3), slice(1, 2)),
            (slice(0, 1), slice(2, 3)),
        ):
            piece = part(problem, batch, heads).run(fastattn.attention, backend=name)
            for what, value in piece.items():
                assert torch.equal(value, whole[what][batch, heads]), (isa, what, batch, heads)


def in_new_process(code, **environment):
    """The output of the code, run in a new interpreter for at most two minutes."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@every_backend
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child_works(name):
    """After the parent has used its threads, a child gets the same results and does not hang."""
    code = f"""
        import os, signal, torch, fastattn
        torch.set_num_threads(3)
        def run(grad):
            g = torch.Generator().manual_seed(0)
            q, k, v = (torch.randn(2, 4, 150, 16, generator=g).requires_grad_(grad) for _ in "qkv")
            out = fastattn.attention(q, k, v, causal=True, backend={name!r})
            return [out, *torch.autograd.grad(out, (q, k, v), torch.ones(()).expand_as(out))]
        before = run(True)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            after = run(True)
            os._exit(0 if all(map(torch.equal, before, after)) else 1)
        status = os.waitpid(child, 0)[1]
        after = run(True)
        assert status == 0, f"child: status {{status}}"
        assert all(map(torch.equal, before, after))
        print("ok")
    """
    assert in_new_process(code).strip() == "ok"


FLOATING_POINT_STATE = """
    import ctypes, platform, threading
    libm = ctypes.CDLL(None)

    def control():
        "Rounding, masks, flush-to-zero: everything but the sticky status flags."
        state = (ctypes.c_uint8 * 64)()
        assert libm.fegetenv(state) == 0
        raw = bytes(state)
        if platform.machine() == "x86_64":  # x87 control word; MXCSR without its status bits
            mxcsr = int.from_bytes(raw[28:32], "little") & ~0x3F
            return raw[0:2], mxcsr
        return raw[0:4]

    def tiny():
        return torch.full((64,), 1e-40).mul(0.5).gt(0).all().item()
"""


@pytest.mark.slow
def test_importing_changes_no_floating_point_flag():
    """Nor does running the kernels: subnormal numbers are kept, on this thread and on others."""
    code = textwrap.dedent(FLOATING_POINT_STATE) + textwrap.dedent("""
        import torch
        torch.set_num_threads(4)
        before = control()
        assert tiny(), "subnormals are flushed before the import"
        import fastattn
        assert control() == before, "import"
        q = torch.randn(2, 2, 130, 16, requires_grad=True)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            x = q.to(dtype)
            fastattn.attention(x, x, x, causal=True, dropout_p=0.1).sum().backward()
            assert control() == before, dtype
        assert tiny(), "subnormals are flushed"
        big = torch.full((1 << 22,), 1e-40)
        assert big.mul(0.5).gt(0).all(), "a worker thread flushes subnormals"
        found = []
        thread = threading.Thread(target=lambda: found.append(control()))
        thread.start(), thread.join()
        assert found == [before], "a new thread"
        print("ok")
    """)
    assert in_new_process(code).strip() == "ok"


@pytest.mark.slow
def test_importing_is_quiet():
    """No warning, no output, no network, no file written."""
    code = """
        import sys
        import torch  # its own imports are its own business
        def audit(event, args):
            if event.startswith("socket.") and event not in ("socket.__new__",):
                raise SystemExit(f"{event} {args}")
            if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
                raise SystemExit(f"{event} {args}")
        sys.dont_write_bytecode = True
        sys.addaudithook(audit)
        import fastattn
    """
    assert in_new_process(code, PYTHONWARNINGS="error::UserWarning:fastattn") == ""
