"""norm_rope against its float64 oracle, on every instruction set, and the ways of a call."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import fastattn
from fastattn import reference
from fastattn.rotation import form, passes
from tests.features.covering import array
from tests.support.backends import not_interpreted, variant, variants
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), not_interpreted]

# What a call is made of. D 13 fills no vector, 40 the narrow ones alone; B M is more than a task.
FACTORS = {
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "norm": (None, "rms", "layer"),
    "weights": ("both", "none", "q", "bfloat16"),
    "offset": (0.0, 1.0),
    "pairs": ("half", "interleaved", "deinterleave"),
    "D": (64, 13, 40, 2, 128, 96),
    "R": ("all", "start", "end", "2", "none"),
    "rope_first": (False, True),
    "layout": ("heads", "tokens", "fused", "columns"),
    "tables": ("rows", "items", "transposed", "double", "wide"),
    "sizes": ((2, 4, 37), (1, 1, 1), (1, 3, 130), (3, 17, 5)),
    "k": ("grouped", "absent", "equal"),
    "packed": (False, True),
}


def drawn(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def laid_out(x, layout):
    """x (B,H,M,D) with the same numbers, elsewhere in memory."""
    B, H, M, D = x.shape
    if layout == "tokens":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":  # a part of the columns of rows of all heads
        whole = x.new_zeros(B, M, 2 * H + 1, D + 3)
        part = whole[:, :, 1 : H + 1, 2 : D + 2].transpose(1, 2)
    elif layout == "columns":
        part = x.new_zeros(B, D, H, M).permute(0, 2, 3, 1)
    else:
        return x
    part.copy_(x)
    return part


def made(dtype, norm, weights, offset, pairs, D, R, rope_first, layout, tables, sizes, k, packed):
    """The arguments of a call: (tensors by name, options), or None where there is nothing to do."""
    B, H, M = sizes
    B = 1 if packed else B
    kind = getattr(torch, dtype)
    columns = {"all": D // 2 * 2, "start": D // 4 * 2, "end": D // 4 * 2, "2": 2, "none": 0}[R]
    if not columns and norm is None and weights == "none":
        return None
    given = {"q": laid_out(drawn((B, H, M, D), 1).to(kind), layout)}
    if k != "absent":
        Hk = H if k == "equal" else (H + 1) // 2
        given["k"] = laid_out(drawn((B, Hk, M, D), 2).to(kind), layout)
    of = torch.bfloat16 if weights == "bfloat16" else kind
    if weights != "none":
        given["q_weight"] = drawn((D,), 3).to(of)
        if weights != "q" and k != "absent":
            given["k_weight"] = drawn((2 * D,), 4).to(of)[::2]
    options = {"norm": norm, "weight_offset": offset if weights != "none" else 0.0, "eps": 0.01}
    if columns:
        items = tables == "items" and not packed
        angle = drawn((B, M, columns // 2) if items else (M, columns // 2), 5) * 3
        cos, sin = angle.cos() * 1.5, angle.sin() * 1.5
        if tables == "transposed":
            cos, sin = (x.mT.contiguous().mT for x in (cos, sin))
        if tables == "wide":  # as transformers' tables: the same angles twice
            cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
            options["rotary_dim"] = columns
        kind = torch.float64 if tables == "double" else torch.promote_types(kind, torch.float32)
        given |= {"cos": cos.to(kind), "sin": sin.to(kind)}
        options["rotary_start"] = D - columns if R == "end" else D // 4 if R == "2" else 0
        options |= {"interleaved": pairs != "half", "deinterleave": pairs == "deinterleave"}
        options["rope_first"] = rope_first
        options["rotary_start"] = min(options["rotary_start"], D - columns)
    if packed:
        given |= {x: given[x].squeeze(0).transpose(0, 1) for x in ("q", "k") if x in given}
        given["cu_q"] = torch.tensor([0, 0, M // 3, M // 3 + M // 2, M], dtype=torch.int32)
    return given, options


DRAWN = [row for seed in range(3) for row in array(FACTORS, lambda *pair: False, seed=seed)]
ROWS = [row for row in DRAWN if made(**row) is not None]


def results_and_gradients(call, given, options, wide=False):
    """What a call returns, and the gradients of all but tables, for gradients from a seed."""
    leaves = {}
    for name, x in given.items():
        x = x.double() if wide and x.is_floating_point() else x.detach()
        differs = x.is_floating_point() and name not in ("cos", "sin")
        leaves[name] = x.requires_grad_() if differs else x
    found = call(**leaves, **options)
    found = found if isinstance(found, tuple) else (found,)
    grads = [drawn(y.shape, 9 + i).to(given["q"].dtype).to(y) for i, y in enumerate(found)]
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    return [*found, *torch.autograd.grad(found, list(wanted.values()), grads)], [
        *(f"out{i}" for i in range(len(found))),
        *(f"d{name}" for name in wanted),
    ]


def compare(given, options, call=fastattn.norm_rope):
    """Within a few roundings of the largest number; 16-bit results are rounded once."""
    got, names = results_and_gradients(call, given, options)
    right, _ = results_and_gradients(reference.norm_rope, given, options, wide=True)
    for name, x, y in zip(names, got, right):
        assert x.shape == y.shape, name
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        exact = torch.finfo(wide).eps * max(1.0, y.abs().max().item() if y.numel() else 0)
        rounding = y.abs() * torch.finfo(x.dtype).eps / 2
        excess = (
            (x.double() - y).abs() - rounding * (1 + 1e-3) - exact * (40 if name[0] == "d" else 8)
        )
        tiny = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
        worst = excess.max().item() if excess.numel() else 0
        assert worst <= tiny, f"{name}: {worst:.3e} above the budget"


EVERY = range(8)  # parts of the rows
PARTS = [*zip(itertools.cycle(variants("cpu")), EVERY)]
PARTS += [x for x in itertools.product(variants("cpu"), EVERY) if x not in PARTS]


@parametrize("isa, part", PARTS, fast=len(EVERY))
def test_values_and_gradients(isa, part):
    with variant(isa):
        for row in ROWS[part :: len(EVERY)]:
            try:
                compare(*made(**row))
            except Exception as error:
                raise AssertionError(f"{isa} {row}") from error


def test_the_oracle_is_the_formulas():
    """torch's norms, and rotation as a product of complex numbers."""
    x, w = drawn((2, 3, 5, 8), 1), drawn((8,), 2)
    ours = reference.norm_rope(x, q_weight=w, eps=0.1)
    torch.testing.assert_close(ours, F.rms_norm(x, (8,), w, 0.1))
    ours = reference.norm_rope(x, norm="layer", eps=0.1)
    torch.testing.assert_close(ours, F.layer_norm(x, (8,), eps=0.1))
    angle = drawn((5, 4), 3)
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2)))
    turned = turned * torch.polar(torch.ones(5, 4), angle.float())
    beside = torch.view_as_real(turned).flatten(-2)
    tables = angle.float().cos().double(), angle.float().sin().double()
    got = reference.norm_rope(x, None, *tables, interleaved=True)
    torch.testing.assert_close(got, beside, atol=1e-6, rtol=1e-6)
    got = reference.norm_rope(x, None, *tables, interleaved=True, deinterleave=True)
    apart = torch.cat([beside[..., ::2], beside[..., 1::2]], -1)
    torch.testing.assert_close(got, apart, atol=1e-6, rtol=1e-6)
    halves = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    torch.testing.assert_close(reference.norm_rope(halves, None, *tables), got)


def call_of(dtype=torch.float32, B=2, H=4, Hk=2, M=70, D=64, **options):
    angle = drawn((M, D // 2), 5)
    given = {
        "q": drawn((B, H, M, D), 1).to(dtype),
        "k": drawn((B, Hk, M, D), 2).to(dtype),
        "cos": angle.cos().float(),
        "sin": angle.sin().float(),
        "q_weight": drawn((D,), 3).to(dtype),
        "k_weight": drawn((D,), 4).to(dtype),
    }
    return given, options


@pytest.mark.parametrize("layout", ["heads", "tokens"])
def test_threads_change_no_bit(threads, layout):
    given, options = call_of(H=8, M=300)
    given |= {x: laid_out(given[x], layout) for x in "qk"}
    every = []
    for count in (1, 2, 3, 7):
        threads(count)
        every.append(results_and_gradients(fastattn.norm_rope, given, options)[0])
    for other in every[1:]:
        assert all(torch.equal(x, y) for x, y in zip(every[0], other))


@pytest.mark.parametrize("way", ["kernel", "negative", "no library"])
def test_results_and_gradients_lie_in_memory_as_their_inputs(way, monkeypatch):
    """Compiled programs rely on it: the operators say so."""
    given, options = call_of()
    given["q"] = laid_out(given["q"], "tokens")
    if way == "negative":
        given |= {x: torch._neg_view(given[x]) for x in "qk"}
    if way == "no library":
        monkeypatch.setattr(passes.libraries, "cpu_unavailable", lambda: "a test")
    got, names = results_and_gradients(fastattn.norm_rope, given, options)
    for name, x in zip(names, got):
        like = given["k" if name in ("out1", "dk") else "q"]
        assert "weight" in name or x.stride() == like.stride(), name


@pytest.mark.parametrize("way", ["kernel", "negative", "forward mode"])
def test_a_result_is_never_an_input(way):
    """Also where there is neither norm nor rotation: here of k."""
    q, k, weight = drawn((1, 2, 3, 4), 1), drawn((1, 2, 3, 4), 2), drawn((4,), 3)
    k = torch._neg_view(k) if way == "negative" else k
    before = k.clone()
    with torch.autograd.forward_ad.dual_level() if way == "forward mode" else nullcontext():
        got = fastattn.norm_rope(q, k, q_weight=weight)[1]
        assert torch.equal(got, before)
        got.zero_()
    assert torch.equal(k, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_special_values(dtype):
    """NaN and infinity stay in their row, and are torch's; zeros give zeros."""
    given, options = call_of(dtype, B=1, M=6, D=40)
    q = given["q"]
    q[0, 0, 0, 3], q[0, 1, 1, 2], q[0, 2, 2] = torch.nan, torch.inf, 0
    q[0, 3, 3] = 1e-3 * torch.finfo(dtype).smallest_normal
    q[0, 3, 4] = torch.finfo(dtype).max / 2
    for norm in (True, False):
        if not norm:
            given |= {"q_weight": None, "k_weight": None}
        got = fastattn.norm_rope(**given, **options)[0]
        rows = passes.Rows(**given, cu=None)
        name = "rms" if norm else ""
        one = form.Form(name, name, 1e-6, 0.0, 40, 0, False, False, False)
        right = form.composed(one, rows)[0]
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, right, equal_nan=True, rtol=tolerance, atol=tolerance)
        assert got[0, 0, 1].isfinite().all()
    assert torch.equal(got[0, 2, 2], torch.zeros(40, dtype=dtype))


def test_16_bits_are_rounded_once():
    """Eager torch rounds the norm, the products and their sum."""
    given, options = call_of(torch.bfloat16)
    wide = {name: x.double() for name, x in given.items()}
    right = reference.norm_rope(**wide)[0].bfloat16()
    got = fastattn.norm_rope(**given, **options)[0]
    assert (got != right).float().mean() < 1e-3


# --------------------------------------------------------------------------- out


@pytest.mark.parametrize("place", ["apart", "in place", "crossed", "overlapping"])
def test_out(place):
    given, options = call_of(B=1, H=2, Hk=2)
    right = fastattn.norm_rope(**given, **options)
    if place == "apart":
        out = torch.empty_like(right[0]), torch.empty_like(right[1])
    elif place == "in place":
        out = given["q"], given["k"]
    elif place == "crossed":
        out = given["k"], given["q"]
    else:  # rows of q, one further
        memory = torch.zeros(2 * 71 * 64)
        given["q"] = memory[:-128].view(1, 2, 70, 64).copy_(given["q"])
        out = memory[64 : 64 + 2 * 70 * 64].view(1, 2, 70, 64), torch.empty_like(right[1])
    versions = [x._version for x in out]
    assert fastattn.norm_rope(**given, **options, out=out) is out
    assert all(torch.equal(x, y) for x, y in zip(out, right))
    assert all(x._version > before for x, before in zip(out, versions))


def parts_of_one_memory(memory):
    """q, k and the options of calls with out=(q, k), by name, and if all are written directly.

    memory: numbers for all of them.
    """
    fused = memory[: 70 * 6 * 64].view(1, 70, 6, 64).transpose(1, 2)
    rows = memory[: 70 * 5 * 64].view(1, 5, 70, 64)
    q = fused[:, :4]
    return {
        "fused": (q, fused[:, 4:], {}, True),
        "apart": (rows[:, :3], rows[:, 3:], {}, True),
        "a head of both": (q, fused[:, 3:5], {}, False),
        "heads of both": (rows[:, :3], rows[:, 2:], {}, False),
        "a row further": (q[:, :, :-1], q[:, :, 1:], {}, False),
        "one": (q, q, {}, False),
        "weight": (q, fused[:, 4:], {"q_weight": q[0, 0, 0]}, False),
        "tables": (q, fused[:, 4:], dict.fromkeys(("cos", "sin"), q[0, 0, :, :32]), False),
    }


@pytest.mark.parametrize("name", parts_of_one_memory(torch.empty(70 * 6 * 64)))
def test_out_in_one_memory(name, monkeypatch):
    """Inputs that share memory with what is written keep their values until all are read."""
    memory = drawn((70 * 6 * 64,), 1).float()
    right = memory.clone()
    q, k, options, _ = parts_of_one_memory(right)[name]
    options = {"norm": "rms", "eps": 0.1} | options
    for x, y in zip((q, k), fastattn.norm_rope(q, k, **options)):
        x.copy_(y)
    q, k, own, direct = parts_of_one_memory(memory)[name]
    addresses, forward = [], passes.kernel.forward

    def seen(form, rows, outs):
        addresses.extend(x.data_ptr() for x in outs)
        forward(form, rows, outs)

    monkeypatch.setattr(passes.kernel, "forward", seen)
    fastattn.norm_rope(q, k, **options | own, out=(q, k))
    assert torch.equal(memory, right)
    assert direct == (addresses == [q.data_ptr(), k.data_ptr()])


def test_out_of_a_packed_batch():
    given, options = call_of(B=1)
    given |= {x: given[x].squeeze(0).transpose(0, 1).contiguous() for x in "qk"}
    given["cu_q"] = torch.tensor([0, 30, 70])
    right = fastattn.norm_rope(**given, **options)
    out = given["q"], given["k"]
    fastattn.norm_rope(**given, **options, out=out)
    assert all(torch.equal(x, y) for x, y in zip(out, right))


# --------------------------------------------------------------------------- torch's subsystems


def small(**more):
    given, options = call_of(torch.float64, B=1, H=2, Hk=1, M=2, D=4, **more)
    given |= {x: given[x].double() for x in ("cos", "sin")}
    return given, options


LEAVES = "q", "k", "q_weight", "k_weight"
KINDS = {
    "rms": {"eps": 0.1, "weight_offset": 1.0},
    "layer after": {"norm": "layer", "rope_first": True, "eps": 0.1},
    "interleaved": {"interleaved": True, "eps": 0.1},
    "deinterleave": {"interleaved": True, "deinterleave": True, "eps": 0.1},
}


@parametrize("options", [pytest.param(x, id=name) for name, x in KINDS.items()], fast=2)
def test_second_derivatives(options):
    given, options = small(**options)
    leaves = [given[x].requires_grad_() for x in LEAVES]

    def call(*leaves):
        return fastattn.norm_rope(**given | dict(zip(LEAVES, leaves)), **options)

    assert torch.autograd.gradgradcheck(call, leaves)
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, check_batched_grad=True)


def test_second_derivatives_of_a_rotation_alone():
    given, _ = small()
    given = {x: given[x] for x in ("q", "k", "cos", "sin")}
    q, k = (given[x].requires_grad_() for x in "qk")

    def call(q, k):
        return fastattn.norm_rope(q, k, given["cos"], given["sin"])

    assert torch.autograd.gradgradcheck(call, (q, k))


@pytest.mark.parametrize("mapped", ["q", "cos", "sin", "tables", "q_weight", "all"])
def test_vmap(mapped):
    given, options = call_of(B=2, M=5, D=16)
    V = 3
    names = (*LEAVES, "cos", "sin") if mapped == "all" else (mapped,)
    names = ("cos", "sin") if mapped == "tables" else names
    several = {x: drawn((V, *given[x].shape), i).float() for i, x in enumerate(names)}

    def call(several):
        return fastattn.norm_rope(**given | several, **options)

    def sums(several):
        q, k = call(several)
        return q.sin().sum() + k.sin().sum()

    got = torch.func.vmap(call)(several)
    apart = [call({x: t[v] for x, t in several.items()}) for v in range(V)]
    for i in range(2):
        torch.testing.assert_close(got[i], torch.stack([x[i] for x in apart]))
    if mapped not in ("cos", "sin", "tables"):
        leaves = {x: t for x, t in several.items() if x in LEAVES}
        others = {x: t for x, t in several.items() if x not in LEAVES}

        def gradient(leaves, others):
            return torch.func.grad(lambda leaves: sums(leaves | others))(leaves)

        got = torch.func.vmap(gradient)(leaves, others)
        for v in range(V):
            one = [{x: t[v] for x, t in some.items()} for some in (leaves, others)]
            right = gradient(*one)
            for x in leaves:
                torch.testing.assert_close(got[x][v], right[x])


@pytest.mark.parametrize("packed", [False, True], ids=["items", "packed"])
@pytest.mark.parametrize("mapped", ["cos", "sin", "tables"])
def test_vmap_over_tables(mapped, packed):
    """As many items as heads, so that a table of the wrong dimension fits, too."""
    M, D, V = 5, 8, 3
    q, weight = drawn((M, V, D) if packed else (V, V, M, D), 1), drawn((D,), 2)
    cos, sin = drawn((V, M, D // 2), 3), drawn((V, M, D // 2), 4)
    cos, sin = cos if mapped != "sin" else cos[0], sin if mapped != "cos" else sin[0]
    options = {"eps": 0.1, "q_weight": weight}
    options["cu_q"] = torch.tensor([0, 2, 5]) if packed else None

    def together(q, forward_mode=False):
        def call(cos, sin):
            def rotated(q):
                return fastattn.norm_rope(q, None, cos, sin, **options)

            return torch.func.jvp(rotated, (q,), (q,))[1] if forward_mode else rotated(q)

        dims = tuple(0 if x.ndim == 3 else None for x in (cos, sin))
        return torch.func.vmap(call, in_dims=dims)(cos, sin)

    def apart(q):
        every = zip(cos.expand(V, M, D // 2), sin.expand(V, M, D // 2))
        return torch.stack([reference.norm_rope(q, None, *x, **options) for x in every])

    def derivatives(call):
        x = q.clone().requires_grad_()
        y = call(x)
        first = torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0]
        return y, first, torch.autograd.grad(first.cos().sum(), x)[0]

    torch.testing.assert_close(derivatives(together), derivatives(apart))
    torch.testing.assert_close(together(torch._neg_view(-q)), apart(q))
    right = torch.func.jvp(apart, (q,), (q,))[1]
    torch.testing.assert_close(together(q, forward_mode=True), right)


def test_hessian():
    given, options = small()

    def call(q):
        return fastattn.norm_rope(**given | {"q": q}, **options)[0].sin().sum()

    def oracle(q):
        return reference.norm_rope(**given | {"q": q}, **options)[0].sin().sum()

    q = given["q"]
    torch.testing.assert_close(torch.func.hessian(call)(q), torch.func.hessian(oracle)(q))
    got = torch.func.jacrev(torch.func.jacrev(call))(q)
    torch.testing.assert_close(got, torch.func.hessian(oracle)(q))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch.compiler.reset()

    @torch.compile(fullgraph=True, dynamic=dynamic)
    def call(**given):
        return fastattn.norm_rope(**{x: t * 1 for x, t in given.items()})

    for M in (5, 9) if dynamic else (5,):
        given, options = call_of(M=M, D=16)
        given["q"] = laid_out(given["q"], "tokens")
        got, _ = results_and_gradients(call, given, options)
        right, _ = results_and_gradients(fastattn.norm_rope, given, options)
        for x, y in zip(got, right):
            torch.testing.assert_close(x, y)
            assert x.stride() == y.stride()
        del given["q_weight"], given["k_weight"]
        got, _ = results_and_gradients(call, given, options)
        right, _ = results_and_gradients(fastattn.norm_rope, given, options)
        assert all(torch.equal(x, y) for x, y in zip(got, right))


def test_operators():
    given, _ = call_of(B=1, M=3, D=8)
    leaves = [given[x].requires_grad_() for x in ("q", "k")]
    rows = *leaves, given["cos"], given["sin"], given["q_weight"].requires_grad_(), None, None
    options = "rms", "", 1e-6, 1.0, 8, 0, False, False, False
    tests = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(torch.ops.fastattn.norm_rope, (*rows, *options), test_utils=tests)
    rows = leaves[0], None, given["cos"], given["sin"], rows[4], None, None
    of = torch.ones_like(leaves[0]), None, *rows, *options, True, False
    torch.library.opcheck(torch.ops.fastattn.norm_rope_backward, of, test_utils=tests)


@pytest.mark.parametrize("name", ["q", "q_weight"])
def test_subclasses_and_modes_see_the_call(name):
    seen = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

    given, options = call_of()
    right = fastattn.norm_rope(**given, **options)
    with torch.device("cpu"):  # a mode
        got = fastattn.norm_rope(**given, **options)
    assert torch.equal(got[0], right[0])
    given[name] = given[name].as_subclass(Own)
    seen.clear()
    got = fastattn.norm_rope(**given, **options)
    assert seen == [fastattn.norm_rope]
    torch.testing.assert_close(got[0].as_subclass(torch.Tensor), right[0])


def test_autocast_changes_nothing():
    given, options = call_of()
    right = fastattn.norm_rope(**given, **options)
    with torch.autocast("cpu", torch.bfloat16):
        got = fastattn.norm_rope(**given, **options)
    assert all(torch.equal(x, y) for x, y in zip(got, right))


def test_a_rotation_alone_keeps_its_tables_alone():
    given, _ = call_of()
    tables = {x: given[x] for x in ("cos", "sin")}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        fastattn.norm_rope(given["q"].requires_grad_(), given["k"], **tables)
    assert [x.shape for x in kept if x is not None] == [x.shape for x in tables.values()]


def test_without_the_library_torch_computes(monkeypatch):
    given, options = call_of(eps=0.01)
    right, _ = results_and_gradients(fastattn.norm_rope, given, options)
    monkeypatch.setattr(passes.libraries, "cpu_unavailable", lambda: "a test")
    got, _ = results_and_gradients(fastattn.norm_rope, given, options)
    for x, y in zip(got, right):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_result_without_a_gradient_does_not_require_one(leaf):
    given, options = call_of(torch.float64, M=5, D=8)
    x = given[leaf].requires_grad_()
    got, right = (f(**given, **options) for f in (fastattn.norm_rope, reference.norm_rope))
    assert [y.requires_grad for y in got] == [y.requires_grad for y in right]
    assert [y.requires_grad for y in got] == [leaf[0] == "q", leaf[0] == "k"]
    first, other = (
        torch.autograd.grad(y.sin().sum() + z.sin().sum(), x, create_graph=True)[0]
        for y, z in (got, right)
    )
    torch.testing.assert_close(first, other)
    got, right = (torch.autograd.grad(y.cos().sum(), x) for y in (first, other))
    torch.testing.assert_close(got, right)

    def total(call, x):
        return sum(y.sin().sum() for y in call(**given | {leaf: x}, **options))

    for transform in (torch.func.grad, torch.func.hessian):
        got = transform(lambda x: total(fastattn.norm_rope, x))(x)
        torch.testing.assert_close(got, transform(lambda x: total(reference.norm_rope, x))(x))


@pytest.mark.parametrize("axis", ["B", "H", "M"])
def test_nothing_to_do(axis):
    given, options = call_of(**{axis: 0})
    got, names = results_and_gradients(fastattn.norm_rope, given, options)
    for name, x in zip(names, got):
        assert x.shape == given.get(name[1:], x).shape
        assert not x.numel() or name in ("out1", "dk", "dq_weight", "dk_weight")
    if axis != "H":
        assert all(not x.any() for name, x in zip(names, got) if "weight" in name)


# --------------------------------------------------------------------------- errors

WAYS = {
    "kernel": lambda call, q: call(q),
    "forward mode": lambda call, q: torch.func.jvp(call, (q,), (q,)),
    "negative": lambda call, q: call(torch._neg_view(-q)),
    "vmap": lambda call, q: torch.func.vmap(call)(q[None]),
    "gradient": lambda call, q: torch.func.grad(lambda q: call(q).sum())(q),
}
OFFSETS = {
    "first": ([1, 5], "cu_q: got 1 first, expected 0"),
    "last": ([0, 4], "cu_q: got 4 last, expected 5, the rows of q"),
    "falling": ([0, 3, 2, 5], "cu_q: got 2 after 3, expected offsets that never fall"),
    "long": ([0, 0, 5], "got 5 rows in sequence 1, expected at most 4, the rows of cos"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("cu, text", OFFSETS.values(), ids=OFFSETS)
def test_wrong_offsets(cu, text, way):
    given = {"cos": torch.ones(4, 4), "sin": torch.ones(4, 4), "cu_q": torch.tensor(cu)}
    with pytest.raises(ValueError, match=text):
        way(lambda q: fastattn.norm_rope(q, **given), torch.ones(5, 2, 8))
    if "cos" not in text:
        del given["cos"], given["sin"]
        with pytest.raises(ValueError, match=text):
            way(lambda q: fastattn.norm_rope(q, norm="rms", **given), torch.ones(5, 2, 8))


CU = torch.tensor([0, 70])
WRONG = {
    "q": ({"q": torch.ones(2, 3)}, r"q: got shape \(2, 3\), expected \(B, H, M, D\)"),
    "packed q": ({"q": torch.ones(2, 3, 4)}, r"of a packed batch it is \(T, H, D\), with cu_q"),
    "no tensor": ({"q": [1.0]}, "q: got list, expected a torch.Tensor"),
    "dtype": ({"q": torch.ones(2, 4, 70, 64, dtype=torch.int64)}, "q.dtype: got torch.int64"),
    "k": ({"k": torch.ones(2, 2, 71, 64)}, r"k: got shape .*, expected \(2, 2, 70, 64\), as q"),
    "k's dtype": ({"k": torch.ones(2, 2, 70, 64).double()}, "k.dtype: got torch.float64, expected"),
    "weight": ({"q_weight": torch.ones(63)}, r"q_weight: got shape \(63,\), expected \(D,\)"),
    "weight of no k": ({"k": None}, "k_weight: got it without k, expected k too"),
    "one table": ({"sin": None}, "sin: got None beside cos, expected both or neither"),
    "rows of tables": ({"cos": torch.ones(69, 32), "sin": torch.ones(69, 32)}, "a row for each"),
    "sin": ({"sin": torch.ones(70, 31)}, r"sin: got shape \(70, 31\), expected \(70, 32\)"),
    "integer table": ({"cos": torch.ones(70, 32, dtype=torch.int32)}, "cos.dtype: got torch.int32"),
    "gradient of a table": ({"cos": torch.ones(70, 32, requires_grad=True)}, "have no gradient"),
    "odd": ({"rotary_dim": 3}, "rotary_dim: got 3, expected an even number from 2 to 64"),
    "many": ({"rotary_dim": 66}, "rotary_dim: got 66, expected an even number from 2 to 64"),
    "start": ({"rotary_start": 2}, "got columns 2 to 65, expected columns below 64"),
    "deinterleave": ({"deinterleave": True}, "expected interleaved=True beside it"),
    "norm": ({"norm": "batch"}, 'norm: got \'batch\', expected "rms", "layer" or None'),
    "eps": ({"eps": -1.0}, "eps: got -1.0, expected 0 or more"),
    "flag": ({"interleaved": 1}, "interleaved: got 1 .int., expected True or False"),
    "out": ({"out": torch.ones(2, 4, 70, 64)}, "out: got Tensor, expected a pair of tensors"),
    "offset alone": (
        {"q_weight": None, "k_weight": None, "weight_offset": 1.0},
        "weight_offset: got 1.0 without weights",
    ),
    "nothing": (
        dict.fromkeys(("q_weight", "k_weight", "cos", "sin")),
        "got no tables, no weight and no norm",
    ),
    "interleaved alone": ({"cos": None, "sin": None, "interleaved": True}, "True without cos"),
    "packed tables": (
        {"q": torch.ones(70, 4, 64), "k": None, "k_weight": None, "cu_q": torch.tensor([0, 71])},
        "cu_q: got 71 last, expected 70, the rows of q",
    ),
    "a long sequence": (
        {
            "q": torch.ones(70, 4, 64),
            **dict(k=None, k_weight=None, cu_q=CU, cos=torch.ones(9, 32), sin=torch.ones(9, 32)),
        },
        "cu_q: got 70 rows in sequence 0, expected at most 9, the rows of cos",
    ),
}


@pytest.mark.parametrize("changed, text", WRONG.values(), ids=WRONG)
def test_errors(changed, text):
    given, options = call_of()
    with pytest.raises((ValueError, TypeError), match=text):
        fastattn.norm_rope(**given | options | changed)


def test_tables_without_columns():
    given, options = call_of(eps=0.1)
    given |= {x: given[x][:, :0] for x in ("cos", "sin")}
    with pytest.raises(ValueError, match=r"cos: got shape \(70, 0\), expected a column or more"):
        fastattn.norm_rope(**given, **options)


def test_out_of_inference_mode():
    given, options = call_of()
    right = fastattn.norm_rope(**given, **options)
    with torch.inference_mode():
        out = torch.zeros_like(right[0]), torch.zeros_like(right[1])
        fastattn.norm_rope(**given, **options, out=out)
        assert all(torch.equal(x, y) for x, y in zip(out, right))
        out[0].zero_()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        fastattn.norm_rope(**given, **options, out=out)


def test_out_of_a_call_with_a_gradient():
    given, options = call_of()
    given["q"].requires_grad_()
    with pytest.raises(ValueError, match=r"out\[0\]: got it for a call with a gradient"):
        fastattn.norm_rope(**given, **options, out=(torch.empty(2, 4, 70, 64), given["k"]))


def test_equal_calls_are_checked_once_and_others_again():
    given, options = call_of()
    fastattn.norm_rope(**given, **options)
    for name, value in itertools.product(("interleaved", "rope_first"), (1, "yes")):
        with pytest.raises(TypeError, match=name):
            fastattn.norm_rope(**given | options | {name: value})
