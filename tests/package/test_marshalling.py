"""Passing tensors to the kernels: the C extension packs arguments as Python does."""

import itertools

import pytest
import torch

from fastattn.backends.native import launcher, libraries, marshalling
from fastattn.call.spec import ARGUMENTS
from tests.support.backends import INTERPRETED
from tests.support.cases import DTYPES

pytestmark = pytest.mark.skipif(INTERPRETED, reason="about the native library")
needs_extension = pytest.mark.skipif(
    marshalling.extension is None, reason=f"no extension: {libraries.extension_unavailable()}"
)


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
        "of bytes": (x > 0).byte(),
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

    for key_of in {marshalling.specialization_key, marshalling._specialization_key}:
        for a in cases:
            for b in cases:
                some = [(x, 1, 2) if wrapped and isinstance(x, torch.Tensor) else x for x in (a, b)]
                first, second = key_of((some[0], 7)), key_of((some[1], 7))
                assert (first == second) == (seen(a) == seen(b))
                assert first != second or hash(first) == hash(second)


@needs_extension
def test_arguments_that_are_nowhere_are_pythons():
    """Compilation ahead of time has tensors on the meta device; numbers may have any type."""
    for x in (torch.empty(3, device="meta"), PLAIN["of float32"].as_subclass(Subclass), 0.5, "x"):
        assert marshalling.extension.specialization_key((x,)) is None
        assert marshalling.specialization_key((x, 3)) == marshalling._specialization_key((x, 3))
    many = (PLAIN["of float32"],) * 100
    assert marshalling.extension.specialization_key(many) is None
    assert len(marshalling.specialization_key(many)) == 300
    with pytest.raises(OverflowError):
        marshalling.extension.specialization_key((1 << 70,))


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
        at = libraries.offset("dlse"), list(marshalling.PASSED_AS).index(how)
        for tensors, sizes in itertools.product(((x,), (None,)), (-1, libraries.offset("dv_size"))):
            place = marshalling._FIELD.pack(*at, sizes)
            packed = marshalling._pack(form, place, tensors, 3)
            assert marshalling.extension.pack(form, place, tensors, 3) == packed
            assert (packed[: libraries.THREADS] != form[: libraries.THREADS]) == (tensors == (x,))


@pytest.mark.parametrize("how", SIZES)
def test_the_sizes_of_a_tensor_cross_in_the_dimensions_of_its_strides(how):
    place = marshalling._FIELD.pack(
        0, list(marshalling.PASSED_AS).index(how), libraries.offset("dv_size")
    )
    for pack in {marshalling.pack, marshalling._pack}:
        packed = pack(bytes(libraries.SIZE), place, (CASES[how][0],), 1)
        assert libraries.EXTENT.unpack_from(packed, libraries.offset("dv_size")) == SIZES[how]


@needs_extension
@pytest.mark.parametrize("which", launcher.PLACES)
def test_every_field_of_a_pass_has_its_place(which):
    """With every tensor that a pass can have, all different."""
    after = launcher.AFTER[which]
    fields = {name: a.field for name, a in ARGUMENTS.items()} | {name: name for name in after}
    passed_as = {name: a.passed_as for name, a in ARGUMENTS.items()} | after
    tensors = tuple(CASES[how][0].clone() for how in passed_as.values())
    form = bytes(libraries.SIZE)
    packed = marshalling._pack(form, launcher.PLACES[which], tensors, 1)
    assert marshalling.extension.pack(form, launcher.PLACES[which], tensors, 1) == packed
    for (name, field), x in zip(fields.items(), tensors):
        if name != "normaliser" or "lse" not in after:  # as an input it is no output
            assert x.data_ptr().to_bytes(8, "little") == packed[libraries.offset(field) :][:8]


@needs_extension
def test_unsupported_tensors_raise_and_do_not_crash():
    x, form = torch.randn(2, 3), bytes(libraries.SIZE)
    pack, place = marshalling.extension.pack, marshalling._FIELD.pack
    bad = [
        ((form, place(0, 0, -1), (x,), 1), "does not fit"),  # two dimensions instead of three
        ((form, place(0, 1, -1), (torch.arange(3),), 1), "does not fit"),  # no such dtype
        ((form, place(0, 9, -1), (x,), 1), "does not fit"),
        ((form, place(libraries.SIZE - 8, 1, -1), (x,), 1), "does not fit"),
        ((form, place(0, 1, libraries.SIZE - 24), (x,), 1), "does not fit"),
        ((form, place(-8, 4, -1), (x,), 1), "does not fit"),
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
