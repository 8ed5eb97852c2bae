"""Keys that no row sees change no bit on planes, whatever their values are."""

from dataclasses import replace

import pytest
import torch

from tests.cpu.test_amx import every_tiled, on_tiles
from tests.cpu.test_amx_bf16_split import case, computed, differ, every_planed, same
from tests.support.cases import Dims
from tests.support.marks import parametrize

pytestmark = on_tiles


# ---------------------------------------------------------------------------- keys that no row sees


def masked(m, n):
    """Hide a few keys in between, one in the middle, and the last 20."""
    draw = torch.rand(m, n, generator=torch.Generator().manual_seed(0))
    hidden = torch.zeros(n, dtype=torch.bool)
    hidden[3:9] = hidden[n // 2] = hidden[-20:] = True
    return {"mask": (draw < 0.8) & ~hidden}, hidden


def padded(m, n):
    hidden = torch.arange(n) >= n - 20
    return {"mask": ~hidden.view(1, 1, 1, n)}, hidden


def windowed(m, n, step):
    """Hide whole steps of keys before the first that any row sees."""
    first = (n - m - 20) // step * step
    return {"causal": "bottom_right", "window": (20, 0)}, torch.arange(n) < first


def masked_in_a_window(m, n):
    """Hide keys that the mask shows only to rows with a window that does not include them."""
    distance = torch.arange(m).view(m, 1) + n - m - torch.arange(n)
    hidden = torch.zeros(n, dtype=torch.bool)
    hidden[n - 6 :: 2] = hidden[n - m // 2 - 5] = True
    mask = ~(hidden & (distance >= 0) & (distance <= 5))
    return {"causal": "bottom_right", "window": (5, 0), "mask": mask}, hidden


# name -> (m, n) -> (arguments, the keys (N,) bool that they hide from all rows)
HIDING = {
    "causal": lambda m, n: ({"causal": True}, torch.arange(n) >= m),
    "window": lambda m, n: ({"window": (None, 3)}, torch.arange(n) >= m + 3),
    "lengths": lambda m, n: ({"key_lengths": torch.tensor([n - 30])}, torch.arange(n) >= n - 30),
    "steps before a window": lambda m, n: windowed(m, n, 32),
    "keys before a window": lambda m, n: windowed(m, n, 1),
    "mask": masked,
    "padding mask": padded,
    "mask in a window": masked_in_a_window,
}
# How keys are hidden that kernels still read: they are multiplied by weights of 0.
READ = ("keys before a window", "mask", "padding mask", "mask in a window")
UNSEEN_SHAPES = {
    "70 rows": Dims(1, 2, 1, 70, 150, 33, 40),
    "100 rows": Dims(1, 1, 1, 100, 290, 33, 40),
    "3 rows of 4 heads": Dims(1, 8, 2, 3, 150, 33, 40),
    "3 rows, chunks": Dims(1, 4, 1, 3, 1100, 32, 32),
}
UNSEEN = {
    "float32": (torch.nan, torch.inf, -torch.inf, 3e38, 1e-40),
    "float16": (torch.nan, torch.inf, -torch.inf, 6e4, 6e-8),
}


def opaque_to_dynamo(dtype, how):
    """[(tensors, value)] to fill hidden keys with. Where these are read, v gets no NaN, as 0 * NaN
    is NaN, and no 3e38, which makes dP infinite."""
    values = UNSEEN[dtype]
    if how not in READ:
        return [(("k", "v"), value) for value in values]
    return [(("k",), value) for value in values] + [(("k", "v"), x) for x in (1e36, values[-1])]


def filled(problem, names, keys, value):
    changed = {x: getattr(problem, x).clone() for x in names}
    for x in changed.values():
        x[:, :, keys] = min(value, torch.finfo(x.dtype).max) if value < torch.inf else value
    return replace(problem, **changed)


@every_tiled
@every_planed
@pytest.mark.parametrize("shape", UNSEEN_SHAPES)
@parametrize("how", HIDING, fast=3)
def test_a_key_hidden_from_all_rows_changes_no_bit(isa, how, shape, dtype):
    """Neither the contents of the key nor its lack of planes has an effect."""
    dims = UNSEEN_SHAPES[shape]
    arguments, hidden = HIDING[how](dims.M, dims.N)
    clean = case(dims, dtype, **arguments)
    expected = computed(isa, clean)
    assert hidden.any() and not expected["weights"][..., hidden].any()
    for names, value in opaque_to_dynamo(dtype, how):
        found = computed(isa, filled(clean, names, hidden, value))
        if how in READ and not abs(value) < torch.inf:
            found.pop("dq")  # it has 0 * NaN, as in torch
        for name, mine in found.items():
            right = expected[name]
            if name in ("dk", "dv"):
                assert not mine[:, :, hidden].any(), (names, value, name)
                mine, right = mine[:, :, ~hidden], right[:, :, ~hidden]
            assert same(mine, right), (names, value, name)


# Three causal rows see only three to six of the first keys and would run another kernel.
APPENDED = [
    (how, shape)
    for how in ("causal", "window", "lengths", "padding mask")
    for shape, dims in UNSEEN_SHAPES.items()
    if dims.M > 16 or how not in ("causal", "window")
]


@every_tiled
@every_planed
@pytest.mark.parametrize("how, shape", APPENDED)
def test_a_key_hidden_from_all_rows_equals_an_absent_one(isa, how, shape, dtype):
    """Appended keys with any contents."""
    dims = UNSEEN_SHAPES[shape]
    arguments, hidden = HIDING[how](dims.M, dims.N)
    whole = case(dims, dtype, **arguments)
    kept = int((~hidden).sum())
    cut = replace(whole, k=whole.k[:, :, :kept].clone(), v=whole.v[:, :, :kept].clone())
    if how in ("lengths", "padding mask"):
        cut.kwargs = {"return_lse": True}
    expected = computed(isa, cut)
    for names, value in opaque_to_dynamo(dtype, how)[-2:]:
        found = computed(isa, filled(whole, names, hidden, value))
        found["weights"] = found["weights"][..., :kept]
        found |= {name: found[name][:, :, :kept] for name in ("dk", "dv")}
        assert not differ(found, expected), (names, value)
