"""fastattn.scaled_dot_product_attention returns the values of torch's function, and results and
gradients in its memory layout, for every layout of the inputs, so that the same views work."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fastattn
from fastattn.dropin import sdpa
from tests.support.marks import parametrize
from tests.support.torch_calls import rand

ours, theirs = fastattn.scaled_dot_product_attention, F.scaled_dot_product_attention
pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:Lower right"
)

# ------------------------------------------------------------------------------------- the cases


def in_memory(order, pad=0):
    """A maker of tensors with dimensions stored in `order`, outermost first; they count from the
    last, so -1 is D. With `pad`, there are gaps after rows."""

    def made(shape, **given):
        dims = [d for d in range(-len(shape), 0) if d not in order] + [*order]
        dims = [d + len(shape) for d in dims if d + len(shape) >= 0]
        sizes = [shape[d] for d in dims]
        x = rand(*sizes[:-1], sizes[-1] + pad, **given)[..., : sizes[-1]]
        return x.permute([dims.index(d) for d in range(len(shape))])

    return made


def expanded(dim):
    def made(shape, **given):
        dims = [1 if at == len(shape) + dim else n for at, n in enumerate(shape)]
        return rand(*dims, **given).expand(shape)

    return made


def of_one_projection(shape, **given):
    """Stored as (..., L, 3, H, E), the output of one projection to query, key and value."""
    if len(shape) < 3:
        return rand(*shape, **given)
    *lead, heads, length, dim = shape
    return rand(*lead, length, 3, heads, dim, **given)[..., 1, :, :].transpose(-2, -3)


LAYOUTS = {
    "contiguous": in_memory(()),
    "tokens": in_memory((-2, -3, -1)),
    "sequence-first": in_memory((-2, -4, -3, -1)),
    "heads-first": in_memory((-3, -4, -2, -1)),
    "heads-sequence": in_memory((-3, -2, -4, -1)),
    "sequence-heads": in_memory((-2, -3, -4, -1)),
    "column-major": in_memory((-1, -2)),
    "gaps": in_memory((), pad=3),
    "tokens-gaps": in_memory((-2, -3, -1), pad=3),
    "one-projection": of_one_projection,
    "one-head-expanded": expanded(-3),
    "one-item-expanded": expanded(-4),
    "one-row-expanded": expanded(-2),
}
FORMS = {  # q, k, v
    "2-D": ((5, 4), (7, 4), (7, 4)),
    "3-D": ((3, 5, 4), (3, 7, 4), (3, 7, 4)),
    "4-D": ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)),
    "5-D": ((2, 2, 3, 5, 4), (2, 2, 3, 7, 4), (2, 2, 3, 7, 4)),
    "6-D": ((2, 1, 2, 3, 5, 4), (2, 1, 2, 3, 7, 4), (2, 1, 2, 3, 7, 4)),
    "more-rows": ((2, 3, 9, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    "square": ((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    "one-item": ((1, 3, 5, 4), (1, 3, 7, 4), (1, 3, 7, 4)),
    "one-head": ((2, 1, 5, 4), (2, 1, 7, 4), (2, 1, 7, 4)),
    "one-row": ((2, 3, 1, 4), (2, 3, 7, 4), (2, 3, 7, 4)),
    "one-column": ((2, 3, 5, 1), (2, 3, 7, 1), (2, 3, 7, 1)),
    "wide-values": ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
    "key-heads-broadcast": ((2, 3, 5, 4), (2, 1, 7, 4), (2, 1, 7, 4)),
    "key-heads-apart": ((2, 3, 5, 4), (2, 1, 7, 4), (2, 3, 7, 4)),
    "query-heads-broadcast": ((2, 1, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)),
    "key-items-broadcast": ((2, 3, 5, 4), (1, 3, 7, 4), (1, 3, 7, 4)),
    "value-items-broadcast": ((2, 3, 5, 4), (2, 3, 7, 4), (1, 3, 7, 4)),
    "query-items-broadcast": ((1, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)),
    "mixed-ranks": ((2, 3, 5, 4), (3, 7, 4), (7, 4)),
    "5-D-broadcast": ((2, 1, 3, 5, 4), (1, 2, 3, 7, 4), (2, 2, 1, 7, 4)),
    "grouped": ((2, 4, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)),
    "grouped-3-D": ((4, 5, 4), (2, 7, 4), (2, 7, 4)),
    "grouped-apart": ((2, 4, 5, 4), (2, 2, 7, 4), (2, 1, 7, 4)),
    "grouped-values-apart": ((2, 6, 5, 4), (2, 3, 7, 4), (2, 2, 7, 4)),
}
MASKS = {  # dimensions of a mask of scores (..., 3, 5, 7)
    "mask": (-2, -1),
    "mask-of-rows": (-2,),
    "mask-of-heads": (-3, -2, -1),
    "mask-of-heads-alone": (-3,),
    "mask-of-items": (-4, -1),
    "mask-of-all": (-4, -3, -2, -1),
}


def inputs(form, layout, others=None, dtype=torch.float64):
    makers = LAYOUTS[layout], *(2 * (LAYOUTS[others or layout],))
    each = enumerate(zip(makers, FORMS[form]))
    return [made(shape, seed=seed, dtype=dtype) for seed, (made, shape) in each]


def scores(form):
    q, k, v = FORMS[form]
    lead = (q[:-2],) if "grouped" in form else (q[:-2], k[:-2], v[:-2])
    return (*torch.broadcast_shapes(*lead), q[-2], k[-2])


def mask_of(form, name, kind):
    """A mask with the dimensions of MASKS[name]. None if the scores lack such a dimension."""
    dims, full = MASKS[name], scores(form)
    if -min(dims) > len(full):
        return None
    shape = [n if d in dims else 1 for d, n in zip(range(-len(full), 0), full)]
    mask = rand(*shape[min(dims) :], seed=9)
    if kind == "bool":
        return mask > -1
    return mask.float() if kind == "float32" else mask.requires_grad_(kind == "learned")


def options(form):
    return dict(enable_gqa=True) if "grouped" in form else {}


# ----------------------------------------------------------------------------------- the judgement


def strides(x):
    """Strides of dimensions with more than one element: other strides have no meaning."""
    return tuple(s for n, s in zip(x.shape, x.stride()) if n != 1) if x.numel() else ()


def is_transposed(x):
    return x.mT.is_contiguous() and not x.is_contiguous()


def judge_gradient(name, found, wanted):
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    # torch's math kernel returns some gradients in the transposed layout of a matrix product.
    if is_transposed(wanted) and found.is_contiguous():
        return
    assert strides(found) == strides(wanted), name


def run(function, tensors, mask, **given):
    """The results without and with gradients, and the gradients by autograd.grad."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    own = mask
    if mask is not None and mask.requires_grad:
        own = mask.detach().requires_grad_()
        leaves.append(own)
    with torch.no_grad():
        plain = function(*tensors, mask, **given)
    out = function(*leaves[:3], own, **given)
    dout = torch.ones(()).to(out).expand(out.shape)
    return plain, out, torch.autograd.grad(out, leaves, dout)


NAMES = ("query", "key", "value", "mask")


def compare(tensors, mask=None, **given):
    found, wanted = (run(f, tensors, mask, **given) for f in (ours, theirs))
    for a, b in zip(found[:2], wanted[:2]):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert strides(a) == strides(b), "out"
    for name, a, b in zip(NAMES, found[2], wanted[2]):
        judge_gradient(name, a, b)
    if "dropout_p" not in given and found[0].dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_layouts(form, layout):
    for others in ("contiguous", "tokens", "column-major", "one-head-expanded"):
        compare(inputs(form, layout, others), **options(form))
    for given in (dict(dropout_p=0.5), dict(is_causal=True, scale=0.3)):
        compare(inputs(form, layout), **given, **options(form))


@pytest.mark.parametrize("kind", ["bool", "float", "float32", "learned"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("form", [x for x in FORMS if x != "5-D-broadcast"])
def test_masks(form, name, kind):
    """No 5-D-broadcast: torch cannot add a mask in place to scores with fewer items than out."""
    if (mask := mask_of(form, name, kind)) is None:
        return
    for layout in ("contiguous", "tokens", "sequence-first", "one-projection"):
        compare(inputs(form, layout), mask, **options(form))


def test_a_mask_that_items_share_stays_one():
    """Kernels sum its gradient over the items, and torch does not sum expanded ones."""
    assert sdpa._merge_mask(torch.randn(1, 1, 2, 3, 4), (5, 6)).shape == (2, 3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype):
    for form, layout in itertools.product(("3-D", "4-D", "grouped", "wide-values"), LAYOUTS):
        compare(inputs(form, layout, dtype=dtype), **options(form))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_autocast(layout):
    """A cast to another dtype may change the layout, and torch may choose another kernel."""
    for form in ("3-D", "4-D", "grouped"):
        with torch.autocast("cpu", torch.bfloat16):
            compare(inputs(form, layout), **options(form))


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_bias(make):
    for layout in LAYOUTS:
        found, wanted = (f(*inputs("4-D", layout), make(5, 7)) for f in (ours, theirs))
        assert strides(found) == strides(wanted)


EMPTY = [((2, 3), 0, 7, 4, 4), ((2, 3), 5, 0, 4, 4), ((2, 3), 5, 7, 0, 4), ((2, 3), 5, 7, 4, 0)]
EMPTY += [((0, 3), 5, 7, 4, 4), ((2, 0), 5, 7, 4, 4), ((2, 0, 3), 5, 7, 4, 4)]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_empty_dimensions(sizes, is_causal):
    lead, L, S, E, Ev = sizes
    shapes = (*lead, L, E), (*lead, S, E), (*lead, S, Ev)
    given = [in_memory((-2, -3, -1))(x) for x in shapes]
    found, wanted = (run(f, given, None, is_causal=is_causal) for f in (ours, theirs))
    torch.testing.assert_close(found, wanted)
    assert [strides(x) for x in found[:2]] == [strides(x) for x in wanted[:2]]


@pytest.mark.parametrize("empty", range(4), ids=["B", "H", "M", "D"])
def test_strides_of_nothing(empty):
    """Strides of empty results contain no 0, as in torch, with every backend and tracer."""
    sizes = [0 if at == empty else n for at, n in enumerate((2, 3, 5, 4))]
    for layout in LAYOUTS:
        given = [LAYOUTS[layout](sizes) for _ in range(3)]
        with FakeTensorMode() as mode:
            fake = ours(*map(mode.from_tensor, given))
        for found in (ours(*given), fake):
            assert 0 not in found.stride(), layout
    q = rand(*sizes)
    assert ours(q, q, q).stride() == theirs(q, q, q).stride() == q.stride()


@pytest.mark.parametrize("form", FORMS)
def test_grad_of_leaves(form):
    """autograd copies gradients of leaves that have another layout than their leaf."""
    for layout in LAYOUTS:
        found = []
        for function in (ours, theirs):
            leaves = [x.requires_grad_() for x in inputs(form, layout)]
            function(*leaves, **options(form)).sum().backward()
            found.append([(x.grad.shape, strides(x.grad)) for x in leaves])
        assert found[0] == found[1], layout


def test_output_is_written_in_its_final_layout(monkeypatch):
    """The kernel writes the final layout, without a copy."""
    from fastattn.dispatch import dispatcher

    outs, call = [], dispatcher.call

    def spy(*args):
        outs.append(call(*args))
        return outs[-1]

    monkeypatch.setattr("fastattn.dropin.sdpa.call", spy)
    monkeypatch.setattr("fastattn.dispatch.fast_path.attend", lambda *args: None)
    for form, layout in itertools.product(("2-D", "3-D", "4-D", "5-D"), LAYOUTS):
        out = ours(*inputs(form, layout))
        assert out.data_ptr() == outs[-1][0].data_ptr()


def test_attention_keeps_its_own_layout():
    for layout in LAYOUTS:
        out = fastattn.attention(*inputs("4-D", layout))
        assert out.transpose(1, 2).is_contiguous()


# ------------------------------------------------------------------ without the eager kernels

SEEN = [  # every second is also compiled
    ("4-D", "contiguous", {}),
    ("4-D", "column-major", {}),
    ("4-D", "tokens", dict(is_causal=True)),
    ("4-D", "sequence-first", {}),
    ("4-D", "one-projection", {}),
    ("key-heads-broadcast", "tokens", {}),
    ("grouped", "tokens", dict(enable_gqa=True)),
    ("wide-values", "tokens", {}),
    ("3-D", "tokens", {}),
    ("3-D", "contiguous", {}),
    ("5-D", "tokens", {}),
    ("2-D", "contiguous", {}),
]
some = pytest.mark.parametrize("form, layout, given", SEEN, ids=lambda x: str(x) if x else "plain")


@some
def test_fake_and_meta_tensors(form, layout, given):
    wanted = theirs(*inputs(form, layout), **given)
    with FakeTensorMode() as mode:
        fake = ours(*map(mode.from_tensor, inputs(form, layout)), **given)
    meta = ours(*(x.to("meta") for x in inputs(form, layout)), **given)
    assert strides(fake) == strides(wanted)
    if layout != "one-projection":  # to("meta") drops gaps
        assert strides(meta) == strides(wanted)


@parametrize("form, layout, given", SEEN[::2], ids=lambda x: str(x) if x else "plain", fast=1)
def test_compiled(form, layout, given):
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    found, wanted = (run(f, inputs(form, layout), None, **given) for f in (compiled, theirs))
    for a, b in zip(found[:2], wanted[:2]):
        assert strides(a) == strides(b)
    for name, a, b in zip(NAMES, found[2], wanted[2]):
        judge_gradient(name, a, b)


@pytest.mark.slow
def test_compiled_with_symbolic_sizes():
    """A symbolic length, and views that need a contiguous result or one of tokens."""

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def call(q, k, v):
        return ours(q, k, v).view(-1, *q.shape[2:]), ours(
            *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        ).transpose(1, 2).view(q.shape[0], q.shape[2], -1)

    for length in (5, 9, 13):
        q = rand(2, 3, length, 4)
        for found in call(q, q, q):
            assert found.is_contiguous() and found.numel() == q.numel()


class Viewed(torch.nn.Module):
    def forward(self, q, k, v):
        return ours(q, k, v).view(6, 5, 4)


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    given = tuple(inputs("4-D", "contiguous"))
    program = torch.export.export(Viewed(), given, strict=strict)
    torch.testing.assert_close(program.module()(*given), theirs(*given).view(6, 5, 4))


def test_vmap():
    """vmap makes one call of a batch; views of each result work as without vmap."""
    given = [torch.stack([x, x, x]) for x in inputs("4-D", "contiguous")]
    found = torch.vmap(lambda q, k, v: ours(q, k, v).view(6, 5, 4))(*given)
    torch.testing.assert_close(found[1], theirs(*(x[1] for x in given)).view(6, 5, 4))


def test_jagged():
    rows = [rand(n, 4, 8, seed=n) for n in (3, 6)]
    q = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, wanted = (f(q, q, q) for f in (ours, theirs))
    assert found._ragged_idx == wanted._ragged_idx
    assert found.values().stride() == wanted.values().stride()
    torch.testing.assert_close(found.values(), wanted.values())
    assert (found + q).shape == q.shape == wanted.shape


def test_flash_is_excluded():
    """The layout is that of the kernel which torch would choose, also in compiled code."""
    given = inputs("4-D", "tokens")

    def both(*given):
        with sdpa_kernel(SDPBackend.MATH):
            return ours(*given), theirs(*given)

    for function in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        found, wanted = function(*given)
        assert strides(found) == strides(wanted) == strides(rand(2, 3, 5, 4))
