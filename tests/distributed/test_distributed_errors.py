"""Ranks that differ, are missing or raise, and wrong arguments: each rank raises what is wrong."""

import os

import pytest
import torch
import torch.distributed as dist

import fastattn
from fastattn import distributed
from tests.distributed.test_distributed import MESH
from tests.support import ranks


def pack_wrongly(group, what):
    """Two sequences, of 3 rows and of all other rows: most ranks have no row of the first."""
    team = distributed.consistency.need_team(group)
    rank, x, cu = team.rank, torch.zeros(4, 3, 8), torch.tensor([0, 3, 4 * team.ranks])
    given = dict(q=x, k=x, v=x, cu_q=cu, cu_k=cu) | {n: y for n, y in what.items() if n != "on_1"}
    given |= what.get("on_1", {}) if rank == 1 else {}
    return distributed.attention_packed(**given, group=group)


def named(what):
    return "".join(c for c in str(what) if c.isalnum())[:40]


X = torch.zeros(4, 3, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, words",
    [
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
    ],
    ids=named,
)
def test_packed_batches_that_raise(four, what, words):
    for found in four.run(2, pack_wrongly, what):
        with pytest.raises(ValueError, match=words):
            raise found


@pytest.mark.parametrize(
    "what, words",
    [
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
    ],
    ids=named,
)
@pytest.mark.parametrize("count", [3, MESH], ids=str)
def test_ranks_that_differ_on_a_packed_batch(four, count, what, words):
    if count == MESH:  # a mesh has 16 rows
        words = words.replace(r"\[0, 3, 12\]", r"\[0, 3, 16\]")
    for found in four.run(count, pack_wrongly, dict(on_1=what)):
        with pytest.raises(ValueError, match=words):
            raise found


@pytest.mark.parametrize(
    "what, kind, words",
    [
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
    ],
    ids=named,
)
def test_a_rank_failing_on_a_packed_batch_is_named(four, what, kind, words):
    one, own, other = four.run(3, pack_wrongly, dict(on_1=what))
    with pytest.raises(kind, match=words):
        raise own
    name = type(own).__name__
    for found in (one, other):
        with pytest.raises(RuntimeError, match=f"rank 1 of 3 raised {name}.*{words}"):
            raise found


# -- ranks that differ or are missing --------------------------------------------------------------


def differ(group, what):
    rank = dist.get_rank(group)
    x = torch.zeros(2, 4, 6, 8)
    own = {"group": group}
    if rank == 2:
        given = {
            "shape": ((x[:1], x[:1], x[:1]), {}),
            "dtype": ((x.double(), x.double(), x.double()), {}),
            "dims": ((x[0], x, x), {}),
            "type": ((x.numpy(), x, x), {}),
            "causal": ((x, x, x), dict(causal=True)),
            "dropout": ((x, x, x), dict(dropout_p=0.1, seed=1)),
            "sinks": ((x, x, x), dict(sinks=torch.ones(4))),
            "strategy": ((x, x, x), dict(strategy="gather")),
            "return_lse": ((x, x, x), dict(return_lse=True)),
            "gradient": ((x.requires_grad_(), x, x), {}),
            "softcap": ((x, x, x), dict(softcap=-1.0)),
            "mask": ((x, x, x), dict(mask=torch.zeros(5, 18))),
            "place": ((x, x, x), dict(place=fastattn.Place(row=3))),
        }[what]
    else:
        given = ((x, x, x), {})
    args, more = given
    if what == "sinks":
        own["sinks"] = torch.zeros(4)
    return distributed.attention(*args, **own | more).shape


DIFFERENCES = {
    "shape": r"q: got .*1, 4, 'any', 8.* on rank 2, expected .*2, 4, 'any', 8.* as on rank 0",
    "dtype": r"q: got \('torch.float64'.* on rank 2, expected \('torch.float32'",
    "causal": r"causal: got True on rank 2, expected False, as on rank 0",
    "dropout": r"dropout_p: got 0.1 on rank 2, expected 0.*seed: got 1 on rank 2, expected None",
    "sinks": r"sinks: got .*1.0, 1.0.* on rank 2, expected .*0.0, 0.0.* as on rank 0",
    "strategy": r"strategy: got gather on rank 2, expected auto, as on rank 0",
    "return_lse": r"return_lse: got True on rank 2, expected False, as on rank 0",
    "gradient": r"q: got .*'with gradient'\) on rank 2, expected .*'without gradient'",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ(four, what):
    for found in four.run(3, differ, what):
        assert isinstance(found, ValueError)
        with pytest.raises(ValueError, match=DIFFERENCES[what]):
            raise found


TROUBLES = {
    "dims": (ValueError, "q: got"),
    "type": (TypeError, "q: got ndarray, expected a torch.Tensor"),
    "softcap": (ValueError, "softcap: got -1.0"),
    "mask": (ValueError, "mask: got 5 rows, expected 1, or this rank's 6, by all keys"),
    "place": (ValueError, "place: got Place.row=3.* expected only head, item and bottom_right"),
}


@pytest.mark.parametrize("what", TROUBLES)
def test_a_failing_rank_is_named(four, what):
    kind, words = TROUBLES[what]
    *others, own = four.run(3, differ, what)
    with pytest.raises(kind, match=words):
        raise own
    for found in others:
        with pytest.raises(RuntimeError, match=f"rank 2 of 3 raised {kind.__name__}.*{words}"):
            raise found


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


def alike(group, strategy, layout, more):
    rank = dist.get_rank(group)
    x = torch.zeros(1, 3, 5 + (rank == 1), 4)
    return distributed.attention(x, x, x, group=group, strategy=strategy, layout=layout, **more)


@pytest.mark.parametrize(
    "strategy, layout, more, words",
    [
        ("ulysses", "contiguous", {}, "got 'ulysses' for 3 heads on 2 ranks, expected ranks that"),
        ("rings", "contiguous", {}, "strategy: got 'rings', expected one of 'auto', 'gather', "),
        ("gather", "spiral", {}, "layout: got 'spiral', expected 'contiguous' or 'zigzag'"),
        ("gather", "contiguous", dict(mask=torch.zeros(1, 7)), "mask: got"),
    ],
)
def test_an_error_common_to_all_ranks_is_raised_on_each(four, strategy, layout, more, words):
    for found in four.run(2, alike, strategy, layout, more):
        with pytest.raises(ValueError, match=words):
            raise found


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
