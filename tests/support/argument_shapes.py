"""Every shape and dtype that a tensor argument may have, from `spec.ARGUMENTS`, for tests that are
generated from these declarations."""

import itertools

import torch

from fastattn.call.spec import ARGUMENTS, acc_dtype

# The optional tensors that `attention` and `attention_packed` take, by their names in `Tensors`.
OPTIONAL = ("mask", "key_lengths", "alibi_slopes", "sinks", "seed")


def shapes_of(name, sizes):
    """The shapes that a tensor of `Tensors` may have, the fewest dimensions first.

    sizes: the size for each letter in `Argument.shapes`, as dict(B=3, H=4, M=5, N=6). A shape that
    broadcasts is given with every number of leading dimensions dropped, and with each dimension
    left at 1 or at its full size. A one-element argument of any shape is given with no dimension,
    one and two.
    """
    argument, found = ARGUMENTS[name], []
    for letters in argument.shapes:
        full = tuple(sizes[x] for x in letters.split())
        if argument.broadcast:
            for rank in range(len(full) + 1):
                found += itertools.product(*((1, n) for n in full[len(full) - rank :]))
        elif not letters:
            found += (), (1,), (1, 1)
        else:
            found.append(full)
    return list(dict.fromkeys(found))


def dtypes_of(name, dtype):
    """The dtypes that the tensor may have if q has this dtype."""
    rules = {
        "mask": (torch.bool, dtype, torch.float32),
        "integer": (torch.int64, torch.int32),
        "int64": (torch.int64,),
        "floating": (acc_dtype(dtype), dtype, torch.float64),
        "acc": (acc_dtype(dtype),),
        "float32": (torch.float32,),
    }
    return list(dict.fromkeys(rules.get(ARGUMENTS[name].dtype, (dtype,))))


def has_gradient(name, dtype):
    """May a tensor of this name and dtype require a gradient?"""
    return ARGUMENTS[name].gradient and dtype.is_floating_point
