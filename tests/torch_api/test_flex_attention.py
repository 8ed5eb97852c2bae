"""fastattn.flex_attention: torch's contract, with its BlockMask, and gradients that torch does not
have on CPUs.

The judge is a plain softmax in float64 of scores that torch's vmap makes, one number at a time.
"""

import math
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

import fastattn
from fastattn.dropin import flex, flex_blocks
from tests.support.flex_functions import (
    BIAS,
    GENERAL,
    MASK_MODS,
    OF_DISTANCE,
    SCORE_MODS,
    TABLE,
    B,
    H,
    modified,
    visible,
)
from tests.support.marks import parametrize
from tests.support.torch_version import NO_AUX_REQUEST, NO_SLICED_BLOCK_MASKS, needs, skip_without

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
M, N, D, DV = 37, 41, 16, 24
ALL_SCORE_MODS = SCORE_MODS | GENERAL
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def tensors(dtype=torch.float32, heads=H, of_keys=2, M=M, N=N, grad=False, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = (B, heads, M, D), (B, of_keys, N, D), (B, of_keys, N, DV)
    made = [torch.randn(*shape, generator=draw).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]


def exact(q, k, v, score_mod=None, mask_mod=None, scale=None):
    """(out, LSE, scores) in float64; functions run in float32."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.mT * (1 / math.sqrt(D) if scale is None else scale)
    if score_mod is not None:
        s = modified(score_mod, s)
    if mask_mod is not None:
        shown = visible(mask_mod, q.shape[2], k.shape[2], q.shape[1], q.shape[0])
        s = s.masked_fill(~shown, -torch.inf)
    lse = s.logsumexp(-1)
    return torch.exp(s - lse.nan_to_num(neginf=0)[..., None]) @ v, lse, s


def close(found, expected, dtype):
    bound = {torch.float32: 2e-5, torch.float64: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=bound, atol=bound)


@pytest.fixture(params=["programs", "masks"])
def form(request, monkeypatch):
    """How functions reach kernels: as programs, on a CPU; or as masks, as on a GPU."""
    if request.param == "masks":
        monkeypatch.setattr(flex, "runs_programs", lambda *given: False)
    return request.param


FUNCTIONS = {name: dict(score_mod=x) for name, x in ALL_SCORE_MODS.items()}
FUNCTIONS |= {name: dict(mask_mod=x) for name, x in MASK_MODS.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_function(name, dtype, form):
    given = tensors(DTYPES[dtype])
    out, lse = fastattn.flex_attention(*given, **FUNCTIONS[name], enable_gqa=True, return_lse=True)
    expected, of_rows, _ = exact(*given, **FUNCTIONS[name])
    close(out, expected, DTYPES[dtype])
    close(lse, of_rows, DTYPES[dtype])
    assert out.dtype == DTYPES[dtype]
    assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)


PAIRS = [
    (score, mask)
    for score in ("softcap and bias", "alibi", "hidden keys", "two scores")
    for mask in ("causal", "documents", "heads differ", "rows without keys", "lengths")
]


@pytest.mark.parametrize("score, mask", PAIRS, ids=[" & ".join(x) for x in PAIRS])
def test_gradients(score, mask, form):
    """Of query, key and value, with a loss on out and on the LSE."""
    functions = ALL_SCORE_MODS[score], MASK_MODS[mask]
    given = tensors(grad=True)
    out, lse = fastattn.flex_attention(
        *given, functions[0], enable_gqa=True, mask_mod=functions[1], return_lse=True
    )
    wide = [x.detach().double().requires_grad_() for x in given]
    exact_out, exact_lse, _ = exact(*wide, *functions)
    seen = exact_lse > -torch.inf

    def loss(out, lse):
        return out.double().square().sum() + lse[seen].double().sum()

    found = torch.autograd.grad(loss(out, lse), given)
    for got, expected in zip(found, torch.autograd.grad(loss(exact_out, exact_lse), wide)):
        close(got, expected.nan_to_num(), torch.float32)


CAPTURED = {
    "a table by distance": (TABLE, lambda x: lambda s, b, h, i, j: s + x[h, i - j + 64]),
    "a bias": (BIAS, lambda x: lambda s, b, h, i, j: s + x[b, h, i, j]),
    "a number for each head": (TABLE[:, 0], lambda x: lambda s, b, h, i, j: s - x[h] * (i - j)),
    "one number": (TABLE[0, 0], lambda x: lambda s, b, h, i, j: s + x * j),
    "bfloat16": (OF_DISTANCE, lambda x: lambda s, b, h, i, j: s + x[h, (i - j).abs() % 5]),
    "a scale": (TABLE[:, 1].exp(), lambda x: lambda s, b, h, i, j: s * x[h]),
    "twice": (TABLE[0], lambda x: lambda s, b, h, i, j: s + x[i] * x[j + 3]),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_gradients_of_captured_tensors(name, form):
    start, make = CAPTURED[name]
    captured = start.detach().clone().requires_grad_()
    given = tensors()
    out = fastattn.flex_attention(
        *given, make(captured), enable_gqa=True, mask_mod=MASK_MODS["causal"]
    )
    (found,) = torch.autograd.grad(out.double().square().sum(), captured)
    wide = start.detach().double().requires_grad_()
    expected = exact(*given, make(wide), MASK_MODS["causal"])[0]
    (right,) = torch.autograd.grad(expected.square().sum(), wide)
    assert found.shape == start.shape and found.dtype == start.dtype
    bound = 3e-2 if start.dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(found.double(), right, rtol=bound, atol=bound)


# -- torch's own, which has no gradients here ------------------------------------------------------


@parametrize("score", ["alibi", "softcap and bias", "two scores"], fast=1)
@parametrize("mask", ["causal", "documents of items", "heads differ"], fast=2)
def test_torchs_function(score, mask):
    given, score_mod = tensors(), ALL_SCORE_MODS[score]
    blocks = torchs.create_block_mask(MASK_MODS[mask], B, H, M, N, device="cpu", BLOCK_SIZE=16)
    named = dict(score_mod=score_mod, block_mask=blocks, enable_gqa=True, scale=0.3)
    skip_without(NO_AUX_REQUEST)
    aux = torchs.AuxRequest(lse=True)
    expected, of_rows = torchs.flex_attention(*given, **named, return_aux=aux)
    out, found = fastattn.flex_attention(*given, **named, return_aux=aux)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found.lse, of_rows.lse)
    assert isinstance(found, torchs.AuxOutput) and found.max_scores is None
    assert out.stride() == expected.stride()


@needs(NO_AUX_REQUEST)
def test_max_scores():
    given = tensors(M=300, N=41)
    score_mod = lambda s, b, h, i, j: s - 0.1 * h + 0.01 * (i % 7) * j  # noqa: E731
    mask_mod = lambda b, h, i, j: (i >= j) & (i % 5 != 3)  # noqa: E731
    aux = torchs.AuxRequest(max_scores=True)
    _, found = fastattn.flex_attention(
        *given, score_mod, enable_gqa=True, mask_mod=mask_mod, return_aux=aux
    )
    scores = exact(*given, score_mod, mask_mod)[2]
    assert found.lse is None
    close(found.max_scores, scores.amax(-1), torch.float32)


# -- what fastattn adds ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alibi", "a scale for each head"])
def test_arguments_of_attention(name):
    given, score_mod = tensors(), ALL_SCORE_MODS[name]
    more = dict(sinks=torch.randn(H), dropout_p=0.4, seed=7)
    found = fastattn.flex_attention(*given, score_mod, enable_gqa=True, **more)
    assert torch.equal(found, fastattn.attention(*given, score_mod=score_mod, **more))


STRUCTURE = {  # score_mod, mask_mod: what `attend` gets
    "a band": ("softcap", "window", dict(window=(9, 0), softcap=5.0)),
    "lengths": ("the score", "padding", dict(key_lengths=torch.tensor([41, 50]))),
    "slopes": (
        "slopes of heads",
        "causal",
        dict(window=(None, 0), alibi_slopes=2.0 ** -(torch.arange(1.0, H + 1) * 2)),
    ),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure_costs_no_memory(name, monkeypatch):
    """`attend` gets arguments, and no mask."""
    seen = {}
    whole = flex.attend

    def attend(*args, **kwargs):
        seen.update(kwargs)
        return whole(*args, **kwargs)

    monkeypatch.setattr(flex, "attend", attend)
    score, mask, expected = STRUCTURE[name]
    given, functions = tensors(N=50), (SCORE_MODS[score], MASK_MODS[mask])
    out = fastattn.flex_attention(*given, functions[0], enable_gqa=True, mask_mod=functions[1])
    assert seen.get("mask") is None
    for argument, value in expected.items():
        found = seen[argument]
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
    close(out, exact(*given, *functions)[0], torch.float32)


@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)], ids=str)
@pytest.mark.parametrize("name", ["relative", "clamped"])
def test_nothing(shape, name):
    items, heads, M, N = shape
    q, k = torch.randn(items, heads, M, D), torch.randn(items, heads, N, D)
    out, lse = fastattn.flex_attention(
        q, k, k, ALL_SCORE_MODS[name], mask_mod=MASK_MODS["causal"], return_lse=True
    )
    assert torch.equal(out, torch.zeros(items, heads, M, D))
    assert torch.equal(lse, torch.full((items, heads, M), -torch.inf if not N else 0.0)[..., :M])


ORDERS = {"heads first": (0, 1, 2, 3), "rows first": (0, 2, 1, 3), "items inside": (2, 0, 1, 3)}


@parametrize("name", ["alibi", "a scale for each head"], fast=1)
@parametrize("order", ORDERS, fast=2)
def test_the_output_lies_as_the_query(order, name):
    q, k, _ = tensors(of_keys=H)
    dims = ORDERS[order]
    laid = q.permute(dims).contiguous().permute([dims.index(at) for at in range(4)])
    assert laid.stride() != q.stride() or order == "heads first"
    out = fastattn.flex_attention(laid, k, k, ALL_SCORE_MODS[name])
    expected = torchs.flex_attention(laid, k, k, ALL_SCORE_MODS[name])
    assert out.stride() == expected.stride() == laid.stride()


# -- refused ---------------------------------------------------------------------------------------

q, k, v = tensors(of_keys=H)
REFUSED = {
    "heads": ((q, k[:, :2], v[:, :2]), {}, ValueError, "enable_gqa=True"),
    "3 heads of 4": ((q, k[:, :3], v[:, :3]), dict(enable_gqa=True), ValueError, "multiple of kv"),
    "head dims": ((q, k[..., :8], v), {}, ValueError, "same embedding dimension"),
    "3 dimensions": ((q[0], k[0], v[0]), {}, NotImplementedError, "must be 4D"),
    "both": (
        (q, k, v),
        dict(return_lse=True, return_aux=1),
        ValueError,
        "return_lse and return_aux",
    ),
    "items": ((q, k[:1], v[:1]), {}, ValueError, "same batch size"),
    "no backend": ((q, k, v), dict(backend="none"), ValueError, "backend"),
    "a backend that cannot": (
        (q, k, v),
        dict(score_mod=GENERAL["clamped"], backend="triton"),
        NotImplementedError,
        r"softcap\(score\) \+ f",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    given, named, error, said = REFUSED[case]
    with pytest.raises(error, match=said):
        fastattn.flex_attention(*given, **named)


@pytest.mark.parametrize("name", ["and_masks", "or_masks"])
def test_torchs_makers_of_mask_mods(name):
    assert getattr(fastattn, name) is getattr(torchs, name)


@pytest.mark.slow
def test_torchs_module_is_imported_when_it_is_asked_for():
    code = (
        "import sys, fastattn\n"
        "name = 'torch.nn.attention.flex_attention'\n"
        "assert name not in sys.modules\n"
        "fastattn.and_masks\n"
        "assert name in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -------------------------------------------------------------------------------- torch's BlockMask


SIZE = 8  # of blocks, of which there are 5 x 6
LISTS = {  # for each row of blocks: those of which mask_mod decides, and those that are whole
    "no function": ([[0, y] for y in range(1, 6)], [[]] * 5, lambda b, h, i, j: i > -1),
    "whole blocks skip mask_mod": (
        [[y] for y in range(5)],
        [[y + 1] for y in range(5)],
        MASK_MODS["causal"],
    ),
    "some rows have none": ([[], [1, 2], [], [0], [5]], [[]] * 5, MASK_MODS["both sides"]),
}


def block_mask(name):
    """The BlockMask of some lists, and what it shows (M,N)."""
    partial, whole, mask_mod = LISTS[name]

    def ordered(rows):
        filled = [[*x, *(y for y in range(6) if y not in x)] for x in rows]
        counts = torch.tensor([[[len(x) for x in rows]]], dtype=torch.int32)
        return counts, torch.tensor([[filled]], dtype=torch.int32)

    made = torchs.BlockMask.from_kv_blocks(
        *ordered(partial), *ordered(whole), SIZE, mask_mod, seq_lengths=(M, N)
    )
    shown = torch.zeros(M, N, dtype=torch.bool)
    of_pair = visible(mask_mod, M, N)[0, 0]
    for x in range(5):
        for y in range(6):
            block = slice(x * SIZE, (x + 1) * SIZE), slice(y * SIZE, (y + 1) * SIZE)
            shown[block] = y in whole[x] or (of_pair[block] & (y in partial[x]))
    return made, shown


@pytest.mark.parametrize("name", LISTS)
def test_the_lists_of_a_block_mask_decide(name):
    """Unlisted blocks stay hidden, even where its mask_mod shows their keys. torch's function reads
    the lists where it is compiled."""
    given, (made, shown) = tensors(), block_mask(name)
    out = fastattn.flex_attention(*given, block_mask=made, enable_gqa=True)
    close(out, exact(*given, mask_mod=lambda b, h, i, j: shown[i, j])[0], torch.float32)
    both = fastattn.flex_attention(
        *given, block_mask=made, mask_mod=MASK_MODS["window"], enable_gqa=True
    )
    shown &= visible(MASK_MODS["window"], M, N)[0, 0]
    close(both, exact(*given, mask_mod=lambda b, h, i, j: shown[i, j])[0], torch.float32)


def test_a_block_mask_of_all_blocks_costs_nothing():
    nothing = torchs._create_empty_block_mask(*tensors()[:2])
    assert flex_blocks.mask_mod_of(nothing).__name__ == "noop_mask"
    given = tensors()
    out = fastattn.flex_attention(*given, block_mask=nothing, enable_gqa=True)
    torch.testing.assert_close(out, fastattn.flex_attention(*given, enable_gqa=True))


def test_one_item_of_keys_for_all():
    q, k, v = tensors()
    blocks = torchs.create_block_mask(MASK_MODS["lengths"], B, None, M, N, device="cpu")
    named = dict(block_mask=blocks, enable_gqa=True)
    expected = torchs.flex_attention(q, k[:1], v[:1], **named)
    torch.testing.assert_close(fastattn.flex_attention(q, k[:1], v[:1], **named), expected)


def test_a_cropped_block_mask():
    blocks = torchs.create_block_mask(MASK_MODS["causal"], None, None, 64, 64, device="cpu")
    given = tensors()
    with pytest.raises(ValueError, match=r"got q_len=37 and kv_len=41.*_adjust"):
        fastattn.flex_attention(*given, block_mask=blocks, enable_gqa=True)
    cropped = blocks._adjust(M, N)
    if cropped.shape[-2:] != (M, N):
        pytest.skip("torch rounds the lengths of a cropped block mask up to whole blocks")
    out = fastattn.flex_attention(*given, block_mask=cropped, enable_gqa=True)
    close(out, exact(*given, mask_mod=MASK_MODS["causal"])[0], torch.float32)


def test_block_masks_of_other_lengths_and_slices_are_refused():
    q, k, v = tensors()
    made = block_mask("no function")[0]
    with pytest.raises(ValueError, match="q_len=36"):
        fastattn.flex_attention(q[:, :, 1:], k, v, block_mask=made, enable_gqa=True)
    skip_without(NO_SLICED_BLOCK_MASKS)
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        fastattn.flex_attention(q, k, v, block_mask=made[:, :], enable_gqa=True)


def test_a_torch_without_aux_requests_refuses_them(monkeypatch):
    monkeypatch.setattr(flex, "TORCH_VERSION", (2, 8))
    with pytest.raises(NotImplementedError, match="return_aux: got one with torch 2"):
        fastattn.flex_attention(*tensors(), enable_gqa=True, return_aux=object())
