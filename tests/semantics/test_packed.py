"""`attention_packed`: each sequence of a batch has the values and bits of a separate call."""

import itertools
from dataclasses import dataclass

import pytest
import torch

import fastattn
from fastattn import Place
from fastattn.backends import base
from tests.support.backends import every_backend, on_variants, small
from tests.support.cases import FEATURE, FEATURES, PLAIN, Dims, build, inside_nan, name_of
from tests.support.error_budget import Verdict, one_thread
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")

# (rows, keys) of each sequence: none, one, few, a tile, one off a tile; the longest is not last.
SIZES = small(
    ((5, 7), (0, 3), (1, 1), (37, 51), (3, 0), (16, 64), (1, 40), (65, 129), (33, 20)),
    ((5, 7), (0, 3), (1, 1), (18, 21), (3, 0), (17, 16)),
)
CASES = [PLAIN, *((f,) for f in FEATURES if f.group not in ("queries", "place", "layout", "dout"))]
CROSSED = (
    "bottom_right lengths dropout gqa",
    "window alibi_batch lengths sinks lse_loss",
    "causal alibi dropout bias_grad mqa",
    "bottom_right left_window sinks wide_values",
    "left_window softcap key_bias_grad dropout lse_loss",
    "head_bias_grad sinks lengths gqa narrow_values",
)
CASES += [tuple(FEATURE[name] for name in names.split()) for names in CROSSED]


@dataclass
class Batch:
    """One batch, both as a list of single-sequence problems and as packed arguments."""

    alone: list
    given: dict
    needs_grad: tuple
    dout: torch.Tensor
    dlse: torch.Tensor | None
    rows: list
    keys: list

    def run(self, function=None, backward=True, **more):
        """{"out", "lse", "dq", ...} of one packed call."""
        given = dict(self.given)
        for name in self.needs_grad:
            given[name] = given[name].detach().requires_grad_()
        leaves = [given[name] for name in self.needs_grad]
        result = (function or fastattn.attention_packed)(**given, **more)
        outputs = result if isinstance(result, tuple) else (result,)
        found = dict(zip(("out", "lse"), outputs, strict=False))
        if not backward:
            return found
        grads = torch.autograd.grad(outputs, leaves, (self.dout, self.dlse)[: len(outputs)])
        return found | {"d" + name: grad for name, grad in zip(self.needs_grad, grads, strict=True)}

    def of_sequence(self, found, b):
        """The part of these results that belongs to sequence b, without sums over sequences."""
        rows, keys, mine = self.rows[b], self.keys[b], {}
        for name, x in found.items():
            if name in ("out", "dq", "lse", "dk", "dv"):
                part = x[keys if name in ("dk", "dv") else rows]
                mine[name] = part.transpose(0, 1)[None]
            elif name == "dmask" and self.alone[b].kwargs["mask"].ndim == 4:
                mine[name] = x[b : b + 1][tuple(map(slice, self.alone[b].kwargs["mask"].shape))]
        return mine


def batch(features, dtype, sizes=SIZES, d=8):
    """A batch of problems from `cases.build`; they share the tensors without an item dimension."""
    built = [feature for feature in features if feature.group != "lengths"]
    problems = [build(Dims(1, 2, 2, m, n, d, d), built, dtype, seed=m) for m, n in sizes]
    largest = max(problems, key=lambda p: p.q.shape[2])
    for b, problem in enumerate(problems):
        m, n = problem.q.shape[2], problem.k.shape[2]
        problem.kwargs["place"] = problem.kwargs.get("place", Place())._replace(item=b)
        for name in {"alibi_slopes", "sinks", "mask"} & problem.kwargs.keys():
            common = largest.kwargs[name]
            if name == "mask" and common.ndim == 3:
                problem.kwargs[name] = common[:, :m, :n]
            elif common.ndim == 1:
                problem.kwargs[name] = common
        if any(feature.group == "lengths" for feature in features):
            length = (n, 0, n // 2, min(1, n))[b % 4]
            problem.kwargs["key_lengths"] = torch.tensor([length])
            problem.k[:, :, length:] = problem.v[:, :, length:] = torch.nan
    given = dict(largest.kwargs)
    given["place"] = given["place"]._replace(item=0)
    for name in "qkv":
        given[name] = torch.cat([getattr(p, name)[0].transpose(0, 1) for p in problems])
    for name in {"alibi_slopes", "key_lengths", "mask"} & given.keys():
        if name == "mask" and given[name].ndim == 4:
            given[name] = padded([p.kwargs[name] for p in problems])
        elif name == "key_lengths" or given[name].ndim == 2:
            given[name] = torch.cat([p.kwargs[name] for p in problems])
    offsets = [list(itertools.accumulate(x, initial=0)) for x in zip(*sizes)]
    given["cu_q"], given["cu_k"] = map(torch.tensor, offsets)
    return Batch(
        problems,
        given,
        problems[0].needs_grad,
        torch.cat([p.dout[0].transpose(0, 1) for p in problems]),
        None if largest.dlse is None else torch.cat([p.dlse[0].T for p in problems]),
        *([slice(*x) for x in itertools.pairwise(edges)] for edges in offsets),
    )


# {kind: (cu_q, cu_k, cu_q as clamped, cu_k as clamped)} for 12 rows and 20 keys.
HOSTILE = {
    "below": ((-3, 5, 12), (-(2**40), 9, 20), (0, 5, 12), (0, 9, 20)),
    "beyond": ((0, 5, 2**40), (0, 9, 21), (0, 5, 12), (0, 9, 20)),
    "all beyond": ((0, 12, 99, 2**33), (0, 20, 30, 40), (0, 12, 12, 12), (0, 20, 20, 20)),
    "falling": ((0, 12, 3), (0, 20, -5), (0, 12, 12), (0, 20, 20)),
    "too long": ((0, 12), (0, 20), (0, 8), (0, 15)),  # for max_q = 8 and max_k = 15
}


def clamped(kind, dtype, gradients=True, **options):
    """Pairs of results (and gradients) with hostile offsets and with these offsets clamped. The
    memory around rows and keys is NaN."""
    draft = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 2, n, 16, generator=draft).to(dtype) for n in (12, 20, 20)]
    q, k, v = (inside_nan(x)[0].transpose(0, 1).requires_grad_() for x in leaves)
    *given, rows, keys = map(torch.tensor, HOSTILE[kind])
    most = dict(max_q=8, max_k=15) if kind == "too long" else dict(max_q=12, max_k=20)

    def attention(cu_q, cu_k):
        results = fastattn.attention_packed(q, k, v, cu_q, cu_k, return_lse=True, **most, **options)
        if not gradients:
            return [x[: rows.max()] for x in results]
        loss = sum(x[: rows.max()].float().square().sum() for x in results)
        grads = torch.autograd.grad(loss, (q, k, v))
        ends = (rows, rows, rows, keys, keys)
        return [x[: end.max()] for x, end in zip((*results, *grads), ends, strict=True)]

    return zip(attention(*given), attention(rows, keys), strict=True)


def padded(masks):
    """One (B,H,M,N) mask of all sequences; the rest is NaN, or True."""
    shape = [max(x.shape[d] for x in masks) for d in range(4)]
    nothing = True if masks[0].dtype == torch.bool else torch.nan
    whole = torch.full((len(masks), *shape[1:]), nothing, dtype=masks[0].dtype)
    for b, mask in enumerate(masks):
        whole[b][tuple(map(slice, mask.shape[1:]))] = mask[0]
    return whole


def complaints(made, found):
    """Errors of a packed call, judged by the oracle of each sequence and by sums over sequences."""
    verdicts = [Verdict(problem) for problem in made.alone]
    for b, verdict in enumerate(verdicts):
        mine = made.of_sequence(found, b)
        for name, x in mine.items():
            yield from (f"sequence {b}: {line}" for line in verdict._about(name, x))
        if "dmask" in mine:
            rest = found["dmask"][b].clone()
            rest[tuple(map(slice, made.alone[b].kwargs["mask"].shape[1:]))] = 0
            if rest.any():
                yield f"sequence {b}: a gradient of the mask where it has none"
    for name in {"dsinks", "dmask"} & found.keys() - made.of_sequence(found, 0).keys():
        exact, bound = (torch.zeros(found[name].shape, dtype=torch.float64) for _ in range(2))
        for verdict in verdicts:
            at = tuple(map(slice, verdict.exact[name].shape))
            exact[at] += verdict.exact[name]
            bound[at] += verdict.bounds[name]
        if not ((found[name].double() - exact).abs() <= bound).all():
            yield f"{name}: not the sum over sequences"


def dtype_of(name):
    """float32 if the backend supports it, else bfloat16."""
    dtypes = base.get(name).support.dtypes
    return torch.float32 if torch.float32 in dtypes else torch.bfloat16


def everywhere(name, made):
    """Complaints about backend `name` on each of its variants."""
    lines = []
    with one_thread():
        for isa in on_variants(name, made.given["q"].dtype):
            found = made.run(backend=name)
            lines += [f"{isa or name}: {line}" for line in complaints(made, found)]
    return lines


# Few rows and many keys: some backends split the keys.
FEW = ((1, 170), (0, 20), (3, 150), (2, 0), (1, 1), (2, 139))
CUT = (
    "bottom_right lengths gqa",
    "alibi_batch sinks lse_loss mqa",
    "left_window dropout bias_grad",
)


@every_backend
@parametrize("features", CASES, ids=name_of, fast=19)
def test_packed_has_the_bits_of_each_alone(name, features, threads):
    made = batch(features, torch.float32)
    for isa in on_variants(name):
        for n in small((1, 3), (1,)):
            threads(n)
            found = made.run(backend=name)
            for b, problem in enumerate(made.alone):
                own = problem.run(fastattn.attention, backend=name)
                for what, x in made.of_sequence(found, b).items():
                    assert torch.equal(x, own[what]), (isa, n, b, what)


@every_backend
def test_packed_draws_and_has_the_bits_of_a_padded_batch(name):
    """First with equal sizes, which need no padding; then with key_lengths that hide padding."""
    sizes = [(40, 30)] * 3 if name == "cpu" else [(9, 12)] * 2
    made = batch((FEATURE["dropout"], FEATURE["causal"]), dtype_of(name), sizes)
    stacked = [torch.cat([getattr(p, x) for p in made.alone]) for x in "qkv"]
    given = made.given
    options = dict(dropout_p=given["dropout_p"], seed=given["seed"], causal=True, backend=name)
    whole = fastattn.attention(*stacked, **options)
    packed = fastattn.attention_packed(**made.given, backend=name)
    assert torch.equal(whole.transpose(1, 2).flatten(0, 1), packed)
    lengths = torch.tensor([n - 2 * b for b, (_, n) in enumerate(sizes)])
    shorter = [x.flatten(0, 1) for x in (y.transpose(1, 2) for y in stacked)]
    within = torch.cat([torch.arange(n) < lengths[b] for b, (_, n) in enumerate(sizes)])
    cu_k = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    packed = fastattn.attention_packed(
        *(shorter[0], shorter[1][within], shorter[2][within]), given["cu_q"], cu_k, **options
    )
    whole = fastattn.attention(*stacked, **options, key_lengths=lengths)
    assert torch.equal(whole.transpose(1, 2).flatten(0, 1), packed)


@every_backend
def test_batches_of_nothing(name):
    q = torch.zeros(0, 2, 8, dtype=dtype_of(name), requires_grad=True)
    for cu in ([0], [0, 0, 0]):
        given = (q, q, q, torch.tensor(cu), torch.tensor(cu))
        out, lse = fastattn.attention_packed(*given, return_lse=True, backend=name)
        assert out.shape == (0, 2, 8) and lse.shape == (0, 2)
        out.sum().backward()
        assert q.grad.shape == (0, 2, 8)


WRONG = {  # for two sequences with 7 rows and 9 keys in total
    "cu_q: got 1 first, expected 0": dict(cu_q=[1, 3, 7]),
    "cu_q: got 6 last, expected 7, the rows of q": dict(cu_q=[0, 3, 6]),
    "cu_k: got 10 last, expected 9, the rows of k": dict(cu_k=[0, 3, 10]),
    "cu_q: got 3 after 8, expected offsets that never fall": dict(cu_q=[0, 8, 3, 7]),
    "cu_q: got 7 after 9223372036854775807, expected offsets": dict(cu_q=[0, 2**63 - 1, 7]),
    "cu_q: got -9223372036854775808 after 0, expected offsets": dict(cu_q=[0, -(2**63), 7]),
    "cu_q: got 4 rows in sequence 1, expected at most max_q = 3": dict(max_q=3),
    "cu_k: got 6 keys in sequence 1, expected at most max_k = 5": dict(max_k=5),
    r"cu_k: got shape \(4,\), expected \(B\+1,\) = \(3,\)": dict(cu_k=[0, 3, 4, 9]),
    r"cu_q: got shape \(\), expected \(B \+ 1,\) offsets": dict(cu_q=0),
    r"cu_q: got shape \(0,\), expected": dict(cu_q=torch.zeros(0, dtype=torch.int64)),
    "cu_q: got .1,. offsets, of no sequence, expected those of 7 rows": dict(cu_q=[0], cu_k=[0]),
    "cu_q.dtype: got torch.float32, expected torch.int32 or torch.int64": dict(cu_q=[0.0, 3, 7]),
    r"max_q: got -1, expected a number in \[0": dict(max_q=-1),
    "key_lengths: got 4 of sequence 0, expected a value in .0, 3., its keys": dict(
        key_lengths=torch.tensor([4, 2])
    ),
    "place: got .*, expected no row or key of a packed batch": dict(place=Place(row=1)),
    r"q: got shape \(1, 2, 7, 8\), expected 3 dimensions \(T, H, D\)": dict(
        q=torch.zeros(1, 2, 7, 8)
    ),
}


@every_backend
@pytest.mark.parametrize("message", WRONG)
def test_invalid_batches_raise(name, message):
    given = dict(
        q=torch.zeros(7, 2, 8),
        k=torch.zeros(9, 2, 8),
        v=torch.zeros(9, 2, 8),
        cu_q=[0, 3, 7],
        cu_k=[0, 3, 9],
    )
    given |= WRONG[message]
    if given["cu_q"] == [0, 8, 3, 7]:
        given["cu_k"] = [0, 3, 4, 9]
    given |= {x: given[x].to(dtype_of(name)) for x in "qkv"}
    cu = {x: torch.as_tensor(given.pop(x)) for x in ("cu_q", "cu_k")}
    for also in (name, "reference"):
        with pytest.raises(ValueError, match=message):
            fastattn.attention_packed(**given, **cu, backend=also)


@pytest.mark.parametrize(
    "arguments", [dict(q=3), dict(cu_q=[0, 3]), dict(cu_k=None), dict(max_q=2.5)]
)
def test_arguments_that_form_no_batch_raise(arguments):
    x = torch.zeros(3, 2, 8)
    given = dict(q=x, k=x, v=x, cu_q=torch.tensor([0, 3]), cu_k=torch.tensor([0, 3])) | arguments
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        fastattn.attention_packed(**given)
