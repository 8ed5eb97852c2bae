"""Bad values of arguments: the calls that raise."""

import math

import torch


def bad(argument, value, error=ValueError):
    """A value that any call must refuse, as a function of the call."""
    return argument, (value if callable(value) else lambda problem: value), error


# By reason. All raise ValueError or TypeError.
REFUSED = {
    "rank": bad("q", lambda p: p.q[0]),
    "integers": bad("q", lambda p: p.q.to(torch.int32)),
    "no tensor": bad("k", lambda p: p.k.tolist(), TypeError),
    "two dtypes": bad("k", lambda p: p.k.to(other_dtype(p.k.dtype))),
    "two batch sizes": bad("v", lambda p: torch.cat([p.v, p.v[:1]])),
    "two head dims": bad("k", lambda p: torch.cat([p.k, p.k], -1)),
    "two key counts": bad("v", lambda p: torch.cat([p.v, p.v[:, :, :1]], 2)),
    "two key heads": bad("v", lambda p: torch.cat([p.v, p.v], 1)),
    "heads do not divide": bad("q", lambda p: torch.cat([p.q, p.q[:, :1]], 1)),
    "mask too large": bad("mask", lambda p: torch.ones(p.k.shape[2] + 2, dtype=torch.bool)),
    "mask of rank 5": bad("mask", torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)),
    "mask of integers": bad("mask", torch.ones(1, 1, dtype=torch.int64)),
    "no such causal": bad("causal", "diagonal"),
    "window to the right of itself": bad("window", (-1, 2)),
    "negative right window": bad("window", (None, -3)),
    "window of one edge": bad("window", (2,)),
    "window of halves": bad("window", (1.5, 2), TypeError),
    "length past the end": bad("key_lengths", lambda p: lengths_of(p, p.k.shape[2] + 1)),
    "negative length": bad("key_lengths", lambda p: lengths_of(p, -1)),
    "lengths of rank 2": bad("key_lengths", lambda p: lengths_of(p, 1)[None]),
    "too many lengths": bad("key_lengths", lambda p: lengths_of(p, 1).repeat(2)),
    "float lengths": bad("key_lengths", lambda p: lengths_of(p, 1).float()),
    "slopes of another size": bad("alibi_slopes", lambda p: torch.ones(p.q.shape[1] + 1)),
    "sinks of another size": bad("sinks", lambda p: torch.ones(p.q.shape[1] + 1)),
    "softcap of 0": bad("softcap", 0.0),
    "negative softcap": bad("softcap", -1.0),
    "NaN softcap": bad("softcap", math.nan),
    "negative p": bad("dropout_p", -0.1),
    "p above 1": bad("dropout_p", 1.1),
    "NaN p": bad("dropout_p", math.nan),
    "NaN scale": bad("scale", math.nan),
    "infinite scale": bad("scale", math.inf),
    "a word for a scale": bad("scale", "half", TypeError),
    "no such backend": bad("backend", "abacus"),
}


def other_dtype(dtype):
    return torch.float32 if dtype != torch.float32 else torch.float64


def lengths_of(problem, length):
    return torch.full((problem.q.shape[0],), length)
