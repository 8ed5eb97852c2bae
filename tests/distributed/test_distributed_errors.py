"""Ranks that differ, are missing or raise, and wrong arguments: each rank raises what is wrong."""

import os

import pytest
import torch
import torch.distributed as dist

import fastattn
from fastattn import distributed
from tests.distributed.test_distributed import MESH
from tests.support import ranks


def wrongly(group, packed, what):
    """A call with what is wrong on all ranks, or `on_1`. A packed one has two sequences, of 3 rows
    and of all other rows: most ranks have no row of the first."""
    team = distributed.consistency.need_team(group)
    x, call, given = Y, distributed.attention, {}
    if packed:
        cu = torch.tensor([0, 3, 4 * team.ranks])
        x, call, given = X, distributed.attention_packed, dict(cu_q=cu, cu_k=cu)
    given |= dict(q=x, k=x, v=x) | {n: y for n, y in what.items() if n != "on_1"}
    given |= what.get("on_1", {}) if team.rank == 1 else {}
    return call(**given, group=group)


def named(what):
    return "".join(c for c in str(what) if c.isalnum())[:40]


X, Y = torch.zeros(4, 3, 8), torch.zeros(2, 4, 6, 8)  # packed, and dense
Z = dict.fromkeys("qkv", torch.zeros(1, 3, 5, 4))


WRONG_PACKED = [
    (dict(strategy="ring"), "strategy: got 'ring', expected 'auto', 'gather' or 'ulysses' of"),
    (dict(strategy="ulysses"), "got 'ulysses' for 3 heads on 2 ranks, expected ranks that"),
    (dict(cu_q=torch.tensor([0, 3, 7])), "cu_q: got 7 last, expected 8, the rows of all ranks"),
    (
        dict(cu_k=torch.tensor([0, 9, 8])),
        r"cu_k: got \[0, 9, 8\], expected offsets from 0 that",
    ),
    (dict(cu_k=torch.tensor([0, 8])), r"cu_k: got shape \(2,\), expected .* = \(3,\)"),
    (dict(place=fastattn.Place(row=1)), "place: got .*, expected no row or key of a packed"),
    # Errors that a call on one rank would find itself.
    (dict(max_q=4), "cu_q: got 5 rows in sequence 1, expected at most max_q = 4"),
    (
        dict(key_lengths=torch.tensor([4, 1])),
        "key_lengths: got 4 of sequence 0, expected a val",
    ),
    (dict(key_lengths=torch.tensor([1])), r"key_lengths: got shape \(1,\), expected"),
    (
        dict(mask=torch.zeros(2, 1, 3, 5)),
        r"mask: got shape \(2, 1, 3, 5\), expected a shape that",
    ),
    (dict(mask=torch.zeros(4, 5)), r"mask: got shape \(4, 5\), expected a shape that"),
    (dict(alibi_slopes=torch.ones(3, 3)), r"alibi_slopes: got shape \(3, 3\), expected"),
    (dict(backend="none"), "backend"),
]
WRONG_DENSE = [
    (Z | dict(strategy="ulysses"), "got 'ulysses' for 3 heads on 2 ranks, expected ranks that"),
    (dict(strategy="rings"), "strategy: got 'rings', expected one of 'auto', 'gather', "),
    (dict(layout="spiral"), "layout: got 'spiral', expected 'contiguous' or 'zigzag'"),
    (dict(strategy="gather", mask=torch.zeros(1, 7)), "mask: got"),
]


def either(packed, dense):
    """The rows of a table of packed calls and of one of dense calls."""
    return [(True, *x) for x in packed] + [(False, *x) for x in dense]


@pytest.mark.parametrize("packed, what, words", either(WRONG_PACKED, WRONG_DENSE), ids=named)
def test_an_error_common_to_all_ranks_is_raised_on_each(four, packed, what, words):
    for found in four.run(2, wrongly, packed, what):
        with pytest.raises(ValueError, match=words):
            raise found


DIFFERENT_PACKED = [
    (dict(cu_k=torch.tensor([0, 2, 12])), r"cu_k: .*\[0, 2, 12\].* on rank 1, .*\[0, 3, 12\]"),
    (dict(cu_q=torch.tensor([0, 3, 12]).int()), "cu_q: got .*int32.* on rank 1, expected .*64"),
    (dict(causal=True), "causal: got True on rank 1, expected False, as on rank 0"),
    (dict(q=X.double(), k=X.double(), v=X.double()), "q: got .*float64.* on rank 1, expected"),
    (dict(v=X[..., :4]), "v: got .*'any', 3, 4.* on rank 1, expected .*'any', 3, 8"),
    (dict(k=X[:, :1], v=X[:, :1]), "k: got .*'any', 1, 8.* on rank 1, .*; v: got .* on rank 1"),
    (dict(k=X.clone().requires_grad_()), "k: got .*'with gradient'.* on rank 1, expected"),
    (dict(mask=torch.zeros(1)), "mask: got .*float32.* on rank 1, expected None, as on rank 0"),
    (dict(sinks=torch.zeros(3)), "sinks: got .* on rank 1, expected None, as on rank 0"),
    (dict(max_k=16), "max_k: got 16 on rank 1, expected None, as on rank 0"),
    (dict(dropout_p=0.5, seed=torch.tensor([3])), "seed: got .*3.* on rank 1, expected None"),
    (dict(place=fastattn.Place(head=3)), "place: got .*head=3.* on rank 1, expected None"),
    (dict(strategy="gather"), "strategy: got gather on rank 1, expected auto, as on rank 0"),
    (dict(return_lse=True), "return_lse: got True on rank 1, expected False, as on rank 0"),
]
DIFFERENT_DENSE = [
    (
        dict.fromkeys("qkv", Y[:1]),
        r"q: got .*1, 4, 'any', 8.* on rank 1, expected .*2, 4, 'any', 8.* as on rank 0",
    ),
    (
        dict(dropout_p=0.1, seed=1),
        r"dropout_p: got 0.1 on rank 1, expected 0.*seed: got 1 on rank 1, expected None",
    ),
    (
        dict(sinks=torch.ones(4)),
        r"sinks: got .*1.0, 1.0.* on rank 1, expected .*0.0, 0.0.* as on rank 0",
    ),
    (dict(strategy="gather"), "strategy: got gather on rank 1, expected auto, as on rank 0"),
]


@pytest.mark.parametrize(
    "packed, what, words", either(DIFFERENT_PACKED, DIFFERENT_DENSE), ids=named
)
@pytest.mark.parametrize("count", [3, MESH], ids=str)
def test_ranks_that_differ(four, count, packed, what, words):
    if count == MESH:  # a mesh has 16 rows
        words = words.replace(r"\[0, 3, 12\]", r"\[0, 3, 16\]")
    alike = dict(sinks=torch.zeros(4)) if "0.0, 0.0" in words else {}
    for found in four.run(count, wrongly, packed, alike | dict(on_1=what)):
        with pytest.raises(ValueError, match=words):
            raise found


FAILING_PACKED = [
    (dict(q=X[0]), ValueError, r"q: got shape \(3, 8\), expected 3 dimensions"),
    (dict(q=X.numpy()), TypeError, "q: got ndarray, expected a torch.Tensor"),
    (dict(v=X[:3]), ValueError, r"v: got .*, expected 4 rows, as k has"),
    (dict(k=X.double()), ValueError, "k.dtype: got torch.float64, expected torch.float32"),
    (dict(cu_q=[0, 12]), TypeError, "cu_q: got list, expected a torch.Tensor"),
    (dict(cu_q=torch.tensor(12)), ValueError, r"cu_q: got shape \(\), expected \(B \+ 1,\)"),
    (
        dict(cu_k=torch.tensor([0.0, 3, 12])),
        ValueError,
        "cu_k.dtype: got torch.float32, expect",
    ),
    (dict(cu_k=torch.tensor([1, 3, 12])), ValueError, r"cu_k: got \[1, 3, 12\], expected offs"),
    (dict(max_q=2.5), TypeError, "max_q: got 2.5"),
    (dict(mask=torch.zeros(13, 9)), ValueError, r"mask: got shape \(13, 9\), expected a shape"),
    (dict(mask=[0.0]), TypeError, "mask: got list, expected a torch.Tensor or None"),
    (dict(key_lengths=torch.tensor([3, 10])), ValueError, "key_lengths: got 10 of sequence 1"),
    (dict(sinks=torch.ones(2)), ValueError, r"sinks: got shape \(2,\), expected"),
    (dict(softcap=-1.0), ValueError, "softcap: got -1.0"),
    (dict(dropout_p=2.0), ValueError, "dropout_p: got 2.0"),
    (dict(backend="cuda"), NotImplementedError, "cuda"),
    # Our checks allow so many rows; torch raises, and the other ranks learn of that, too.
    (dict(cu_q=torch.tensor([0, 3, 2**62])), RuntimeError, "overflow"),
]
FAILING_DENSE = [
    (dict(q=Y[0]), ValueError, "q: got"),
    (
        dict(mask=torch.zeros(5, 18)),
        ValueError,
        "mask: got 5 rows, expected 1, or this rank's 6, by all keys",
    ),
    (
        dict(place=fastattn.Place(row=3)),
        ValueError,
        "place: got Place.row=3.* expected only head, item and bottom_right",
    ),
]


@pytest.mark.parametrize(
    "packed, what, kind, words", either(FAILING_PACKED, FAILING_DENSE), ids=named
)
def test_a_failing_rank_is_named(four, packed, what, kind, words):
    one, own, other = four.run(3, wrongly, packed, dict(on_1=what))
    with pytest.raises(kind, match=words):
        raise own
    name = type(own).__name__
    for found in (one, other):
        with pytest.raises(RuntimeError, match=f"rank 1 of 3 raised {name}.*{words}"):
            raise found


# -- strategies, keys of all ranks, missing ranks --------------------------------------------------


def meshed(mesh, strategy):
    x = torch.zeros(1, 3, 4, 4)
    return distributed.attention(x, x, x, group=mesh, strategy=strategy)


@pytest.mark.parametrize(
    "ranks, strategy, words",
    [
        (MESH, "ring", "got 2 dimensions for strategy='ring', expected a group, or a mesh"),
        (2, "usp", "got 1 dimension for strategy='usp', expected a mesh of 2"),
        (MESH, "usp", "got 'usp' for 3 heads on 2 ranks, expected ranks that divide the heads"),
    ],
)
def test_strategies_have_meshes_of_their_own(four, ranks, strategy, words):
    for found in four.run(ranks, meshed, strategy):
        with pytest.raises(ValueError, match=words):
            raise found


def test_auto_is_what_the_ranks_can_do(four):
    for count in (3, 2, MESH):
        assert {x.shape for x in four.run(count, meshed, "auto")} == {(1, 3, 4, 4)}


WRONG = {  # for 11 keys: checked before anything is sent
    "mask: got": dict(mask=torch.zeros(1, 16)),
    "mask.dtype: got torch.int64": dict(mask=torch.ones(1, 11, dtype=torch.int64)),
    "mask: got .*7": dict(mask=torch.zeros(7, 1, 11)),
    "key_lengths: got": dict(key_lengths=torch.tensor([12])),
    "key_lengths.*got": dict(key_lengths=torch.tensor([1, 2])),
    "key_lengths.dtype: got": dict(key_lengths=torch.tensor([1.0])),
}


@pytest.mark.parametrize("words", WRONG)
@pytest.mark.parametrize("strategy", ["gather", "ring", "ulysses"])
def test_an_error_about_all_keys_is_raised_on_each_rank(four, strategy, words):
    """A single rank raises the same error."""
    x = torch.zeros(1, 2, 11, 4)
    with pytest.raises((TypeError, ValueError), match=words):
        fastattn.attention(x, x, x, **WRONG[words])
    for found in four.run(2, even, strategy, WRONG[words]):
        with pytest.raises((TypeError, ValueError), match=words):
            raise found


def even(group, strategy, more):
    x = torch.zeros(1, 2, 5 + dist.get_rank(group), 4)
    return distributed.attention(x, x, x, group=group, strategy=strategy, **more)


def of_rank(rank):
    return torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(rank))


def unasked(group, seed):
    x = of_rank(dist.get_rank(group))
    given = dict(group=group, strategy="gather", agree=False, dropout_p=0.4, seed=seed)
    return distributed.attention(x, x, x, **given)


def on_one_rank(group, seed):
    """In a rank's process: this one may have an instruction set that another test selected."""
    x = torch.cat([of_rank(0), of_rank(1)], 2)
    return fastattn.attention(x, x, x, dropout_p=0.4, seed=seed)


def test_ranks_need_no_check_of_agreement(four):
    (right,) = four.run(1, on_one_rank, 7)
    assert torch.equal(torch.cat(four.run(2, unasked, 7), 2), right)
    for error in four.run(2, unasked, None):
        with pytest.raises(ValueError, match="seed: got None, expected the same on every rank"):
            raise error


def die(group, when):
    rank = dist.get_rank(group)
    x = torch.randn(1, 2, 64, 16, requires_grad=True)
    if rank == 1 and when == "before":
        os._exit(1)
    out = distributed.attention(x, x, x, group=group)
    if rank == 1:
        os._exit(1)
    out.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "before its backward"])
def test_a_rank_that_dies_is_reported(when):
    with ranks.ranks(3, timeout=10) as three:
        one, gone, other = three.run(3, die, when)
    assert str(gone) == "gone"
    for found in (one, other):
        with pytest.raises(
            RuntimeError, match=r"rank [02] of 3 lost its group while it waited for"
        ):
            raise found


@pytest.mark.slow
def test_without_a_group_there_is_advice():
    x = torch.zeros(1, 1, 2, 4)
    for call in (lambda: distributed.attention(x, x, x), lambda: distributed.shard(x)):
        with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group"):
            call()
