"""The order of a forward operator's arguments: those of version 0.1.0 first, then later ones.

Saved programs call the operators by position. The later arguments have defaults, so that programs
that were saved before them load. Within the package a call is a pair, `Tensors` and `Options`; the
operators of other passes, which no saved program of inference has, take these two one after the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..call.spec import Options, Tensors

LATER = ("captured_floats", "captured_ints", "mask_blocks", "score_mod", "captured_sizes")
_OWN = (*Tensors._fields, *Options._fields)  # the order of the pair
FIELDS = (*(x for x in _OWN if x not in LATER), *LATER)
N_TENSORS = len(Tensors._fields)
_AT = [_OWN.index(name) for name in FIELDS]
_FROM = [FIELDS.index(name) for name in _OWN]
_DEFAULTS = {**Tensors._field_defaults, **Options._field_defaults}


def flat(t: Sequence[Any], o: Sequence[Any]) -> tuple[Any, ...]:
    """One sequence of arguments from those of the pair. It may be one of something for each
    argument, such as gradients."""
    every = (*t, *o)
    return tuple(every[at] for at in _AT)


def pair(args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The reverse. Later arguments may be absent."""
    lacking = FIELDS[len(args) :]
    args = (*args, *(_DEFAULTS[name] for name in lacking)) if lacking else args
    every = [args[at] for at in _FROM]
    return tuple(every[:N_TENSORS]), tuple(every[N_TENSORS:])
