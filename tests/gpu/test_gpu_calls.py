"""On a GPU: masks of every broadcast, dropout's draws, weights, and decoding with split keys."""

from dataclasses import replace

import pytest
import torch

import fastattn
from tests.semantics.test_weights import Averaged, ask, with_identity
from tests.support import naive
from tests.support.backends import declares
from tests.support.cases import FEATURE, FEATURES, PLAIN, Dims, name_of, negative_logits, square
from tests.support.error_budget import Verdict
from tests.support.gpu import (
    DEVICE,
    DIM,
    DTYPES,
    EVERYTHING,
    attend,
    build,
    check,
    compiled,  # noqa: F401  a fixture
    every_dtype,
    judged,
    on_device,
    on_every_backend,
    on_gpu,
)

pytestmark = [*on_gpu, pytest.mark.usefixtures("compiled")]

# ------------------------------------------------------------------------------------------- masks

# M, N: multiples of 16 but of no block, so strides of 0 and others compile to the same kernels.
SIZES = (2, 3, 80, 208)
BROADCASTS = [tuple(int(x) for x in f"{bits:04b}") for bits in range(16)]
BROADCASTS += [(1, 1, 1), (0, 1, 0), (1, 1), (0, 1), (1, 0), (1,), (0,), ()]


@pytest.mark.parametrize("pattern", BROADCASTS, ids=lambda x: "".join(map(str, x)) or "scalar")
@pytest.mark.parametrize("kind", ["bool", "grad", "float32_grad"])
@judged
def test_every_broadcast_of_a_mask(name, kind, pattern):
    """In `pattern`, 1 is a full dimension, 0 one of size 1; the gradient has the mask's shape."""
    shape = [n if own else 1 for n, own in zip(SIZES[4 - len(pattern) :], pattern, strict=True)]
    problem = build(Dims(2, 3, 3, 80, 208, 64, 64), (), torch.bfloat16)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    problem.kwargs["mask"] = {
        "bool": mask > -0.7,
        "grad": mask.bfloat16(),
        "float32_grad": mask,
    }[kind]
    problem.needs_grad += ("mask",) if kind != "bool" else ()
    problem.name += f":mask{shape}"
    check(name, [problem])


@pytest.mark.parametrize("kind", ["bool", "bias"])
@judged
def test_strided_masks(name, kind):
    """Masks that are views: transposed, stepped, offset, or expanded by hand."""
    big = torch.randn(2, 2, 200, 220, generator=torch.Generator().manual_seed(0))
    big = big > -0.5 if kind == "bool" else big.bfloat16()
    views = (
        big.transpose(2, 3)[:, :, :97, :103],
        big[:, :, 1:195:2, 5:211:2],
        big[:1, :1, 7:104, 3:106].expand(2, 2, -1, -1),
    )
    problems = []
    for view in views:
        problem = build(Dims(2, 2, 2, 97, 103, 64, 64), (), torch.bfloat16)
        problem.kwargs["mask"] = view
        problem.needs_grad += ("mask",) if kind == "bias" else ()
        problem.name += f":{view.stride()}"
        problems.append(problem)
    check(name, problems)


WANTS = [("q",), ("k",), ("v",), ("mask",), ("sinks",), ("q", "mask"), ("v", "sinks")]


@pytest.mark.parametrize("needs_grad", WANTS, ids="+".join)
@judged
def test_subsets_of_gradients(name, needs_grad):
    features = (FEATURE["bias_grad"], FEATURE["sinks"], FEATURE["causal"])
    problem = build(square(2, 2, 97, 64), features, torch.bfloat16)
    check(name, [replace(problem, needs_grad=needs_grad)])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@judged
def test_key_lengths_dtype_and_stride(name, dtype):
    problem = build(square(4, 2, 97, 64), (FEATURE["lengths"],), torch.bfloat16)
    lengths = problem.kwargs["key_lengths"].to(getattr(torch, dtype))
    stepped = torch.full((8,), 99, dtype=lengths.dtype)
    stepped[::2] = lengths
    check(name, [replace(problem, kwargs=dict(key_lengths=x)) for x in (lengths, stepped[::2])])


@every_dtype
@judged
def test_alibi_and_sinks_of_the_inputs_dtype(name, dtype):
    features = (FEATURE["alibi"], FEATURE["sinks"])
    problem = build(square(2, 2, 97, DIM[dtype]), features, DTYPES[dtype])
    for given in ("alibi_slopes", "sinks"):
        problem.kwargs[given] = problem.kwargs[given].to(DTYPES[dtype])
    check(name, [problem])


# ----------------------------------------------------------------------------------------- dropout


def revealed(name, seed, shape, p, dtype):
    """(B,H,M,N) bool: which weights the forward pass kept, and which the backward pass (M <= N).

    Queries of zero make every probability 1/N, v = I copies them to the output, and dout = I to
    dv, transposed.
    """
    batch, heads, m, n = shape
    options = dict(dtype=dtype, device=DEVICE)
    q, k = torch.zeros(batch, heads, m, 16, **options), torch.zeros(batch, heads, n, 16, **options)
    v = torch.eye(n, **options).expand(batch, heads, n, n).requires_grad_()
    out = fastattn.attention(q, k, v, dropout_p=p, seed=seed, backend=name)
    dout = torch.eye(m, n, **options).expand(batch, heads, m, n)
    (dv,) = torch.autograd.grad(out, v, dout)
    return out.detach().cpu() != 0, dv.mT[:, :, :m].cpu() != 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_every_backend
@pytest.mark.parametrize("p", [1e-3, 0.3, 0.5, 0.9])
def test_mask_is_philox_forward_and_backward(name, p, dtype):
    """Masks are bitwise equal, at sizes that are no multiple of a tile or of four keys."""
    declares(name, DTYPES[dtype])
    for seed in (0x1234_5678_9ABC_DEF0, -1, 3):
        for shape in ((2, 3, 99, 125), (2, 2, 5, 127)):
            want = naive.keep(seed, p, shape)
            forward, backward = revealed(name, seed, shape, p, DTYPES[dtype])
            assert torch.equal(forward, want), (seed, shape)
            assert torch.equal(backward, want), (seed, shape)


@on_every_backend
def test_weights_are_philox(name):
    shape, seed, p = (2, 2, 97, 331), -7, 0.3
    q, k = (torch.zeros(2, 2, n, 64, dtype=torch.bfloat16, device=DEVICE) for n in shape[2:])
    weights = fastattn.attention_weights(q, k, dropout_p=p, seed=seed, backend=name)
    assert torch.equal(weights.cpu() != 0, naive.keep(seed, p, shape))


@pytest.mark.parametrize("p", [0.01, 0.5, 0.99, 1.0])
@judged
def test_dropout_rates(name, p):
    problem = build(square(2, 2, 97, 64), (FEATURE["dropout"], FEATURE["gqa"]), torch.bfloat16)
    problem.kwargs["dropout_p"] = p
    check(name, [problem])


# ----------------------------------------------------------------------------------------- weights

WEIGHED = ("causal", "window", "lengths", "alibi", "softcap", "bool_mask", "key_bias_grad")
WEIGHED += ("bias_grad", "sinks", "dropout", "gqa", "no_scale", "column_major", "many_queries")
WEIGHED = [PLAIN, *((FEATURE[x],) for x in WEIGHED)]
WEIGHED += [tuple(FEATURE[x] for x in ("bottom_right", "lengths", "softcap", "dropout", "sinks"))]


AVERAGED = (0, 3, 7, 10, len(WEIGHED) - 1)  # plain, lengths, a bias of keys, dropout, several


@pytest.mark.parametrize(
    "at, average",
    [*((at, False) for at in range(len(WEIGHED))), *((at, True) for at in AVERAGED)],
    ids=lambda x: name_of(WEIGHED[x]) if type(x) is int else ("mean" if x else "per_head"),
)
@judged
def test_weights(name, at, average):
    """Weights per head or averaged, with gradients; each feature in one of the dtypes."""
    dtype = list(DTYPES)[at % 3]
    dims = [square(2, 2, 97, DIM[dtype])]
    if not at:
        dims.append(Dims(2, 4, 2, 129, 203, DIM[dtype], DIM[dtype]))
    problems = [with_identity(build(x, WEIGHED[at], DTYPES[dtype]), average) for x in dims]
    check(
        name,
        problems,
        run=lambda problem, name: ask(problem, name, average),
        verdict=Averaged if average else Verdict,
    )


@on_every_backend
def test_a_given_lse_gives_the_same_weights(name):
    problem = on_device(build(square(2, 2, 97, 64), (FEATURE["causal"],), torch.bfloat16))
    q, k, v = problem.q, problem.k, problem.v
    _, lse = fastattn.attention(q, k, v, causal=True, return_lse=True, backend=name)
    given = fastattn.attention_weights(q, k, lse=lse, causal=True, backend=name)
    found = fastattn.attention_weights(q, k, causal=True, backend=name)
    torch.testing.assert_close(given, found)
    ones = torch.ones(2, 2, 97, device=q.device)
    torch.testing.assert_close(given.float().sum(-1), ones, rtol=0, atol=2e-2)


# ---------------------------------------------------------------------------------------- decoding

# With few rows and many blocks of keys, the keys are split among programs.
DECODED = [PLAIN, *((f,) for f in FEATURES if f.group not in ("queries", "dout"))]
DECODED += [EVERYTHING]


@pytest.mark.parametrize("at", range(len(DECODED)), ids=lambda at: name_of(DECODED[at])[:40])
@judged
def test_decoding(name, at):
    """One, five and sixteen rows. bfloat16 and float16 alternate from feature to feature."""
    dtype = ("bfloat16", "float16")[at % 2]
    problems = [
        build(Dims(2, 4, 2, m, n, 64, 64), DECODED[at], DTYPES[dtype])
        for m, n in ((1, 1500), (5, 643), (16, 2111))
    ]
    if not any(f.group == "scale" for f in DECODED[at]):
        problems.append(negative_logits(problems[1]))
    check(name, problems)


@pytest.mark.parametrize("kind", ["plain", "causal", "everything"])
@judged
def test_decoding_in_float32(name, kind):
    features = {"plain": (), "causal": (FEATURE["bottom_right"],), "everything": EVERYTHING}[kind]
    dims = Dims(1, 2, 1, 1, 1500, 16, 16), Dims(1, 2, 1, 16, 2111, 16, 16)
    check(name, [build(x, features, torch.float32) for x in dims])


@pytest.mark.parametrize("causal", [False, "bottom_right"])
@pytest.mark.parametrize("window", [None, (300, 0), (40, 40)], ids=str)
@judged
def test_decoding_up_to_each_length(name, causal, window):
    """Some splits have no key, one has a single key, and a window begins inside another."""
    lengths = torch.tensor([1500, 0, 1, 63, 64, 65, 700, 1499])
    problems = []
    for m in (1, 7):
        problem = build(Dims(8, 4, 1, m, 1500, 64, 64), (FEATURE["lse_loss"],), torch.bfloat16)
        problem.kwargs |= dict(key_lengths=lengths, causal=causal, window=window)
        for b, length in enumerate(lengths.tolist()):
            problem.k[b, :, length:] = torch.nan
            problem.v[b, :, length:] = torch.nan
        problems += [problem, negative_logits(problem)]
    check(name, problems)


@on_every_backend
def test_decoding_agrees_with_many_rows(name):
    """The last row of a long call, computed alone by the decoding kernels, has the same values."""
    problem = on_device(build(Dims(2, 4, 2, 300, 1500, 64, 64), (), torch.bfloat16))
    options = dict(causal="bottom_right", return_lse=True, backend=name)
    q, k, v = problem.q, problem.k, problem.v
    out, lse = fastattn.attention(q, k, v, **options)
    last, last_lse = fastattn.attention(q[:, :, -1:], k, v, **options)
    torch.testing.assert_close(last, out[:, :, -1:], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(last_lse, lse[:, :, -1:], rtol=1e-5, atol=1e-5)


@on_every_backend
def test_a_call_without_gradients_is_the_same(name):
    problem = on_device(build(Dims(2, 4, 2, 5, 1500, 64, 64), EVERYTHING, torch.bfloat16))
    trained = attend(problem, name)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = problem.run(fastattn.attention, backward=False, backend=name)
        assert torch.equal(found["out"], trained["out"]), mode.__name__
