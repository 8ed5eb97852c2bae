"""Every backend, every feature and every pair of features, forward and backward, on every
instruction set, compared with the float64 oracle within the budget of `error_budget`."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fastattn
from fastattn.backends import base
from fastattn.call import spec
from tests.support.backends import (
    DECLARED,
    FUSED,
    declares,
    every_backend,
    every_dtype,
    everywhere,
    not_interpreted,
    passed,
    small,
    thinned,
)
from tests.support.cases import (
    DTYPES,
    FEATURE,
    PAIRS,
    PLAIN,
    SHAPES,
    SINGLES,
    TRIPLES,
    Dims,
    build,
    name_of,
    negative_logits,
    square,
)
from tests.support.edge_cases import SLICES
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")


def run_all(name, problems):
    passed([line for problem in problems for line in everywhere(name, Verdict(problem))])


def test_backend_is_here():
    """The CPU kernels are part of every build: their absence is a failure, not a skip."""
    assert fastattn.available_backends()["cpu"] is None


def test_cases_cover_the_declared_features():
    """A feature added to the declarations must be added to the cases."""
    required = spec.Feature.WEIGHTS | spec.Feature.GRAD  # tested by test_weights, and by every case
    # Tested by test_packed, test_paged, test_row_invariant, test_unrounded, test_storage and
    # test_int4.
    required |= spec.Feature.PACKED | spec.Feature.PAGED | spec.Feature.INVARIANT
    required |= spec.Feature.UNROUNDED | spec.Feature.PAGED_GRAD  # the latter by test_selected
    required |= spec.Feature.SCORE_MOD  # by test_functions_of_attention
    required |= spec.Feature.QUANTISED | spec.Feature.INT4
    required |= spec.Feature.TANGENTS  # by test_tangents
    for features in SINGLES:
        problem = build(SHAPES[1], features, torch.float32)
        given = problem.tensors()
        q, k, v = (given.pop(x) for x in "qkv")
        required |= fastattn.explain(q, k, v, **given).spec.features
    missing = [f.name for f in spec.Feature if f & ~required]
    assert not missing, f"no case in tests/support/cases.py for {missing}"


@pytest.mark.parametrize("name", base.names())
def test_a_feature_that_a_backend_does_not_name_is_declined(name):
    """A feature flag after all existing ones, like a new feature that no kernel has yet."""
    later = 2 * max(feature.value for feature in spec.Feature)
    sizes = dict(B=1, H=2, Hk=2, M=5, N=5, D=16, Dv=16)
    device = "cpu" if name == "cpu" else "cuda"
    call = spec.AttentionSpec(**sizes, dtype=torch.float16, device=device, scale=0.25)
    assert base.get(name).support.why_not(call) == []
    call.__dict__["features"] = SimpleNamespace(value=call.features.value | later)
    assert base.get(name).support.why_not(call) == [f"does not support feature {later:#x}"]


@every_dtype
@every_backend
@parametrize("features", [PLAIN, *SINGLES], ids=name_of, fast=6)
def test_features(name, dtype, features):
    declares(name, DTYPES[dtype])
    shapes = small(SHAPES, (square(1, 2, 5, 3), square(2, 2, 37, 17)))
    run_all(name, [build(dims, features, DTYPES[dtype]) for dims in shapes])


@every_backend
@parametrize("features, dtype", thinned(PAIRS, DECLARED), ids=name_of, fast=27)
def test_pairs_of_features(name, dtype, features):
    shapes = small(SHAPES, (square(1, 2, 37, 17),))
    run_all(name, [build(dims, features, DTYPES[dtype]) for dims in shapes])


@every_backend
@parametrize("features, dtype", thinned(TRIPLES, DECLARED), ids=name_of, fast=64)
def test_triples_of_features(name, dtype, features):
    shapes = small((square(2, 2, 63, 17), square(1, 1, 197, 32)), (square(2, 1, 37, 17),))
    run_all(name, [build(dims, features, DTYPES[dtype]) for dims in shapes])


@not_interpreted
@every_backend
@parametrize("which, dtype", list(itertools.product(SLICES, DECLARED)), fast=8)
def test_edge_cases(name, which, dtype):
    """Sizes that the other cases do not have."""
    run_all(name, SLICES[which](DTYPES[dtype]))


# Features that hide keys, combined with features that change the logits afterwards.
HIDING = ("causal", "bottom_right", "window", "left_window", "right_window", "own_key", "lengths")
HIDING += ("bool_mask", "padding_mask", "float_mask", "bias_grad", "one_query", "many_queries")
PROBED = [PLAIN, *((FEATURE[name],) for name in HIDING)]
PROBED += [
    (FEATURE[name], FEATURE[other])
    for name in HIDING
    for other in ("softcap", "alibi", "sinks", "dropout", "gqa", "lse_loss")
]


@every_backend
@parametrize("features, dtype", thinned(PROBED, DECLARED), ids=name_of, fast=32)
def test_hidden_keys_do_not_change_results(name, dtype, features):
    sizes = (square(1, 2, 13, 8), square(2, 2, 131, 16))
    dims = small(sizes, (square(1, 2, 13, 8), square(1, 1, 70, 16)))
    run_all(name, [negative_logits(build(x, features, DTYPES[dtype])) for x in dims])


BLOCKS = small((16, 32, 48, 64, 96, 128, 192, 256), (32, 64))
BLOCK_EDGES = [n + e for n in BLOCKS for e in (-1, 0, 1)]
BLOCK_SKIPPERS = ["plain", "causal", "bottom_right", "window", "lengths"]


@every_backend
@parametrize("features, dtype", thinned(BLOCK_SKIPPERS, DECLARED), fast=4)
def test_lengths_around_blocks(name, dtype, features):
    """M and N at the edge of a block, one more and one less."""
    chosen = () if features == "plain" else (FEATURE[features],)
    problems = []
    for at, n in enumerate(BLOCK_EDGES):
        m = BLOCK_EDGES[(at * 7 + 3) % len(BLOCK_EDGES)]
        problem = build(Dims(1, 1, 1, m, n, 16, 16), chosen, DTYPES[dtype])
        problems.append(negative_logits(problem) if at % 2 else problem)
    run_all(name, problems)


@every_backend
@parametrize("group, dtype", thinned(range(10), DECLARED), fast=7)
def test_every_head_dim(name, dtype, group):
    """D from 1 to 130, each with an equal and with a different Dv."""
    problems = []
    for dim in range(1 + 13 * group, 14 + 13 * group):
        for value_dim in (dim, 1 + (dim * 37) % 130):
            dims = Dims(1, 1, 1, 9, 11, dim, value_dim)
            problems.append(build(dims, (FEATURE["causal"],), DTYPES[dtype]))
    run_all(name, problems)


@every_backend
@parametrize("dim, dtype", thinned([192, 256, 257, 320, 511, 512], DECLARED), fast=18)
def test_large_head_dims(name, dtype, dim):
    limit = base.get(name).support.max_head_dim
    if dim > limit:
        pytest.skip(f"{name} declares head dims to {limit}")
    sizes = ((dim, dim), (dim, 3), (40, dim))
    problems = [
        build(Dims(1, 2, 1, 35, 70, d, dv), (FEATURE["causal"],), DTYPES[dtype]) for d, dv in sizes
    ]
    run_all(name, problems)


MASK_SHAPES = [tuple(4 if at == "1" else 1 for at in f"{bits:04b}") for bits in range(16)] + [
    (4, 4, 4),
    (1, 4, 1),
    (4, 4),
    (1, 4),
    (4, 1),
    (4,),
    (1,),
    (),
]
SIZES = dict(B=2, H=3, M=21, N=37)


def mask_shape(pattern):
    """A pattern of 4s (full size) and 1s, replaced by the real sizes."""
    sizes = list(SIZES.values())[4 - len(pattern) :]
    return tuple(size if at == 4 else 1 for at, size in zip(pattern, sizes, strict=True))


MASK_KINDS = ["bool", "same_dtype", "float32", "float32_grad", "grad"]


@every_backend
@parametrize("kind, dtype", thinned(MASK_KINDS, DECLARED), fast=2)
def test_every_broadcast_of_a_mask(name, dtype, kind):
    problems = []
    companions = ((), (FEATURE["causal"], FEATURE["dropout"], FEATURE["softcap"]))
    for at, pattern in enumerate(MASK_SHAPES):
        shape = mask_shape(pattern)
        for others in small(companions, companions[at % 2 :][:1]):
            problem = build(Dims(2, 3, 3, 21, 37, 8, 8), others, DTYPES[dtype])
            generator = torch.Generator().manual_seed(len(shape))
            mask = torch.randn(shape, generator=generator, dtype=torch.float64)
            if kind == "bool":
                mask = mask > -0.7
            else:
                mask = mask.to(torch.float32 if "float32" in kind else problem.q.dtype)
            problem.kwargs["mask"] = mask
            if kind.endswith("grad"):
                problem.needs_grad += ("mask",)
            problem.name += f":mask{list(shape)}"
            problems.append(problem)
    if dtype == "float64" and kind.startswith("float32"):
        problems = problems[:4]  # float64 takes float32 masks too, by the same path
    run_all(name, problems)


@every_backend
def test_strided_masks(name):
    """Views: transposed, with steps, with an offset, and expanded."""
    problems = []
    for at, dtype in enumerate((torch.bool, torch.float32)):
        big = torch.randn(2, 2, 80, 90, generator=torch.Generator().manual_seed(at))
        big = big > 0 if dtype == torch.bool else big
        views = (
            big.transpose(2, 3)[:, :, :21, :37],
            big[:, :, 1:43:2, 5:79:2],
            big[:1, :1, 7:28, 3:40].expand(2, 2, -1, -1),
            big.permute(2, 3, 0, 1)[:2, :2].repeat(1, 1, 11, 19)[..., :21, :37],
        )
        for view in views:
            problem = build(Dims(2, 2, 2, 21, 37, 8, 8), (), torch.float32)
            problem.kwargs["mask"] = view
            problem.needs_grad += ("mask",) if dtype == torch.float32 else ()
            problem.name += f":{dtype}{view.stride()}"
            problems.append(problem)
    run_all(name, problems)


WANTS = [
    tuple(x for at, x in enumerate(("q", "k", "v", "mask", "sinks")) if bits >> at & 1)
    for bits in range(1, 32)
]


@every_backend
def test_every_subset_of_gradients(name):
    """Only the mask requires grad, only the sinks, all but v, etc.: all are independent."""
    features = (FEATURE["bias_grad"], FEATURE["sinks"], FEATURE["causal"])
    problem = build(square(2, 2, 19, 8), features, torch.float32)
    run_all(name, [replace(problem, needs_grad=x, name="+".join(x)) for x in WANTS])


@every_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_key_lengths_dtype_and_stride(name, dtype):
    problem = build(square(4, 2, 19, 8), (FEATURE["lengths"],), torch.float32)
    lengths = problem.kwargs["key_lengths"].to(dtype)
    stepped = torch.full((8,), 99, dtype=dtype)
    stepped[::2] = lengths
    strided = replace(problem, kwargs=dict(key_lengths=stepped[::2]), name="every second")
    run_all(name, [replace(problem, kwargs=dict(key_lengths=lengths)), strided])


@every_dtype
@every_backend
def test_alibi_and_sinks_of_any_dtype(name, dtype):
    """16-bit slopes and sinks, with the gradient of sinks in their own dtype."""
    declares(name, DTYPES[dtype])
    problem = build(square(2, 2, 19, 8), (FEATURE["alibi"], FEATURE["sinks"]), DTYPES[dtype])
    for given in ("alibi_slopes", "sinks"):
        problem.kwargs[given] = problem.kwargs[given].to(DTYPES[dtype])
    run_all(name, [problem])


@every_dtype
@every_backend
@pytest.mark.parametrize("p", [0.01, 0.5, 0.99, 1.0])
def test_dropout_rates(name, dtype, p):
    declares(name, DTYPES[dtype])
    features = (FEATURE["dropout"], FEATURE["gqa"], FEATURE["lse_loss"])
    problem = build(square(2, 2, 70, 8), features, DTYPES[dtype])
    problem.kwargs["dropout_p"] = p
    run_all(name, [problem])


EMPTY = {
    "no_batch": Dims(0, 2, 2, 3, 4, 5, 6),
    "no_heads": Dims(2, 0, 0, 3, 4, 5, 6),
    "no_query_heads": Dims(2, 0, 2, 3, 4, 5, 6),
    "no_queries": Dims(2, 2, 2, 0, 4, 5, 6),
    "no_keys": Dims(2, 2, 2, 3, 0, 5, 6),
    "no_values": Dims(2, 2, 2, 3, 4, 5, 0),
    "no_dims": Dims(2, 2, 2, 3, 4, 0, 6),
    "nothing": Dims(0, 0, 0, 0, 0, 0, 0),
}


@every_dtype
@pytest.mark.parametrize("name", [None, *FUSED])
@pytest.mark.parametrize("dims", EMPTY.values(), ids=EMPTY)
def test_sizes_of_zero(name, dtype, dims):
    """Without keys: zeros and an LSE of -inf. Without head dimensions: the mean of v."""
    problem = build(dims, (FEATURE["lse_loss"],), DTYPES[dtype])
    scale = 1.0 if dims.D == 0 else None
    found = problem.run(fastattn.attention, backend=name, scale=scale)
    exact = problem.to(torch.float64).run(fastattn.reference.attention, scale=scale)
    for what, value in found.items():
        assert value.shape == exact[what].shape, what
        tolerance = dict(rtol=0, atol=4 * torch.finfo(DTYPES[dtype]).eps * 4)
        torch.testing.assert_close(value.double(), exact[what], **tolerance, msg=what)
    if dims.N == 0:
        assert not found["out"].any() and (found["lse"] == -torch.inf).all()


BROADCASTS = list(itertools.product([False, True], repeat=4))  # which of B, H, M, N a mask has


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("keep", small(BROADCASTS, BROADCASTS[::5]), ids=str)
@pytest.mark.parametrize("dims", EMPTY.values(), ids=EMPTY)
def test_mask_gradient_where_nothing_flows(name, dims, keep):
    """Sums over nothing are 0, whichever dimensions the mask is broadcast along."""
    problem = build(dims, (), torch.float32)
    sizes = (dims.B, dims.H, dims.M, dims.N)
    mask = torch.zeros([n if kept else 1 for n, kept in zip(sizes, keep)], requires_grad=True)
    fastattn.attention(
        problem.q, problem.k, problem.v, mask=mask, scale=1.0, backend=name
    ).sum().backward()
    if 0 in sizes:
        assert not mask.grad.any()


@every_backend
@pytest.mark.parametrize("features", SINGLES, ids=name_of)
def test_storage_and_lse(name, features):
    """out and gradients have the memory layout (B,M,H,D); return_lse changes nothing else."""
    problem = build(SHAPES[1], features, torch.float32)
    found = problem.run(fastattn.attention, backend=name)
    for what in ("out", "dq", "dk", "dv"):
        assert found[what].transpose(1, 2).is_contiguous(), what
    kwargs = {x: y for x, y in problem.kwargs.items() if x != "return_lse"}
    with torch.no_grad():
        q, k, v = problem.q, problem.k, problem.v
        out = fastattn.attention(q, k, v, **kwargs, backend=name)
        again, lse = fastattn.attention(q, k, v, **kwargs, return_lse=True, backend=name)
    assert torch.equal(out, found["out"]) and torch.equal(out, again)
    assert lse.shape == out.shape[:3] and lse.is_contiguous()
