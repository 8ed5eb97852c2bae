"""Slices of the kernels of csrc/cuda/sm90, besides those of slices.py."""

from dataclasses import replace

import torch

import fastattn
from tests.semantics import test_packed
from tests.support import large_logits
from tests.support.cases import FEATURE, Dims, build
from tests.support.edge_cases import expanded, with_nan_behind
from tests.support.error_budget import Verdict

from .slices import named, with_strong_sinks


def in_sequences(features, backward, sizes):
    """A packed batch. With key lengths, NaN follows the keys of a sequence."""
    made = test_packed.batch([FEATURE[x] for x in features], torch.bfloat16, sizes, 64)
    return test_packed.complaints(made, made.run(backward=backward))


SIZES = ((5, 7), (0, 3), (137, 251), (65, 129), (129, 20))


@named("forward")
def sequences():
    return in_sequences(["bottom_right", "lengths"], False, SIZES)


@named("backward")
def sequences_with_gradients():
    return in_sequences(["bottom_right", "lengths"], True, SIZES)


@named("backward")
def nan_in_the_next_sequence():
    """NaN in the rows of a sequence changes no bit of another one."""
    made = test_packed.batch((), torch.bfloat16, SIZES, 64)
    right, rows = made.run(), made.rows[3]
    made.given["q"] = made.given["q"].clone()
    made.given["q"][rows] = made.dout[rows] = torch.nan
    found = made.run()
    for b in (0, 2, 4):
        before = made.of_sequence(right, b)
        for name, x in made.of_sequence(found, b).items():
            if not torch.equal(x, before[name]):
                yield f"sequence {b}, {name}: other bits"


@named("forward", "decode")
def strong_sinks():
    """The sinks take most of each row."""
    for name in ("several tiles+sinks", "one split+sinks"):
        yield from with_strong_sinks(name)


@named("decode")
def splits_of_sequences():
    return in_sequences([], False, ((3, 341), (2, 0), (4, 570), (1, 64)))


@named("forward", "decode")
def nan_behind_lengths():
    """NaN behind the lengths of keys changes no bit."""
    for M in (70, 3):
        problem = build(Dims(2, 2, 1, M, 300, 64, 64), (), torch.bfloat16)
        lengths = torch.tensor([201, 17])
        spoiled = with_nan_behind(problem, lengths)
        right, found = (
            fastattn.attention(x.q, x.k, x.v, key_lengths=lengths) for x in (problem, spoiled)
        )
        if not torch.equal(right, found):
            yield f"{M} rows: other bits"


@named("backward")
def lengths_within_blocks():
    problem = build(Dims(2, 2, 1, 150, 300, 64, 64), (), torch.bfloat16)
    problem.kwargs["key_lengths"] = torch.tensor([201, 17])
    return Verdict(problem).complaints(fastattn.attention)


@named("backward", others=True)  # the weights have no kernels of sm90
def large_logits_of_sm90():
    # With so many keys, what rounding cuts off the LSE is most of what it can be.
    return large_logits.complaints(large_logits.far_logits(torch.bfloat16, M=37, N=212))


@named("forward")
def strides_of_0():
    """A dimension of stride 0 has size 1 in a tensor map."""
    problem = build(Dims(2, 2, 2, 40, 70, 64, 64), (), torch.bfloat16)
    of_one = replace(problem, q=problem.q[:, :1].expand_as(problem.q))
    return Verdict(expanded(of_one), backward=False).complaints(fastattn.attention)
