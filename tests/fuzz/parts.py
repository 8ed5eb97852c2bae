"""The parts of the fuzzer. Each is a function that draws one call, makes it, and raises an
AssertionError if the result differs from the oracle's."""

import math
from contextlib import contextmanager

import torch
from torch.func import grad, jvp, vjp, vmap

import fastattn
from fastattn import reference
from fastattn.backends import base
from fastattn.call.spec import Feature
from tests.features import checking, factors
from tests.features.arguments import laid
from tests.integrations.test_flash_attn import agree as agree_with_gradients
from tests.integrations.test_flash_attn import leaves_of, offsets
from tests.integrations.test_flash_attn_cache import agree as agree_with_cache
from tests.integrations.test_flash_attn_cache import hide
from tests.semantics.test_weights import Averaged, ask, with_identity
from tests.support import cache_model, flash_attn_oracle, tangents
from tests.support.backends import FUSED, REASONS, variant, variants
from tests.support.cases import DTYPES
from tests.support.error_budget import Verdict

from . import draw

PARTS = {}


def part(function):
    PARTS[function.__name__] = function
    return function


class NoBackend(Exception):
    """No backend here supports a call: Triton in its interpreter has no float64."""


@contextmanager
def somewhere(rng, dtype, features=Feature.NONE):
    """Choose a backend that supports the dtype and the features, an instruction set of it and a
    number of threads. Yields the backend's name."""
    able = [
        name
        for name, why in REASONS.items()
        if not why
        and dtype in base.get(name).support.dtypes
        and not features & ~base.get(name).support.features
    ]
    if len(able) > 1 and rng.random() < 0.9:  # the reference backend is simpler: test it less
        able = [name for name in able if name != "reference"]
    if not able:
        raise NoBackend(f"got {dtype} and {features!r}, which no backend here supports")
    name = rng.choice(able)
    isa = rng.choice(variants(name, dtype))
    try:
        with threads(rng), variant(isa):
            yield name
    except Exception as error:
        error.add_note(f"on {isa or name}")
        raise


@contextmanager
def threads(rng):
    before, count = torch.get_num_threads(), rng.choice((1, 1, 1, 2, 3))
    torch.set_num_threads(count)
    try:
        yield
    except Exception as error:
        error.add_note(f"on {count} threads")
        raise
    finally:
        torch.set_num_threads(before)


def dtype_of(rng):
    return DTYPES[rng.choice([x for x in DTYPES if any_backend_has(DTYPES[x])])]


def any_backend_has(dtype):
    return any(dtype in base.get(x.values[0]).support.dtypes for x in FUSED)


def none(complaints):
    found = list(complaints)
    assert not found, " | ".join(map(str, found[:3]))


# --------------------------------------------------------------------------------------- the parts


def of_form(form):
    """A part that draws a call of this form."""

    def made(rng):
        row = draw.row(rng, form)
        ways = checking.ways(row)
        if not ways:
            raise NoBackend(f"got {row['dtype']}, which no backend here supports")
        with threads(rng):
            none(checking.complaints(form, row, rng.choice(ways)))

    PARTS[form] = made


for form in factors.FORMS:
    of_form(form)


@part
def weights(rng):
    """`attention_weights`, forward and backward."""
    dtype, average = dtype_of(rng), rng.random() < 0.5
    problem = draw.problem(rng, dtype, most=70)
    problem.kwargs.pop("return_lse", None)
    problem.dlse = None
    problem.needs_grad = tuple(x for x in problem.needs_grad if x != "v") or ("q",)
    problem = with_identity(problem, average)
    with somewhere(rng, dtype, Feature.WEIGHTS) as name:
        verdict = (Averaged if average else Verdict)(problem)
        none(verdict.about(ask(problem, name, average)))


@part
def passes_with_tangents(rng):
    """A backend's passes `jvp` and `second`, in every dtype."""
    dtype = dtype_of(rng)
    problem = draw.problem(rng, dtype, most=70, far=False)
    with somewhere(rng, dtype, Feature.TANGENTS) as name:
        given = tangents.directions(problem, draw.some(rng, problem.needs_grad))
        wanted = tangents.exact(problem, *given)
        none(tangents.complaints(name, problem, wanted, given, known=rng.random() < 0.5))


@part
def derivatives(rng):
    """Forward mode, and forward over reverse, of a call in float64, against torch's own derivatives
    of the oracle."""
    problem = draw.problem(rng, torch.float64, most=60, far=False)
    given = problem.tensors() | dict(return_lse=True)
    with somewhere(rng, torch.float64, Feature.TANGENTS) as name:
        same_derivatives(rng, given, problem.needs_grad, name)


def without(given, *names):
    return {name: x for name, x in given.items() if name not in names}


def same_derivatives(rng, given, needs_grad, name):
    """Results, their tangents, gradients and their tangents."""
    leaves = tuple(given[x].detach().clone() for x in needs_grad)
    generator = torch.Generator().manual_seed(rng.randrange(2**20))

    def like(x):
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)

    def of(function, **more):
        def f(*x):
            call = given | dict(zip(needs_grad, x)) | more
            q, k, v = (call.pop(n) for n in "qkv")
            return tuple(map(draw.finite, function(q, k, v, **call)))

        return f

    f = of(fastattn.attention, backend=name)
    expected = of(reference.attention)
    directions = tuple(map(like, leaves))
    incoming = tuple(map(like, expected(*leaves)))

    def gradients(function):
        return lambda *x: vjp(function, *x)[1](incoming)

    for title, mine, exact in (
        ("out and LSE", f, expected),
        ("gradients", gradients(f), gradients(expected)),
    ):
        found, wanted = jvp(mine, leaves, directions), jvp(exact, leaves, directions)
        for what, got, want in zip((title, f"tangents of {title}"), found, wanted):
            for x, y in zip(got, want, strict=True):
                close(x, y, what)


def close(x, y, what, tolerance=1e-9):
    """Compare x with y. The tolerance is relative to the largest |y|, or to 1."""
    assert x.shape == y.shape, f"{what}: got {tuple(x.shape)}, not {tuple(y.shape)}"
    x, y = x.double(), y.double()
    assert torch.equal(x.isnan(), y.isnan()), f"{what}: NaN in other places"
    if x.numel():
        error = (x - y).nan_to_num(0, 0, 0).abs().max().item()
        largest = max(1.0, y.nan_to_num(0, 0, 0).abs().max().item())
        assert error <= tolerance * largest, f"{what}: off by {error:.3g} beside {largest:.3g}"


@part
def vmapped(rng):
    """vmap of a call and of its gradients, over some of its tensors, against a loop; float64."""
    problem = draw.problem(rng, torch.float64, most=40, far=False)
    given = problem.tensors() | dict(return_lse=True)
    tensors = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
    n = rng.choice((1, 2, 3))
    along = {x: rng.randint(0, given[x].ndim) if rng.random() < 0.6 else None for x in tensors}
    if all(x is None for x in along.values()):
        along["q"] = 0
    generator = torch.Generator().manual_seed(rng.randrange(2**20))
    batched = {x: several(given[x], n, along[x], generator) for x in tensors}
    others = without(given, *tensors)

    def results(*x):
        call = others | dict(zip(tensors, x))
        q, k, v = (call.pop(name) for name in "qkv")
        return tuple(map(draw.finite, fastattn.attention(q, k, v, **call, backend=name)))

    def loss(*x):
        return sum(x.sin().sum() for x in results(*x))

    at = tuple(tensors.index(x) for x in problem.needs_grad)
    with somewhere(rng, torch.float64) as name:
        for what, f in (("results", results), ("gradients", grad(loss, at))):
            found = vmap(f, tuple(along.values()))(*batched.values())
            each = [
                f(*(x if along[t] is None else x.select(along[t], i) for t, x in batched.items()))
                for i in range(n)
            ]
            for x, y in zip(found, map(torch.stack, zip(*each)), strict=True):
                close(x, y, what)


def several(x, n, dim, generator):
    """n examples along a new dimension. Floating point examples differ, others are equal."""
    if dim is None:
        return x
    found = torch.stack([x] * n, dim)
    if x.is_floating_point():
        return found * (1 + torch.rand(found.shape, generator=generator, dtype=x.dtype))
    return found


@part
def sdpa(rng):
    """`scaled_dot_product_attention` of any rank, against torch's in float64."""
    dtype = rng.choice((torch.float32, torch.float64))
    lead = [rng.choice((1, 2, 3)) for _ in range(rng.randint(0, 3))]
    L, S, E, Ev = draw.size(rng, 70), draw.size(rng, 70), draw.head_dim(rng), draw.head_dim(rng)
    if not (L and S):
        return
    gqa = len(lead) > 0 and rng.random() < 0.3
    generator = torch.Generator().manual_seed(rng.randrange(2**20))

    def made(last, repeats=1):
        own = [x if gqa or rng.random() < 0.8 else 1 for x in lead]
        if gqa:
            own[-1] *= repeats
        x = torch.randn(*own, *last, generator=generator, dtype=torch.float64).to(dtype)
        return laid(x, rng.choice(("contiguous", "offset", "columns")))

    q, k, v = made((L, E), rng.choice((1, 2, 3))), made((S, E)), made((S, Ev))
    given = dict(scale=rng.choice((None, 0.3, -0.1)), enable_gqa=gqa)
    full = torch.broadcast_shapes(*(x.shape[:-2] for x in ((q,) if gqa else (q, k))))
    kind = rng.random()
    if kind < 0.3:
        given["is_causal"] = True
    elif kind < 0.8:
        shape = [n if rng.random() < 0.5 else 1 for n in (*full, L, S)][rng.randint(0, len(full)) :]
        mask = torch.rand(shape, generator=generator) < 0.7
        if rng.random() < 0.5:
            mask = torch.randn(shape, generator=generator).to(dtype).masked_fill(~mask, -math.inf)
        given["attn_mask"] = mask
    with somewhere(rng, dtype):
        dout = torch.randn(*_out_shape(q, k, v, gqa), generator=generator).to(dtype)

        def results(function, dtype):
            named = dict(zip(("query", "key", "value"), (q, k, v))) | given
            leaves = [n for n, x in named.items() if _is_real(x)]
            named |= {n: named[n].detach().to(dtype).requires_grad_() for n in leaves}
            out = function(**named)
            return out, *torch.autograd.grad(out, [named[n] for n in leaves], dout.to(out.dtype))

        # The part `dense` judges roundings. Here shapes and meanings are compared.
        tolerance = 1e-9 if dtype == torch.float64 else 1e-3
        found = results(fastattn.scaled_dot_product_attention, dtype)
        for x, y in zip(found, results(torchs, torch.float64), strict=True):
            close(x, y, "out and gradients", tolerance)


def _is_real(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _out_shape(q, k, v, gqa):
    lead = (q,) if gqa else (q, k, v)
    return *torch.broadcast_shapes(*(x.shape[:-2] for x in lead)), q.shape[-2], v.shape[-1]


def torchs(query, key, value, *, attn_mask=None, scale=None, is_causal=False, enable_gqa=False):
    """torch's math path. It takes no mask of fewer than two dimensions."""
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * max(0, 2 - attn_mask.ndim)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )


@part
def wrong_shapes(rng):
    """A tensor of another shape, in any call, is refused or broadcast; it never crashes."""
    dtype = dtype_of(rng)
    problem = draw.problem(rng, dtype, most=40)
    given = problem.tensors()
    tensors = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
    name = rng.choice(tensors)
    x = reshaped(rng, given[name].detach())
    given[name] = x
    q, k, v = (given.pop(n) for n in "qkv")
    with somewhere(rng, dtype) as backend_name:
        tensors = [x.detach().requires_grad_(x.is_floating_point()) for x in (q, k, v)]
        if "mask" in given and given["mask"].is_floating_point():
            given["mask"] = given["mask"].detach().requires_grad_()
            tensors.append(given["mask"])
        try:
            result = fastattn.attention(*tensors[:3], **given, backend=backend_name)
        except (ValueError, TypeError) as error:
            assert "expected" in str(error), error
            return
        outs = result if isinstance(result, tuple) else (result,)
        for leaf, x in zip(tensors, torch.autograd.grad(sum(map(total, outs)), tensors)):
            assert x.shape == leaf.shape


def reshaped(rng, x):
    """x in another shape: one dimension more, fewer, or of another size."""
    if x.ndim == 0:
        return x.expand(rng.randint(1, 3))
    dim = rng.randrange(x.ndim)
    return rng.choice(
        (
            lambda: x.unsqueeze(dim),
            lambda: x.flatten(0, dim),
            lambda: x.sum(dim) if x.dtype != torch.bool else x.any(dim),
            lambda: x.narrow(dim, 0, x.shape[dim] // 2),
            lambda: torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim),
            lambda: x.transpose(0, dim),
        )
    )()


def total(x):
    return draw.finite(x).sum()


@part
def cache_states(rng):
    """`KVCache` and its forks as a state machine, against a model."""
    with somewhere(rng, torch.float32):
        cache_model.run(rng.randrange(2**32), steps=25)


# ------------------------------------------------------------------------------- flash-attn's API


def flash_arguments(rng, B, H):
    found = dict(causal=rng.random() < 0.5)
    if rng.random() < 0.4:
        found["window_size"] = rng.choice((-1, 0, 3, 17)), rng.choice((-1, 0, 2, 9))
    if rng.random() < 0.3:
        found["softcap"] = rng.choice((0.0, 1.5, 30.0))
    if rng.random() < 0.3:
        slopes = torch.rand(rng.choice(((H,), (B, H))), generator=seeded(rng))
        found["alibi_slopes"] = slopes
    if rng.random() < 0.3:
        found["softmax_scale"] = rng.choice((0.1, 0.7))
    if rng.random() < 0.2:
        found["s_aux"] = torch.randn(H, generator=seeded(rng), dtype=torch.float64)
        found["s_aux"].requires_grad_()
    return found


def seeded(rng):
    return torch.Generator().manual_seed(rng.randrange(2**20))


def doubles(rng, *shape):
    return torch.randn(*shape, generator=seeded(rng), dtype=torch.float64)


@part
def flash_attn(rng):
    """flash-attn's functions in float64: dense, packed and with a cache."""
    from fastattn import flash_attn as fa

    Hk, D, Dv = rng.choice((1, 2, 3)), draw.head_dim(rng), draw.head_dim(rng)
    H = Hk * rng.choice((1, 1, 2, 4))
    with somewhere(rng, torch.float64):
        kind = rng.choice(("dense", "varlen", "cache"))
        if kind == "dense":
            B, M, N = rng.randint(1, 3), draw.size(rng, 70) + 1, draw.size(rng, 70) + 1
            shapes = (B, M, H, D), (B, N, Hk, D), (B, N, Hk, Dv)
            x = [doubles(rng, *shape).requires_grad_() for shape in shapes]
            given = flash_arguments(rng, B, H)
            out, lse, _ = fa.flash_attn_func(*x, return_attn_probs=True, **given)
            expected = flash_attn_oracle.dense(*x, **given)
            agree_with_gradients((out, lse), expected, leaves_of(x, given))
        elif kind == "varlen":
            B = rng.randint(1, 4)
            rows, keys = ([draw.size(rng, 70) for _ in range(B)] for _ in "qk")
            cu = offsets(rows), offsets(keys)
            T, S = sum(rows), sum(keys)
            if not (T and S):
                return
            x = [doubles(rng, *s).requires_grad_() for s in ((T, H, D), (S, Hk, D), (S, Hk, Dv))]
            given = flash_arguments(rng, B, H)
            where = *cu, max(rows), max(keys)
            out, lse, _ = fa.flash_attn_varlen_func(*x, *where, return_attn_probs=True, **given)
            expected = flash_attn_oracle.varlen(*x, *cu, **given)
            agree_with_gradients((out, lse), expected, leaves_of(x, given))
        else:
            agree_with_cache(flash_cache(rng, H, Hk, D, Dv))


def flash_cache(rng, H, Hk, D, Dv):
    """Arguments of `flash_attn_with_kvcache`, with NaN where the caches have no key."""
    B, M = rng.randint(1, 3), rng.randint(1, 20)
    capacity = rng.randint(1, 90)
    new = rng.choice((0, 0, 1, M))
    new = new if new <= capacity else 0
    lengths = torch.tensor([rng.randint(0, capacity - new) for _ in range(B)], dtype=torch.int32)
    given = dict(cache_seqlens=lengths)
    items, page = B, capacity
    layout = rng.choice(("plain", "batch_idx", "leftpad", "pages"))
    if layout == "batch_idx":
        items = B + 2
        given["cache_batch_idx"] = torch.tensor(rng.sample(range(items), B), dtype=torch.int32)
    if layout == "leftpad":
        pads = [rng.randint(0, int(n)) for n in lengths]
        given["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
    if layout == "pages":
        page = rng.choice((1, 7, 16, 64))
        used = [-(-(int(n) + new) // page) for n in lengths]
        items = sum(used) + 2
        order = iter(rng.sample(range(items), items))
        table = torch.full((B, max(*used, 1)), -(10**6), dtype=torch.int32)
        for b, n in enumerate(used):
            table[b, :n] = torch.tensor([next(order) for _ in range(n)], dtype=torch.int32)
        given["block_table"] = table
    k_cache, v_cache = doubles(rng, items, page, Hk, D), doubles(rng, items, page, Hk, Dv)
    hide(k_cache, v_cache, given, lengths)
    if new:
        given |= dict(k=doubles(rng, B, new, Hk, D), v=doubles(rng, B, new, Hk, Dv))
        if D >= 4 and rng.random() < 0.5:
            half = rng.randint(1, D // 2)
            angles = 6 * doubles(rng, capacity + M + new, half)
            given |= dict(rotary_cos=angles.cos(), rotary_sin=angles.sin())
            given["rotary_interleaved"] = rng.random() < 0.5
    arguments = flash_arguments(rng, B, H)
    if "s_aux" in arguments:
        arguments["s_aux"] = arguments["s_aux"].detach()
    return given | dict(q=doubles(rng, B, M, H, D), k_cache=k_cache, v_cache=v_cache) | arguments
