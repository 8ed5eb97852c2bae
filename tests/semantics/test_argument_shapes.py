"""Every tensor argument in every shape and dtype that it may have, in every pass: dense, packed,
paged and vmapped, against the float64 oracle. The shapes come from `argument_shapes`;
test_distributed.py tests them over ranks."""

import itertools
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.utils._pytree import tree_map

import fastattn
from fastattn import Place
from fastattn.backends.native import launcher
from fastattn.call.spec import ARGUMENTS, Feature
from tests.support.argument_shapes import OPTIONAL, dtypes_of, has_gradient, shapes_of
from tests.support.backends import INTERPRETED, declares, every_backend, not_interpreted, small
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 2e-2}
DROPOUT = 0.3


@dataclass(frozen=True)
class Layout:
    """A call with these sizes. All sizes differ, so that no dimension can stand in for another.

    rows, keys: of each sequence, if the call is packed.
    """

    sizes: dict
    lengths: tuple
    rows: tuple = ()
    keys: tuple = ()

    @property
    def first(self):
        """The first row and the first key of each sequence, and their numbers."""
        return [list(itertools.accumulate(x, initial=0)) for x in (self.rows, self.keys)]

    @property
    def offsets(self):
        return [torch.tensor(x) for x in self.first]

    def inputs(self, dtype):
        """q, k and v by name."""
        B, H, Hk, M, N, D, Dv = (self.sizes[x] for x in ("B", "H", "Hk", "M", "N", "D", "Dv"))
        shapes = (B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv)
        if self.rows:
            T, S = sum(self.rows), sum(self.keys)
            shapes = (T, H, D), (S, Hk, D), (S, Hk, Dv)
        return {name: rand(shape, at, dtype) for at, (name, shape) in enumerate(zip("qkv", shapes))}

    def run(self, q, k, v, **given):
        """out and LSE of the call."""
        if not self.rows:
            return fastattn.attention(q, k, v, return_lse=True, **given)
        most = dict(max_q=self.sizes["M"], max_k=self.sizes["N"])
        cu = self.offsets
        return fastattn.attention_packed(q, k, v, *cu, return_lse=True, **most, **given)

    def oracle(self, q, k, v, **given):
        """The oracle's out and LSE, computed one sequence at a time."""
        if not self.rows:
            return fastattn.reference.attention(q, k, v, return_lse=True, **given)
        found = []
        for b, (rows, keys) in enumerate(zip(*self.first, strict=True)):
            if b == self.sizes["B"]:
                break
            own = slice(rows, rows + self.rows[b]), slice(keys, keys + self.keys[b])
            laid = (
                x[at].transpose(0, 1)[None] for x, at in ((q, own[0]), (k, own[1]), (v, own[1]))
            )
            out, lse = fastattn.reference.attention(
                *laid, return_lse=True, place=Place(item=b), **self._of_sequence(b, given)
            )
            found.append((out[0].transpose(0, 1), lse[0].transpose(0, 1)))
        return tuple(map(torch.cat, zip(*found, strict=True)))

    def _of_sequence(self, b, given):
        own, B, H = dict(given), self.sizes["B"], self.sizes["H"]
        if "mask" in own:
            whole = own["mask"].expand(B, H, self.sizes["M"], self.sizes["N"])
            own["mask"] = whole[b : b + 1, :, : self.rows[b], : self.keys[b]]
        if "alibi_slopes" in own:
            own["alibi_slopes"] = own["alibi_slopes"].expand(B, H)[b : b + 1]
        if "key_lengths" in own:
            own["key_lengths"] = own["key_lengths"][b : b + 1]
        return own


LAYOUTS = {
    "dense": Layout(dict(B=3, H=4, Hk=2, M=5, N=6, D=8, Dv=7), (6, 0, 2)),
    "packed": Layout(
        dict(B=4, H=6, Hk=2, M=3, N=5, D=8, Dv=9),
        lengths=(3, 1, 0, 0),
        rows=(3, 1, 0, 3),
        keys=(5, 1, 4, 0),
    ),
}
DENSE, PACKED = LAYOUTS.values()
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def rand(shape, seed, dtype=torch.float64):
    """Random numbers that every floating dtype holds exactly: all dtypes get the same values."""
    generator = torch.Generator().manual_seed(seed + 10 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16().to(dtype)


def values(name, shape, dtype, layout, seed=0):
    """The values of a tensor argument."""
    if name == "key_lengths":
        return torch.tensor(layout.lengths, dtype=dtype)
    if name == "seed":
        return torch.full(shape, 5 + seed, dtype=dtype)
    x = rand(shape, 100 + seed)
    return x > -0.7 if dtype == torch.bool else (x.abs() if name == "alibi_slopes" else x).to(dtype)


# ------------------------------------------------------------------------------------------- cases


class Case(SimpleNamespace):
    """dtype: of q. kinds: {name in `Tensors`: (shape, dtype)} of the tensor arguments given. wants:
    the tensors to compute gradients of."""

    def __str__(self):
        text = (f"{name}{list(shape)}.{str(x)[6:]}" for name, (shape, x) in self.kinds.items())
        return " ".join([str(self.dtype)[6:], *text, "by", *self.needs_grad]).replace(" ", "")

    def given(self, layout, dtype=None):
        """The tensors of the call, by public name; floating ones in `dtype`, if it is given."""
        found = layout.inputs(self.dtype)
        for name, (shape, own) in self.kinds.items():
            found[ARGUMENTS[name].name] = values(name, shape, own, layout)
        if dtype:
            found = {x: y.to(dtype) if y.is_floating_point() else y for x, y in found.items()}
        return found

    @property
    def options(self):
        """The call's scalar arguments."""
        return dict(dropout_p=DROPOUT) if "seed" in self.kinds else {}


def subsets(names):
    """The sets of gradients to ask for: all; one argument's only; all but one."""
    own = [x for x in names if x not in "qkv"]
    return [names, *((x,) for x in own), *(tuple(y for y in names if y != x) for x in own), ("k",)]


def cases(layout, dtypes):
    """Each shape and dtype of a mask, combined in turn with each shape and dtype of the other
    arguments, or none; and each of the others without a mask."""
    turns = {
        name: itertools.cycle(
            [None]
            + [
                (shape, own)
                for shape in shapes_of(name, layout.sizes)
                for own in dtypes_of(name, dtypes[0])
            ]
        )
        for name in OPTIONAL
        if name != "mask"
    }
    found, counter = [], itertools.count()
    for dtype in dtypes:
        masks = [
            (shape, own)
            for own in dtypes_of("mask", dtype)
            for shape in shapes_of("mask", layout.sizes)
            if dtype == dtypes[0] or own == torch.float32  # the mask dtype for 16-bit inputs
        ]
        for mask in [*masks, *[None] * 12]:
            kinds = dict(mask=mask) | {name: next(turn) for name, turn in turns.items()}
            kinds = {name: kind for name, kind in kinds.items() if kind}
            has = tuple(x for x, (_, own) in kinds.items() if has_gradient(x, own))
            each = subsets((*"qkv", *has))
            if mask and mask[1] == dtypes[0]:  # so that each mask shape has its gradient tested
                each = [x for x in each if "mask" in x]
            found.append(Case(dtype=dtype, kinds=kinds, needs_grad=each[next(counter) % len(each)]))
    return found


DTYPES_OF = {"cpu": (torch.float64, torch.bfloat16), "triton": (torch.float32,)}
EVERY = {
    name: cases(layout, DTYPES_OF["triton" if INTERPRETED else "cpu"])[:: small(1, 11)]
    for name, layout in LAYOUTS.items()
}
every_case = pytest.mark.parametrize(
    "layout, case", [(x, case) for x, of in EVERY.items() for case in of], ids=str
)


# ------------------------------------------------------------------------------------------- passes


def outcomes(attention, given, needs_grad):
    """{name: result} of every pass of a call, with these gradients."""
    leaves = {x: given[x].detach().requires_grad_() for x in needs_grad}
    others = {x: y for x, y in given.items() if x not in needs_grad}
    found = dict(zip(("out alone", "lse alone"), attention(**given), strict=True))

    def call(*tensors):
        out, lse = attention(**dict(zip(needs_grad, tensors, strict=True)), **others)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    tensors = tuple(leaves.values())
    outs = call(*tensors)
    incoming = [rand(x.shape, 50 + at, x.dtype) for at, x in enumerate(outs)]
    grads = torch.autograd.grad(outs, tensors, incoming, create_graph=True)
    moves = tuple(rand(x.shape, 70 + at, x.dtype) for at, x in enumerate(tensors))
    second = torch.autograd.grad(grads, tensors, moves)
    _, tangents = jvp(call, tuple(x.detach() for x in tensors), moves)
    for names, results in (
        (("out", "lse"), outs),
        (("out_t", "lse_t"), tangents),
        ([f"d{x}" for x in needs_grad], grads),
        ([f"second d{x}" for x in needs_grad], second),
    ):
        found |= dict(zip(names, results, strict=True))
    return {name: x.detach() for name, x in found.items()}


def close(found, exact, tolerance):
    """The shapes are the oracle's, and values differ by at most `tolerance` times the largest."""
    assert found.keys() == exact.keys()
    for name, right in exact.items():
        got = found[name]
        assert got.shape == right.shape, (name, got.shape, right.shape)
        got, right = (x.double().nan_to_num(neginf=-9.0) for x in (got, right))
        error, bound = (got - right).abs(), tolerance * (1 + right.abs().max().item())
        assert not error.numel() or error.max() <= bound, (name, got, right)


def tolerance_of(case):
    """The largest for the dtypes of the tensors: gradients have their tensors' dtypes."""
    dtypes = {case.dtype, *(x for _, x in case.kinds.values() if x.is_floating_point)}
    return max(TOLERANCE[x] for x in dtypes)


@every_backend
@every_case
def test_every_shape_in_every_pass(name, layout, case, monkeypatch):
    declares(name, case.dtype)
    laid = LAYOUTS[layout]

    def ours(**given):
        return laid.run(**given, **case.options, backend=name)

    def oracle(**given):
        return laid.oracle(**given, **case.options)

    given = case.given(laid)
    exact = outcomes(oracle, case.given(laid, torch.float64), public(case.needs_grad))
    found = outcomes(ours, given, public(case.needs_grad))
    close(found, exact, tolerance_of(case))
    for x in public(case.needs_grad):
        assert found[f"d{x}"].dtype == found[f"second d{x}"].dtype == given[x].dtype
    if laid.rows and "mask" in case.needs_grad:  # takes the path for one sequence after the other
        monkeypatch.setattr(launcher, "ROOM", -1)
        close(outcomes(ours, given, public(case.needs_grad)), exact, tolerance_of(case))


def public(names):
    return tuple(ARGUMENTS[x].name for x in names)


@every_backend
@parametrize("case", EVERY["dense"], ids=str, fast=83)
@pytest.mark.parametrize("average", [False, True], ids=["heads", "average"])
def test_every_shape_of_weights(name, case, average):
    declares(name, case.dtype, Feature.WEIGHTS)
    needs_grad = public(x for x in case.needs_grad if x != "v") or ("q",)

    def ours(q, k, v, **given):
        options = case.options | dict(average_heads=average, backend=name)
        return fastattn.attention_weights(q, k, **given, **options)

    def oracle(**given):
        *_, weights = fastattn.reference.attention(**given, **case.options, return_weights=True)
        return weights.mean(1) if average else weights

    def passes(weights, given):
        leaves = {x: given[x].detach().requires_grad_() for x in needs_grad}
        found = weights(**given | leaves)
        incoming = rand(found.shape, 60, found.dtype)
        grads = torch.autograd.grad(found, tuple(leaves.values()), incoming)
        return dict(weights=found.detach()) | dict(zip(needs_grad, grads, strict=True))

    exact = passes(oracle, case.given(DENSE, torch.float64))
    close(passes(ours, case.given(DENSE)), exact, tolerance_of(case))


# ------------------------------------------------------------------------------------------- pages

PAGE, PAGES, BLOCKS = 2, 13, 7


# --------------------------------------------------------------------------------------------- vmap

EXAMPLES = {"dense": 11, "packed": 2}  # packed calls do not fold: they run one by one


def loss(attention, argument, given, q, x):
    """(a scalar loss, out)"""
    out, lse = attention(q=q, **given, **{argument: x})
    return out.sin().sum() + torch.where(lse == -torch.inf, 0.0, lse).cos().sum(), out


@not_interpreted
@every_layout
@parametrize("name", OPTIONAL, fast=1)
def test_every_shape_is_mapped(name, layout):
    """A mapped argument with a shared q; and a shared argument with a mapped q."""
    laid, V = LAYOUTS[layout], EXAMPLES[layout]
    given = laid.inputs(torch.float64)
    q = given.pop("q")
    given |= dict(dropout_p=DROPOUT) if name == "seed" else {}
    qs = torch.stack([q * (1 + i / V) for i in range(V)])
    by = (0, 1) if ARGUMENTS[name].gradient else (0,)
    dtype = next(x for x in dtypes_of(name, torch.float64) if x != torch.bool)

    def gradients(attention):
        return grad(partial(loss, attention, ARGUMENTS[name].name, given), by, has_aux=True)

    for shape in shapes_of(name, laid.sizes):
        own = torch.stack([values(name, shape, dtype, laid, seed=i) for i in range(V)])
        for dims, tensors in (((None, 0), (q, own)), ((0, None), (qs, own[0]))):
            found = vmap(gradients(laid.run), dims)(*tensors)
            exact = [
                gradients(laid.oracle)(
                    *(x if dim is None else x[i] for x, dim in zip(tensors, dims))
                )
                for i in range(V)
            ]
            right = tree_map(lambda *x: torch.stack(x), *exact)
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


# ----------------------------------------------------------------------------- sizes that are alike
