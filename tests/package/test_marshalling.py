"""Passing tensors to the kernels: the C extension packs arguments as Python does, and a call has
the same results with it and without."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fastattn
from fastattn import api
from fastattn.backends import native_launcher
from fastattn.backends.native import libraries, marshalling
from fastattn.call.spec import ARGUMENTS
from fastattn.dispatch import operation
from tests.support.backends import INTERPRETED
from tests.support.cases import DTYPES

pytestmark = pytest.mark.skipif(INTERPRETED, reason="about the native library")
needs_extension = pytest.mark.skipif(
    marshalling.extension is None, reason=f"no extension: {libraries.extension_unavailable()}"
)


ROOT = Path(__file__).resolve().parents[2]


class Subclass(torch.Tensor):
    pass


def plain():
    """Tensors that are plain strided memory, by name."""
    x = torch.randn(2, 3, 5, 4)
    found = {f"of {name}": x.to(dtype) for name, dtype in DTYPES.items()}
    return found | {
        "parameter": torch.nn.Parameter(x),
        "with gradient": x.clone().requires_grad_(),
        "transposed": x.transpose(1, 2),
        "every other": x[..., ::2],
        "expanded": x[:1, :1].expand(2, 3, 5, 4),
        "at an offset": x[1:, :, 1:],
        "of one item": x[:1],
        "empty": x[:, :, :0],
        "of bools": x > 0,
        "of integers": torch.arange(6),
        "of one dimension": torch.randn(3),
        "of two": torch.randn(2, 3),
        "of none": torch.tensor(1.0),
        "a normaliser": torch.randn(2, 2, 3, 5),
    }


def strange():
    """Tensors that a mode, subclass or lazy flag handles, and objects that are no tensors."""
    x = torch.randn(1, 2, 3, 4)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    return {
        "subclass": x.as_subclass(Subclass),
        "negated": torch.complex(x, x).conj().imag,
        "zeros that are nowhere": torch._efficientzerotensor(x.shape),
        "meta": x.to("meta"),
        "empty meta": x[:0].to("meta"),
        "fake": fake,
        "sparse": x.to_sparse(),
        "no tensor": "q",
        "number": 3,
    }


PLAIN = plain()


@pytest.mark.parametrize("name", strange())
def test_tensors_without_plain_memory_have_no_kind(name):
    q = PLAIN["of float32"]
    for kind in {marshalling.kind, marshalling._kind}:
        assert kind((q, strange()[name], None)) is None


def test_tensors_that_differ_only_in_memory_share_a_kind():
    """The kind, from C and from Python, differs exactly if shape, dtype or device differs."""
    sets = [*((x,) for x in PLAIN.values()), (), (None,), (None, None)]
    sets += [(PLAIN["of float32"], None), (None, PLAIN["of float32"])]
    sets += [(PLAIN["of one dimension"],) * 2, (PLAIN["of one dimension"], PLAIN["of two"])]
    described = [[x if x is None else (x.shape, x.dtype, x.device) for x in some] for some in sets]
    for kind in {marshalling.kind, marshalling._kind}:
        kinds = [kind(some) for some in sets]
        assert None not in kinds
        for a, one in zip(kinds, described):
            for b, other in zip(kinds, described):
                assert (a == b) == (one == other)
                assert a != b or hash(a) == hash(b)


def lying():
    """Kernel arguments, for some of which Triton compiles a kernel of its own."""
    room = torch.zeros(64, dtype=torch.bfloat16)
    wide = room[:48].view(3, 16)
    return {
        "a tensor": room[:16],
        "shifted": room[1:17],
        "shifted by 16 bytes": room[8:24],
        "of another dtype": room[:16].half(),
        "every other": room[:32:2],
        "of two dimensions": wide,
        "transposed": wide.T,
        "of one row": wide[:1],
        "of one row of a longer one": room[:48].view(1, 48)[:, :16],
        "one row, strided otherwise": room.as_strided((1, 16), (40, 1)),
        "nothing": None,
        "1": 1,
        "16": 16,
    }


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "with strides"])
def test_arguments_are_distinguished_by_memory_layout(wrapped):
    """C and Python distinguish arguments by dtype, by strides, also those of a single row, and by
    whether 16 bytes divide the address; and by nothing else."""
    cases = list(lying().values())

    def seen(x):
        if not isinstance(x, torch.Tensor):
            return x
        return x.dtype, x.stride(), x.data_ptr() % 16

    for laid in {marshalling.laid, marshalling._laid}:
        for a in cases:
            for b in cases:
                some = [(x, 1, 2) if wrapped and isinstance(x, torch.Tensor) else x for x in (a, b)]
                first, second = laid((some[0], 7)), laid((some[1], 7))
                assert (first == second) == (seen(a) == seen(b))
                assert first != second or hash(first) == hash(second)


@needs_extension
def test_arguments_that_are_nowhere_are_pythons():
    """Compilation ahead of time has tensors on the meta device; numbers may have any type."""
    for x in (torch.empty(3, device="meta"), PLAIN["of float32"].as_subclass(Subclass), 0.5, "x"):
        assert marshalling.extension.laid((x,)) is None
        assert marshalling.laid((x, 3)) == marshalling._laid((x, 3))
    many = (PLAIN["of float32"],) * 100
    assert marshalling.extension.laid(many) is None and len(marshalling.laid(many)) == 300
    with pytest.raises(OverflowError):
        marshalling.extension.laid((1 << 70,))


CASES = {
    "strided": [x for x in PLAIN.values() if x.ndim == 4 and x.dtype != torch.int64],
    "broadcast": [x for x in PLAIN.values() if x.dtype != torch.int64],
    "column": [
        *(torch.randn(3), torch.randn(6)[::2], torch.randn(2, 3), torch.randn(3, 2).mT),
        *(torch.randn(2, 3, 5), torch.randn(2, 3, 5).double()),
    ],
    "pair": [torch.randn(2, 2, 3, 5), torch.randn(2, 2, 3, 5).double()[:, :, :, ::2]],
    "pointer": [torch.arange(6), torch.arange(6)[2:], torch.tensor(7)],
}
SIZES = {  # sizes of the first tensor in each list, as kernels see them
    "strided": (2, 3, 5, 4),
    "broadcast": (2, 3, 5, 4),
    "column": (1, 3, 1, 1),
    "pair": (2, 3, 5, 2),
}


@needs_extension
@pytest.mark.parametrize("how", CASES)
def test_the_extension_packs_what_python_packs(how):
    form = bytes(range(256)) * (libraries.SIZE // 256 + 1)
    form = form[: libraries.SIZE]
    for x in CASES[how]:
        at = libraries.offset("dlse"), list(marshalling.CROSSES).index(how)
        for tensors, sizes in itertools.product(((x,), (None,)), (-1, libraries.offset("dv_size"))):
            place = marshalling._PLACE.pack(*at, sizes)
            packed = marshalling._pack(form, place, tensors, 3)
            assert marshalling.extension.pack(form, place, tensors, 3) == packed
            assert (packed[: libraries.THREADS] != form[: libraries.THREADS]) == (tensors == (x,))


@pytest.mark.parametrize("how", SIZES)
def test_the_sizes_of_a_tensor_cross_in_the_dimensions_of_its_strides(how):
    place = marshalling._PLACE.pack(
        0, list(marshalling.CROSSES).index(how), libraries.offset("dv_size")
    )
    for pack in {marshalling.pack, marshalling._pack}:
        packed = pack(bytes(libraries.SIZE), place, (CASES[how][0],), 1)
        assert libraries.EXTENT.unpack_from(packed, libraries.offset("dv_size")) == SIZES[how]


@needs_extension
@pytest.mark.parametrize("which", native_launcher.PLACES)
def test_every_field_of_a_pass_has_its_place(which):
    """With every tensor that a pass can have, all different."""
    after = native_launcher.AFTER[which]
    fields = {name: a.field for name, a in ARGUMENTS.items()} | {name: name for name in after}
    crosses = {name: a.crosses for name, a in ARGUMENTS.items()} | after
    tensors = tuple(CASES[how][0].clone() for how in crosses.values())
    form = bytes(libraries.SIZE)
    packed = marshalling._pack(form, native_launcher.PLACES[which], tensors, 1)
    assert marshalling.extension.pack(form, native_launcher.PLACES[which], tensors, 1) == packed
    for (name, field), x in zip(fields.items(), tensors):
        if name != "normaliser" or "lse" not in after:  # as an input it is no output
            assert x.data_ptr().to_bytes(8, "little") == packed[libraries.offset(field) :][:8]


@needs_extension
def test_unsupported_tensors_raise_and_do_not_crash():
    x, form = torch.randn(2, 3), bytes(libraries.SIZE)
    pack, place = marshalling.extension.pack, marshalling._PLACE.pack
    bad = [
        ((form, place(0, 0, -1), (x,), 1), "does not cross"),  # two dimensions instead of three
        ((form, place(0, 1, -1), (torch.arange(3),), 1), "does not cross"),  # no such dtype
        ((form, place(0, 9, -1), (x,), 1), "does not cross"),
        ((form, place(libraries.SIZE - 8, 1, -1), (x,), 1), "does not cross"),
        ((form, place(0, 1, libraries.SIZE - 24), (x,), 1), "does not cross"),
        ((form, place(-8, 4, -1), (x,), 1), "does not cross"),
        ((form[:-1], place(0, 1, -1), (x,), 1), "another size"),
        ((form, place(0, 1, -1), (x, x), 1), "another size"),
        ((form, place(0, 1, -1), ("x",), 1), None),
        ((form, place(0, 1, -1), (x,), "threads"), None),
        ((form, place(0, 1, -1), x, 1), None),
        (("form", place(0, 1, -1), (x,), 1), None),
        ((form,), "expected 4"),
    ]
    for arguments, message in bad:
        with pytest.raises((ValueError, TypeError, RuntimeError, SystemError), match=message):
            pack(*arguments)
    with pytest.raises((TypeError, SystemError)):
        marshalling.extension.kind([x])


# --------------------------------------------------------------- the whole call, both ways

PROGRAM = """
import hashlib, json, os, sys, warnings
import torch, fastattn
from fastattn import crossing
torch.set_num_threads(1)
fastattn.backends.native.libraries.poison(True)

def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))

def digest(tensors):
    state = hashlib.sha256()
    for x in tensors:
        state.update(str((x.shape, x.stride(), x.dtype)).encode())
        state.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()

features = dict(
    plain={},
    band=dict(causal="bottom_right", window=(3, 1)),
    scalars=dict(softcap=2.0, scale=0.3),
    mask=dict(mask=rand(5, 7)),
    bools=dict(mask=rand(2, 1, 5, 7) > -1),
    lengths=dict(key_lengths=torch.tensor([7, 3])),
    apart=dict(key_lengths=torch.tensor([5, 9, 4, 9])[::2].int()),
    slopes=dict(alibi_slopes=rand(4).abs()),
    each=dict(alibi_slopes=rand(2, 4).double().abs()),
    sinks=dict(sinks=rand(4)),
    dropout=dict(dropout_p=0.3, seed=5),
    everything=dict(
        mask=rand(4, 1, 7), causal=True, key_lengths=torch.tensor([7, 3]),
        alibi_slopes=rand(4).abs(), softcap=3.0, sinks=rand(4), dropout_p=0.2, seed=9,
    ),
)
SHAPES = [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)]
found = {"extension": crossing.extension is not None}
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    for name, given in features.items():
        q, k, v = (rand(*s, seed=i).to(dtype) for i, s in enumerate(SHAPES))
        given = dict(given)
        tensors = [q, k, v.transpose(1, 2).contiguous().transpose(1, 2)]
        for extra in ("mask", "sinks"):
            if given.get(extra) is not None and given[extra].is_floating_point():
                given[extra] = given[extra].to(dtype).requires_grad_()
        leaves = [x.requires_grad_() for x in tensors] + [given[x] for x in ("mask", "sinks")
                  if x in given and given[x].requires_grad]
        out, lse = fastattn.attention(*tensors, **given, return_lse=True)
        grads = torch.autograd.grad(out.float().sin().sum() + lse[lse.isfinite()].sum(), leaves)
        with torch.no_grad():
            again = fastattn.attention(*tensors, **given)
            weights = fastattn.attention_weights(q, k, **given)
        wq = fastattn.attention_weights(q, k, average_heads=True, **given)
        dw = torch.autograd.grad(wq.float().sin().sum(), (q, k))
        found[f"{name} {dtype}"] = digest([out, lse, *grads, again, weights, wq, *dw])

q = rand(2, 4, 5, 8)
wrong = [
    *(dict(q=x) for x in ("q", None, q.long(), q.to_sparse(), q.to("meta"))),
    *(dict(k=x) for x in (q[0], q.double(), None)),
    *(dict(v=x) for x in (q[:1], None)),
    *(dict(mask=x) for x in (rand(3, 3), q.long(), 1.0)),
    *(dict(key_lengths=torch.tensor(x)) for x in ([9, 1], [1.0, 2.0], [1])),
    *(dict(scale=x) for x in (True, "1", [1], float("nan"), torch.tensor(1.0))),
    *(dict(causal=x) for x in ("left", [1], 2)),
    *(dict(window=x) for x in (3, (True, 1), (-1, 0), (1, 2, 3))),
    *(dict(dropout_p=x) for x in (2.0, None)),
    *(dict(backend=x) for x in (3, "cudnn", "cuda")),
    *(dict(sinks=rand(3)), dict(softcap=-1.0), dict(seed=1.5, dropout_p=0.5), dict(nonsense=1)),
    dict(alibi_slopes=rand(5).requires_grad_()),
]
for at, one in enumerate(wrong):
    for grad in (False, True):
        try:
            with torch.set_grad_enabled(grad):
                fastattn.attention(**(dict(q=q, k=q, v=q) | one))
        except Exception as error:
            found[f"wrong {at} {grad}"] = f"{type(error).__name__}: {error}"
        else:
            found[f"wrong {at} {grad}"] = "no error"
print(json.dumps(found))
"""


def run(program, **environment):
    where = os.path.dirname(os.path.dirname(fastattn.__file__))
    path = os.pathsep.join(x for x in (where, os.environ.get("PYTHONPATH")) if x)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_extension
def test_calls_have_the_same_bits_and_errors_the_same_text():
    pytest.importorskip("numpy", reason="digests are of numpy's bytes")
    found, without = (json.loads(run(PROGRAM, FASTATTN_EXTENSION=x)) for x in ("auto", "off"))
    assert (found.pop("extension"), without.pop("extension")) == (True, False)
    assert found == without
    assert [x for x in found.values() if x == "no error"] == []


# ---------------------------------------------------------------------- caches confuse no two calls


LOW, HIGH = dict(rtol=2e-2, atol=1e-2), dict(rtol=1e-4, atol=1e-5)


def exact(q, k, v, **given):
    return fastattn.reference.attention(q.double(), k.double(), v.double(), **given)


def test_calls_that_differ_in_anything_follow_one_another(one_thread):
    """In every order, twice: nothing cached by one call affects another."""
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in "qkv")
    leaf = q.clone().requires_grad_()

    def transposed():
        t = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        return fastattn.attention(*t), exact(q, k, v)

    def offset():
        t = [torch.cat([torch.full_like(x, torch.nan), x])[1:] for x in (q, k, v)]
        return fastattn.attention(*t), exact(q, k, v)

    def autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = fastattn.attention(q, k, v)
        assert out.dtype == torch.bfloat16
        return out, exact(*(x.bfloat16() for x in (q, k, v)))

    def gradient():
        out = fastattn.attention(leaf, k, v)
        assert out.requires_grad
        (grad,) = torch.autograd.grad(out.sum(), leaf)
        other = leaf.detach().double().requires_grad_()
        return grad, torch.autograd.grad(exact(other, k, v).sum(), other)[0]

    def no_grad():
        with torch.no_grad():
            out = fastattn.attention(leaf, k, v)
        assert not out.requires_grad
        return out, exact(q, k, v)

    def inference():
        with torch.inference_mode():
            out = fastattn.attention(q, k, v).clone()
        return out, exact(q, k, v)

    def meta():
        out = fastattn.attention(*(x.to("meta") for x in (q, k, v)))
        assert out.is_meta
        return fastattn.attention(q, k, v), exact(q, k, v)

    def slopes(*shape):
        s = torch.rand(*shape) + 0.1
        return fastattn.attention(q, k, v, alibi_slopes=s), exact(q, k, v, alibi_slopes=s.double())

    def given(**given):
        return fastattn.attention(q, k, v, **given), exact(q, k, v, **given)

    calls = [
        *(transposed, offset, autocast, gradient, no_grad, inference, meta, given),
        *(lambda: slopes(2), lambda: slopes(1, 2)),
        *(lambda x=x: given(scale=x) for x in (1, 1.0, 2.0, None)),
        *(lambda x=x: given(causal=x) for x in (False, True, "top_left", "bottom_right")),
        *(lambda x=x: given(window=x) for x in ((1, 2), (None, 2), (1, None), None)),
        lambda: (fastattn.attention(q.double(), k.double(), v.double()), exact(q, k, v)),
        lambda: (fastattn.attention(q, k[:, :1], v[:, :1]), exact(q, k[:, :1], v[:, :1])),
        lambda: (fastattn.attention(q, k, v[..., :4]), exact(q, k, v[..., :4])),
        lambda: (fastattn.attention(q, k, v, backend="reference"), exact(q, k, v)),
    ]
    for order in (calls, calls[::-1], calls[::2] + calls[1::2]):
        for call in order:
            found, right = call()
            low = found.dtype == torch.bfloat16
            torch.testing.assert_close(found.double(), right, **(LOW if low else HIGH))


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_true_is_refused_as_a_number_after_1(name):
    q = torch.randn(1, 2, 3, 4)
    fastattn.attention(q, q, q, **{name: 1})
    fastattn.attention(q, q, q, **{name: 1.0})
    with pytest.raises(TypeError, match=f"{name}: got True"):
        fastattn.attention(q, q, q, **{name: True})
    fastattn.attention(q, q, q, window=(1, 1))
    with pytest.raises(TypeError, match="window left: got True"):
        fastattn.attention(q, q, q, window=(True, 1))


def test_results_ignore_the_default_device():
    q, k, v = (torch.randn(1, 2, 6, 8).requires_grad_() for _ in "qkv")
    expected = fastattn.attention(q, k, v)
    with torch.device("meta"):
        found = fastattn.attention(q, k, v)
        grads = torch.autograd.grad(found, (q, k, v), torch.ones_like(expected))
    assert found.equal(expected)
    assert all(x.device.type == "cpu" for x in grads)


def test_hooks_that_change_what_is_saved_are_read_as_they_leave_it():
    """Backward's plan depends on the tensors that it gets, not on those that forward had."""
    q, k, v = (torch.randn(1, 2, 6, 8).requires_grad_() for _ in "qkv")
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x.double())
    with hooks:
        out = fastattn.attention(q, k, v)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    right = torch.autograd.grad(fastattn.attention(q, k, v).sum(), (q, k, v))
    for a, b in zip(found, right):
        torch.testing.assert_close(a.float(), b)


MANY = """
import gc, sys, torch, fastattn
torch.set_num_threads(1)

class Subclass(torch.Tensor):
    pass

q, k, v = (torch.randn(1, 2, 6, 8) for _ in "qkv")
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
mask = torch.randn(6, 6)
held = q, k, v, mask, *leaves, torch.Tensor, torch.nn.Parameter, None, True, False

def calls(n):
    for _ in range(n):
        fastattn.attention(q, k, v, mask=mask)
        torch.autograd.grad(fastattn.attention(*leaves).sum(), leaves)
        fastattn.attention(q.as_subclass(Subclass), k, v)
    gc.collect()
    return [sys.getrefcount(x) for x in held], sys.getallocatedblocks()

before, blocks = calls(500)  # caches fill
after, more = calls(500)
assert all(abs(a - b) < 100 for a, b in zip(before, after)), (before, after)
assert more - blocks < 500, more - blocks  # none a call
"""


def test_a_call_leaves_no_references():
    run(MANY)


def test_many_threads_of_python_call_at_once(one_thread):
    """Each thread has its own sizes: short kernels hold the GIL and longer ones release it."""
    rights, failures = {}, []
    for n in (3, 8, 17, 64, 200):
        x = torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(n))
        leaf = x.clone().requires_grad_()
        out = fastattn.attention(leaf, x, x, causal=True)
        rights[n] = x, out.detach(), torch.autograd.grad(out.sum(), leaf)[0]

    def work(first):
        try:
            for at in range(60):
                x, right, gradient = rights[list(rights)[(first + at) % len(rights)]]
                leaf = x.clone().requires_grad_()
                out = fastattn.attention(leaf, x, x, causal=True)
                if at % 7 == 0:
                    operation.forget_plans()
                    api._remembered.cache_clear()
                (found,) = torch.autograd.grad(out.sum(), leaf)
                assert out.equal(right) and found.equal(gradient)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(at,)) for at in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]


# ---------------------------------------------------------------------------- without the extension


@pytest.fixture
def loaded(monkeypatch):
    """A function that loads the file at a path as the extension."""

    def load(path):
        monkeypatch.setattr(libraries, "_candidates", lambda name, variable="": [path])
        return libraries._load_extension.__wrapped__()

    return load


def test_a_missing_extension_has_a_reason(loaded, monkeypatch, tmp_path):
    monkeypatch.delenv("FASTATTN_EXTENSION", raising=False)
    path = tmp_path / "fastattn_crossing.abi3.so"
    assert loaded(path).startswith(f"it was not built: no {path}")
    (tmp_path / "no_extension.txt").write_text("of a reason")
    assert loaded(path) == "it was not built: of a reason"
    path.write_bytes(b"no library")
    assert "is no shared library" in loaded(path)
    whole = libraries.cpu().path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "it does not load" in loaded(path) and "cut short" in loaded(path)
    path.write_bytes(whole)  # intact, but another library
    assert "it does not load" in loaded(path)
    monkeypatch.setenv("FASTATTN_EXTENSION", "off")
    assert loaded(path) == "FASTATTN_EXTENSION is off"
    monkeypatch.delenv("FASTATTN_EXTENSION")
    monkeypatch.setattr(libraries.machinery, "EXTENSION_SUFFIXES", [".so"])
    assert loaded(path) == "this Python has no stable ABI"


@needs_extension
def test_one_of_another_abi_is_not_used(loaded, monkeypatch):
    path = Path(marshalling.extension.__file__)
    assert loaded(path).fields == libraries.FIELDS
    monkeypatch.setattr(libraries, "FIELDS", libraries.FIELDS + " more")
    assert "another version of csrc/abi.h" in loaded(path)


@needs_extension
def test_a_torch_without_dlpack_exchange_is_a_reason(loaded, monkeypatch):
    path = Path(marshalling.extension.__file__)
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert "it does not load" in loaded(path) and "dlpack" in loaded(path)


def configured(folder, wanted, *more):
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    tool = shutil.which("cmake", path=tools)
    if not tool or not shutil.which("ninja", path=tools):
        pytest.skip("building needs cmake and ninja")
    return subprocess.run(
        [tool, "-S", str(ROOT / "csrc"), "-B", str(folder), "-GNinja", *more],
        env=os.environ | dict(PATH=tools, FASTATTN_EXTENSION=wanted, FASTATTN_CUDA="off"),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("header", [None, "#error of an old Python"], ids=["none", "broken"])
def test_without_headers_the_reason_is_written(tmp_path, header):
    """A file with the reason replaces the extension; if that is required, it is an error."""
    python = ["-DSKBUILD_SABI_VERSION=3.10", f"-DPython_INCLUDE_DIR={tmp_path}"]
    if header:
        (tmp_path / "Python.h").write_text(header)
    done = configured(tmp_path / "build", "auto", *python)
    assert done.returncode == 0, done.stderr
    reason = (tmp_path / "build" / "no_extension.txt").read_text()
    expected = "does not compile here" if header else f"there is no {tmp_path}/Python.h"
    assert expected in reason and ("of an old Python" if header else "python3-dev") in reason
    assert "fastattn_crossing" not in (tmp_path / "build" / "build.ninja").read_text()
    done = configured(tmp_path / "build", "on", *python)
    assert done.returncode and "FASTATTN_EXTENSION is on, but" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "wanted, reason", [("off", "FASTATTN_EXTENSION was off"), ("auto", "pip builds it")]
)
def test_without_the_extension_the_reason_is_written(tmp_path, wanted, reason):
    assert configured(tmp_path, wanted).returncode == 0
    assert (tmp_path / "no_extension.txt").read_text().startswith(reason)


def test_an_unknown_value_is_refused(tmp_path):
    done = configured(tmp_path, "maybe")
    assert done.returncode and "got 'maybe', expected on, off or auto" in done.stderr


def test_the_report_has_the_reason(capsys, monkeypatch):
    from fastattn import __main__

    found = json.loads(run("import fastattn.__main__ as m; m.main(['--json'])"))["extension"]
    assert found["available"] == (marshalling.extension is not None)
    monkeypatch.setattr(libraries, "extension_unavailable", lambda: "it is Sunday")
    __main__.main([])
    assert "it is Sunday" in capsys.readouterr().out
