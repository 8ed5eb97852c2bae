"""torch's machinery around a call: autograd, compile, export, vmap, autocast, modes."""

import itertools
import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import api
from fastattn.backends import base
from fastattn.call.spec import Options, Tensors

BACKENDS = [name for name, why in fastattn.available_backends().items() if why is None]


@pytest.fixture(params=BACKENDS)
def attention(request):
    """fastattn.attention on one backend."""

    def run(*tensors, **kwargs):
        return fastattn.attention(*tensors, backend=request.param, **kwargs)

    run.backend = request.param
    return run


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)  # the tensors are tiny: threads would only wait for each other


def rand(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator)


def inputs(B=2, H=4, Hk=2, M=5, N=7, D=3, Dv=4, dtype=torch.float64):
    return tuple(
        rand(*shape, dtype=dtype, seed=seed)
        for seed, shape in enumerate([(B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv)])
    )


def everything(H=4, M=5, N=7, B=2, dtype=torch.float64, dropout_p=0.3):
    """Every feature in one call."""
    return dict(
        mask=rand(H, M, N, dtype=dtype, seed=7),
        causal="bottom_right",
        window=(4, None),
        key_lengths=torch.tensor([N, N - 2] * (B // 2) + [N] * (B % 2)),
        alibi_slopes=rand(B, H, dtype=dtype).abs(),
        softcap=2.0,
        sinks=rand(H, dtype=dtype),
        dropout_p=dropout_p,
        seed=11 if dropout_p else None,
        scale=0.7,
    )


# --------------------------------------------------------------------------------------- gradients

NAMES = ("q", "k", "v", "mask", "sinks")
SUBSETS = [s for n in range(1, 6) for s in itertools.combinations(NAMES, n)]


@pytest.mark.parametrize("wanted", SUBSETS, ids="+".join)
def test_gradcheck_of_every_subset_of_inputs(attention, wanted):
    q, k, v = inputs(B=1, H=2, Hk=1, M=3, N=4, D=2, Dv=3)
    rest = everything(H=2, M=3, N=4, B=1)
    tensors = dict(q=q, k=k, v=v, mask=rest.pop("mask"), sinks=rest.pop("sinks"))
    leaves = [tensors[name].requires_grad_() for name in wanted]

    def f(*leaves):
        given = tensors | dict(zip(wanted, leaves))
        return attention(given.pop("q"), given.pop("k"), given.pop("v"), **given, **rest,
                         return_lse=True)  # fmt: skip

    assert torch.autograd.gradcheck(f, leaves)


@pytest.mark.parametrize("what", ["lse", "out", "both"])
def test_gradient_of_a_loss_on_either_output(attention, what):
    q, k, v = (x.requires_grad_() for x in inputs())

    def loss(f):
        out, lse = f(q, k, v, causal=True, return_lse=True)
        terms = dict(lse=lse.sin().sum(), out=out.cos().sum())
        return sum(terms.values()) if what == "both" else terms[what]

    leaves = (q, k) if what == "lse" else (q, k, v)
    found = torch.autograd.grad(loss(attention), leaves)
    exact = torch.autograd.grad(loss(fastattn.reference.attention), leaves)
    for a, b in zip(found, exact):
        torch.testing.assert_close(a, b)


def test_a_loss_on_lse_alone_gives_v_a_gradient_of_zero(attention):
    q, k, v = (x.requires_grad_() for x in inputs())
    attention(q, k, v, return_lse=True)[1].sum().backward()
    assert v.grad.eq(0).all() and q.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "shape", [(5, 7), (4, 1, 7), (2, 1, 1, 7), (1, 4, 5, 1), (1,), (2, 4, 5, 7)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mask_gradient_has_the_masks_shape_and_dtype(attention, shape, dtype):
    q, k, v = inputs(dtype=torch.bfloat16)
    mask = rand(*shape, dtype=dtype).requires_grad_()
    attention(q, k, v, mask=mask).float().square().sum().backward()
    assert mask.grad.shape == mask.shape and mask.grad.dtype == dtype
    exact = mask.detach().double().requires_grad_()
    out = fastattn.reference.attention(q.double(), k.double(), v.double(), mask=exact)
    out.square().sum().backward()
    torch.testing.assert_close(mask.grad.double(), exact.grad, rtol=0.1, atol=0.1)


def test_outputs_and_gradients_are_token_major(attention):
    q, k, v = (x.requires_grad_() for x in inputs())
    out = attention(q, k, v)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for x in (out, *grads):
        assert x.transpose(1, 2).is_contiguous()


def test_expanded_and_transposed_gradients_coming_in(attention):
    q, k, v = (x.requires_grad_() for x in inputs())
    out = attention(q, k, v)
    dout = rand(out.shape[0], out.shape[1], out.shape[3], out.shape[2]).mT
    for g in (dout, torch.ones(()).double().expand(out.shape)):
        found = torch.autograd.grad(out, (q, k, v), g, retain_graph=True)
        exact = torch.autograd.grad(out, (q, k, v), g.contiguous(), retain_graph=True)
        for a, b in zip(found, exact):
            assert a.equal(b)


@pytest.mark.parametrize("constant", [False, True], ids=["whole", "constant_lse"])
@pytest.mark.parametrize("average", [False, True], ids=["heads", "mean"])
def test_gradcheck_of_weights(attention, average, constant):
    q, k, _ = inputs(B=1, H=2, Hk=1, M=3, N=4, D=2)
    rest = everything(H=2, M=3, N=4, B=1)
    leaves = [x.requires_grad_() for x in (q, k, rest.pop("mask"), rest.pop("sinks"))]
    fixed = dict(rest, backend=attention.backend, average_heads=average)
    if constant:
        fixed["lse"] = rand(1, 2, 3)

    def f(q, k, mask, sinks):
        return fastattn.attention_weights(q, k, mask=mask, sinks=sinks, **fixed)

    assert torch.autograd.gradcheck(f, leaves)


def test_weights_times_v_is_the_output(attention):
    q, k, v = inputs()
    rest = everything()
    weights = fastattn.attention_weights(q, k, **rest, backend=attention.backend)
    out = attention(q, k, v, **rest)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), out)
    mean = fastattn.attention_weights(q, k, **rest, average_heads=True, backend=attention.backend)
    torch.testing.assert_close(mean, weights.mean(1))


def test_weights_from_a_forward_pass_differentiate_the_normaliser(attention):
    q, k, v = (x.requires_grad_() for x in inputs())
    rest = everything() | dict(backend=attention.backend)
    _, normaliser = api.attend(q, k, v, **rest)
    found = api.weights_from(q, k, normaliser=normaliser, **rest)
    exact = fastattn.attention_weights(q, k, **rest)
    torch.testing.assert_close(found, exact)
    for a, b in zip(*(torch.autograd.grad(w.sin().sum(), (q, k)) for w in (found, exact))):
        torch.testing.assert_close(a, b)


# {operator suffix: {position of an argument: its name in errors}}.
READ = {
    "_backward": {
        0: "gradient of out",
        1: "gradient of normaliser",
        2: "out",
        3: "normaliser",
    },
    "_jvp": {5: "out", 6: "normaliser"},
    "_second": {
        5: "out",
        6: "normaliser",
        7: "out",
        8: "lse",
        9: "gradient of out",
        10: "gradient of lse",
    },
}
OTHERS = {
    "no rows": lambda x: x[..., :0, :] if x.ndim == 4 and x.shape[0] != 2 else x[..., :0],
    "fewer dimensions": lambda x: x[0],
    "another dtype": lambda x: x.half(),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("suffix, at", [(x, at) for x, of in READ.items() for at in of])
def test_operators_refuse_results_of_other_calls(suffix, at, other):
    """Kernels read saved results by the sizes of the call, so wrong shapes are refused."""
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 7, 7))
    t, o = api.prepare(q, k, v, dict(backend="cpu"))
    o = o._replace(grad=True)
    outs = torch.ops.fastattn.attention(*t, *o)
    out, lse = outs[0], outs[1][0]
    u, none = (q, None, None, None, None), (None,) * 2
    given = {
        "_backward": (*outs, *outs, *t, *o, ["q"]),
        "_jvp": (*u, *outs, *t, *o),
        "_second": (*u, *outs, out, lse, out, lse, *none, *t, *o, ["q"]),
    }[suffix]
    run = getattr(torch.ops.fastattn, "attention" + suffix)
    run(*given)
    wrong = (*given[:at], OTHERS[other](given[at]), *given[at + 1 :])
    with pytest.raises(ValueError, match=rf"^{READ[suffix][at]}(\.dtype)?: got .*, expected "):
        run(*wrong)


# ------------------------------------------------------------------------- what has no derivative


def test_weights_have_a_first_derivative_alone(attention):
    q, k, _ = inputs()

    def weights(q):
        return fastattn.attention_weights(q, k, backend=attention.backend)

    why = "attention_weights has a first derivative|does not support tangents"
    leaf = q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(weights(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=why):
        (dq.square().sum() + leaf.sum()).backward()
    with pytest.raises(NotImplementedError, match=why):
        jvp(weights, (q,), (q,))
    with pytest.raises(NotImplementedError, match=why):
        jvp(grad(lambda q: weights(q).square().sum()), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=why):
        weights(forward_ad.make_dual(q, q))


def test_create_graph_gives_the_same_first_gradients(attention):
    q, k, v = (x.requires_grad_() for x in inputs())
    out = attention(q, k, v, **everything())
    once = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    again = torch.autograd.grad(out.sum(), (q, k, v), create_graph=True)
    assert all(a.equal(b) for a, b in zip(once, again))


def test_forward_mode_through_the_operator_and_compiled_is_an_error_never_a_zero(attention):
    q, k, v = inputs()

    def f(q):
        return attention(q, k, v)

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="NotImplementedError"):
        torch.compile(lambda q: jvp(f, (q,), (q,))[1], fullgraph=True, backend="aot_eager")(q)
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    compiled(q)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="attention_jvp, which compiles"):
            compiled(dual)
        with pytest.raises(NotImplementedError, match="attention_jvp, which compiles"):
            arguments = op_arguments(False)
            dual = forward_ad.make_dual(arguments[0], arguments[0])
            torch.ops.fastattn.attention(dual, *arguments[1:])


# ------------------------------------------------------------------------------------- torch.func


def close(a, b):
    torch.testing.assert_close(a, b)


def test_func_grad_and_vjp_and_jacrev(attention):
    q, k, v = inputs(B=1, M=2, N=3)

    def loss(q, k, v, f=attention):
        return f(q, k, v, causal=True).sin().sum()

    for a, b in zip(
        grad(loss, argnums=(0, 1, 2))(q, k, v),
        grad(lambda *x: loss(*x, f=fastattn.reference.attention), argnums=(0, 1, 2))(q, k, v),
    ):
        close(a, b)
    pull = vjp(lambda q: attention(q, k, v), q)[1]
    exact = vjp(lambda q: fastattn.reference.attention(q, k, v), q)[1]
    g = rand(1, 4, 2, 4)
    close(pull(g)[0], exact(g)[0])
    close(
        jacrev(lambda q: attention(q, k, v))(q),
        jacrev(lambda q: fastattn.reference.attention(q, k, v))(q),
    )


MAPPED = ("q", "k", "v", "mask", "key_lengths", "alibi_slopes", "sinks")


def mapped_call(f, names, dropout_p=0.0):
    """One call per index of a new dimension of the named tensors, and the same by vmap."""
    q, k, v = inputs()
    rest = everything(dropout_p=dropout_p)
    fixed = {n: rest.pop(n) for n in ("causal", "window", "softcap", "dropout_p", "seed", "scale")}
    tensors = dict(q=q, k=k, v=v, **rest)
    stacked, dims = {}, {}
    for at, name in enumerate(names):
        x = tensors[name]
        others = [x.clamp(max=5), x] if x.dtype == torch.int64 else [x * 0.5, x + 0.25]
        dims[name] = at % (x.ndim + 1)  # the new dimension at various positions
        stacked[name] = torch.stack([x, *others], dim=dims[name])

    def one(chosen):
        given = tensors | chosen
        return f(given.pop("q"), given.pop("k"), given.pop("v"), **given, **fixed)

    def each():
        picks = [{n: x.select(dims[n], i) for n, x in stacked.items()} for i in range(3)]
        return torch.stack([one(pick) for pick in picks])

    return each, lambda: vmap(one, in_dims=(dims,))(stacked), one, stacked, dims


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("names", [MAPPED, MAPPED[:3], *((n,) for n in MAPPED)], ids="+".join)
def test_vmap_over_any_tensor(attention, names, dropout_p):
    each, mapped, *_ = mapped_call(attention, names, dropout_p)
    close(mapped(), each())


@pytest.mark.parametrize(
    "names", [MAPPED[:3], ("q", "mask"), ("sinks",), ("k", "sinks")], ids="+".join
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_vmap_of_grad(attention, names, dropout_p):
    _, _, one, stacked, dims = mapped_call(attention, names, dropout_p)
    _, _, exact, *_ = mapped_call(fastattn.reference.attention, names, dropout_p)
    found = vmap(grad(lambda x: one(x).sin().sum()), in_dims=(dims,))(stacked)
    for name in names:
        wanted = [
            grad(lambda x: exact(x).sin().sum())(
                {n: x.select(dims[n], i) for n, x in stacked.items()}
            )[name]
            for i in range(3)
        ]
        close(found[name], torch.stack(wanted))


def test_grad_through_vmap_and_nested_vmap(attention):
    q, k, v = inputs()
    qs = torch.stack([q, 2 * q, -q])

    def total(qs):
        return vmap(lambda q: attention(q, k, v))(qs).square().sum()

    exact = torch.stack([
        grad(lambda q: fastattn.reference.attention(q, k, v).square().sum())(q) for q in qs
    ])  # fmt: skip
    close(grad(total)(qs), exact)
    leaf = qs.clone().requires_grad_()
    total(leaf).backward()
    close(leaf.grad, exact)
    pairs = torch.stack([qs, qs + 1])
    found = vmap(vmap(lambda q: attention(q, k, v)))(pairs)
    close(found, torch.stack([torch.stack([attention(q, k, v) for q in row]) for row in pairs]))


def test_vmap_of_weights_and_their_gradient(attention):
    q, k, _ = inputs()
    qs = torch.stack([q, 2 * q])

    def weights(q):
        return fastattn.attention_weights(q, k, causal=True, backend=attention.backend)

    close(vmap(weights)(qs), torch.stack([weights(q) for q in qs]))
    f = grad(lambda q: weights(q).square().sum())
    close(vmap(f)(qs), torch.stack([f(q) for q in qs]))


def test_vmap_with_a_drawn_seed_follows_the_randomness_flag(attention):
    q, k, v = inputs()
    qs = torch.stack([q, q])

    def drop(q):
        return attention(q, k, v, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="random"):
        vmap(drop)(qs)
    a, b = vmap(drop, randomness="same")(qs)
    assert a.equal(b)
    a, b = vmap(drop, randomness="different")(qs)
    assert not a.equal(b)


def test_per_sample_gradients_of_a_module(attention):
    layer = torch.nn.Linear(4, 12, dtype=torch.float64)
    x = rand(3, 5, 4)

    def loss(parameters, x):
        q, k, v = functional_call(layer, parameters, x).view(1, 5, 3, 1, 4).unbind(2)
        return attention(*(y.transpose(1, 2) for y in (q, k, v))).square().sum()

    parameters = dict(layer.named_parameters())
    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        close(found["weight"][i], grad(loss)(parameters, x[i])["weight"])


# ------------------------------------------------------------------------- compile, export, opcheck


def op_arguments(grads=True, v=True, normaliser=False, average=False):
    q, k, value = inputs(dtype=torch.float32)
    mask, sinks = rand(4, 5, 7, dtype=torch.float32), rand(4, dtype=torch.float32)
    for x in (q, k, value, mask, sinks):
        x.requires_grad_(grads)
    given = rand(2, 2, 4, 5, dtype=torch.float32) if normaliser else None
    beside = dict(mask=mask, lengths=torch.tensor([7, 5]), sinks=sinks, seed=torch.tensor([3]))
    t = Tensors(q, k, value if v else None, **beside, normaliser=given)
    o = Options(scale=0.5, causal="top_left", left=4, softcap=2.0, dropout_p=0.25, grad=grads)
    return (*t, *o._replace(average_heads=average))


@pytest.mark.parametrize("grads", [False, True])
def test_opcheck(grads):
    torch.library.opcheck(torch.ops.fastattn.attention.default, op_arguments(grads))
    arguments = op_arguments(grads, v=False, normaliser=True)
    torch.library.opcheck(torch.ops.fastattn.weights.default, arguments)


def test_weights_by_a_given_lse_compile_as_one_graph_of_any_size():
    def both(q, k, v):
        out, lse = fastattn.attention(q, k, v, return_lse=True)
        return out, fastattn.attention_weights(q, k, lse=lse)

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for M in (5, 9, 11):  # from the second size on, the compiler makes M a symbol
        q, (_, k, v) = rand(2, 4, M, 3), inputs()
        for found, expected in zip(compiled(q, k, v), both(q, k, v)):
            torch.testing.assert_close(found, expected)


def test_opcheck_of_the_backward_operators():
    t = op_arguments(False)
    out, normaliser = torch.ops.fastattn.attention(*t)
    dout = torch.randn_like(out)
    for given, wants in (
        (None, ["q", "k", "v", "mask", "sinks"]),
        (normaliser, ["q", "v", "sinks"]),
    ):
        torch.library.opcheck(
            torch.ops.fastattn.attention_backward.default, (dout, given, out, normaliser, *t, wants)
        )
    t = op_arguments(False, v=False, normaliser=True, average=True)
    weights = torch.ops.fastattn.weights(*t)
    torch.library.opcheck(
        torch.ops.fastattn.weights_backward.default,
        (weights, weights, *t, ["q", "k", "mask", "sinks"]),
    )


def seen_by_autograd(f, tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = f(*leaves)
    return out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), leaves)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_fullgraph(attention, compiler):
    rest = everything(dtype=torch.float32)

    def f(q, k, v, mask, sinks):
        given = rest | dict(mask=mask, sinks=sinks)
        out, lse = attention(q * 1.5, k, v, **given, return_lse=True)
        return out * 2, lse

    tensors = (*inputs(dtype=torch.float32), rest["mask"], rest["sinks"])
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend=compiler)
    for a, b in zip(seen_by_autograd(compiled, tensors), seen_by_autograd(f, tensors)):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors)[0], f(*tensors)[0])


COMPILES = """
import torch, fastattn

def attention(q, k, v):
    return fastattn.attention(q, k, v, causal=True)

def weights(q, k, v):
    return fastattn.attention_weights(q, k)

leaves = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
for f in (attention, weights):
    expected = f(*leaves)
    found = torch.compile(f, fullgraph=True)(*leaves)
    torch.testing.assert_close(found, expected)
    pairs = ((x, leaves[:2], x.detach()) for x in (found, expected))
    torch.testing.assert_close(*(torch.autograd.grad(*x) for x in pairs))
"""


def test_inductor_keeps_the_operators_whole_where_the_environment_has_ci(tmp_path):
    """CI services set the variable CI: inductor then raises for an operator that has a
    decomposition but no lowering."""
    given = os.environ | dict(CI="true", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", COMPILES], capture_output=True, text=True, env=given
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_compile_with_dynamic_shapes_never_compiles_again(attention):
    def f(q, k, v):
        return attention(q, k, v, causal=True, return_lse=True)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    # The compiler would unify sizes that are equal by chance.
    for B, M, N in ((5, 11, 13), (7, 9, 17), (10, 12, 15)):
        tensors = inputs(B=B, M=M, N=N, Dv=6, dtype=torch.float32)
        for a, b in zip(seen_by_autograd(compiled, tensors), seen_by_autograd(f, tensors)):
            torch.testing.assert_close(a, b)
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1] > 0


def test_compile_draws_fresh_dropout_and_takes_seeds(attention):
    q, k, v = inputs(dtype=torch.float32)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(seed):
        return attention(q, k, v, dropout_p=0.5, seed=seed)

    assert not f(None).equal(f(None))
    assert f(5).equal(attention(q, k, v, dropout_p=0.5, seed=5))
    assert f(torch.tensor([5])).equal(f(5))


def test_compile_of_weights_and_sdpa():
    q, k, v = inputs(Hk=4, Dv=3, dtype=torch.float32)

    def f(q, k, v):
        weights = fastattn.attention_weights(q, k, causal=True, average_heads=True)
        return weights, fastattn.scaled_dot_product_attention(q[0], k[0], v, is_causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(q, k, v), f(q, k, v)):
        torch.testing.assert_close(a, b)


def test_compile_under_autocast(attention):
    q, k, v = inputs(dtype=torch.float32)

    def f(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, k, v)

    torch._dynamo.reset()
    out = torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v)
    assert out.dtype == torch.bfloat16 and out.equal(f(q, k, v))


@pytest.mark.parametrize("strict", [False, True])
def test_export(attention, strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True, window=(3, None))

    tensors = inputs(dtype=torch.float32)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Model(), tensors, dynamic_shapes=[{0: batch}] * 3, strict=strict)
    again = inputs(B=3, dtype=torch.float32)
    torch.testing.assert_close(
        program.module()(*again), attention(*again, causal=True, window=(3, None))
    )
    assert "fastattn.attention" in str(program.graph)


# ----------------------------------------------------------------------------- modes and subclasses


def test_modes_see_the_operator_and_fakes_compute_nothing(attention):
    q, k, v = inputs(dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        leaf = q.clone().requires_grad_()
        attention(leaf, k, v).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    by_name = {str(op): n for op, n in counts.items()}
    assert by_name["fastattn.attention"] == 2 * 2 * 4 * 5 * 7 * (3 + 4)
    assert by_name["fastattn.attention_backward"] == 2 * 2 * 4 * 5 * 7 * (3 * 3 + 2 * 4)

    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        out, lse = attention(*fakes, return_lse=True)
    assert out.shape == (2, 4, 5, 4) and lse.shape == (2, 4, 5)
    assert out.transpose(1, 2).is_contiguous()
    meta = attention(*(x.to("meta") for x in (q, k, v)))
    assert meta.is_meta and meta.shape == (2, 4, 5, 4)


def test_make_fx_and_jit_trace_record_a_call(attention):
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = inputs(dtype=torch.float32)

    def f(q, k, v):
        return attention(q, k, v, causal=True)

    other = q + 1
    graph = make_fx(f)(q, k, v)
    close(graph(other, k, v), f(other, k, v))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(f, (q, k, v))
    close(traced(other, k, v), f(other, k, v))


def test_lazily_negated_inputs_are_read_right(attention):
    z = torch.complex(*inputs(Hk=4, M=7, Dv=3)[1:])
    x = z.conj().imag
    assert x.is_neg()
    close(attention(x, x, x), attention(*(x.resolve_neg(),) * 3))


def test_parameters_and_inference_mode(attention):
    q, k, v = inputs()
    close(attention(torch.nn.Parameter(q), k, v), attention(q, k, v))
    with torch.inference_mode():
        inside = attention(q, k, v)
    close(inside.clone(), attention(q, k, v))
    attention(q.requires_grad_(), k, v).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_as_sdpa(attention, dtype):
    q, k, v = (x.requires_grad_() for x in inputs(Hk=4, Dv=3, dtype=torch.float32))
    mask = rand(5, 7, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        out = attention(q, k, v, mask=mask)
        theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        doubles = attention(q.double(), k.double(), v.double())
        mixed = attention(q, k.to(dtype), v.half())
    assert out.dtype == theirs.dtype == mixed.dtype == dtype and doubles.dtype == torch.float64
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=2e-2)
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_backward_inside_autocast_is_not_rounded(attention):
    q, k, v = (x.requires_grad_() for x in inputs(dtype=torch.float32))
    out = attention(q, k, v)
    outside = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    with torch.autocast("cpu"):
        inside = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(a.equal(b) for a, b in zip(inside, outside))


def test_autocast_does_not_reach_into_the_oracle():
    q, k, v = inputs(dtype=torch.float32)
    plain = fastattn.reference.attention(q, k, v)
    with torch.autocast("cpu"):
        assert fastattn.reference.attention(q, k, v).equal(plain)


# ----------------------------------------------------------------------------------------- the seed


def test_manual_seed_repeats_and_only_dropout_draws(attention):
    q, k, v = inputs()
    torch.manual_seed(3)
    first = attention(q, k, v, dropout_p=0.5)
    assert not first.equal(attention(q, k, v, dropout_p=0.5))
    torch.manual_seed(3)
    assert first.equal(attention(q, k, v, dropout_p=0.5))
    state = torch.get_rng_state()
    attention(q, k, v)
    attention(q, k, v, dropout_p=0.5, seed=1)
    assert state.equal(torch.get_rng_state())


@pytest.mark.parametrize("seed", [0, 5, -1, 2**63 - 1, 2**63 + 12345, 2**64 - 1, -(2**63)])
def test_a_seed_is_64_bits_in_any_form(attention, seed):
    q, k, v = inputs()
    as_int = attention(q, k, v, dropout_p=0.5, seed=seed)
    signed = seed - 2**64 if seed >= 2**63 else seed
    as_tensor = attention(q, k, v, dropout_p=0.5, seed=torch.tensor(signed))
    assert as_int.equal(as_tensor)
    close(as_int, fastattn.reference.attention(q, k, v, dropout_p=0.5, seed=seed))


def test_every_backend_is_registered_in_order_of_preference():
    assert base.names()[-1] == "reference" and base.names()[0] == "cpu"


# ----------------------------------------------------- checkpointing and hooks on saved tensors


def test_checkpointing_recomputes(attention):
    q = torch.randn(1, 2, 3, 4, requires_grad=True)

    def call(q):
        return fastattn.attention(q, q, q, backend=attention.backend)

    out = torch.utils.checkpoint.checkpoint(call, q, use_reentrant=False)
    (found,) = torch.autograd.grad(out.sum(), q)
    (expected,) = torch.autograd.grad(call(q).sum(), q)
    assert torch.equal(found, expected)


def test_saved_tensors_are_unpacked_once_each(attention):
    packed, unpacked = [], []
    q, k, v = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: packed.append(1) or x, lambda x: unpacked.append(1) or x
    )
    with hooks:
        out = fastattn.attention(q, k, v, backend=attention.backend)
    out.sum().backward()
    assert len(packed) == len(unpacked) == 5


def test_batched_gradients_of_an_eager_call(attention):
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    out = fastattn.attention(x, x, x, backend=attention.backend)
    batch = torch.randn(2, *out.shape, dtype=torch.float64)

    def pull(g):
        return torch.autograd.grad(out, x, g, retain_graph=True)[0]

    expected = torch.stack([pull(g) for g in batch])
    torch.testing.assert_close(vmap(pull)(batch), expected)
    (found,) = torch.autograd.grad(out, x, batch, is_grads_batched=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_module_passes_the_tracers_own_check():
    module = fastattn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    traced = torch.jit.trace(module, (x, x, x))
    torch.testing.assert_close(traced(x, x, x), module(x, x, x))
