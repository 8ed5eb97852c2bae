"""patch() and sdpa() run torch.nn.attention.varlen's functions on fastattn: values against a
float64 loop over sequences, gradients, refusals, older and newer forms of torch's functions.

Most tests put functions with the arguments of one version of torch into a module of torch's name,
so that they run with every version. test_varlen_names.py calls those of the installed torch."""

import inspect
import math
import sys
import types
from typing import NamedTuple

import pytest
import torch

import fastattn
from fastattn.dropin import fused_kernels, varlen, varlen_patching

# Rows and keys of each sequence: with none of either, more rows than keys, and one of each.
LENGTHS = [(5, 5), (0, 4), (7, 3), (2, 9), (3, 0), (1, 1)]
WINDOWS = [(-1, -1), (-1, 0), (2, 0), (0, 0), (-1, 1), (1, -1), (3, 2), (50, 50), (-7, -2)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class AuxRequest(NamedTuple):
    lse: bool = False


class NewerAuxRequest(NamedTuple):
    lse: bool = False
    max_scores: bool = False


LSE = AuxRequest(lse=True)


class RanTorchs(Exception):
    """Raised by the functions that stand for torch's."""


def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    raise RanTorchs


def of_2_11(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
):
    raise RanTorchs


def of_2_13(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    raise RanTorchs


def out_of_2_13(
    out,
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    raise RanTorchs


def newer(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, cap=(0, 1.0), on=False, sinks=None
):
    raise RanTorchs


@pytest.fixture
def serve(monkeypatch):
    """Put functions of these forms into torch's module, and return what a patch makes of them."""
    module = types.ModuleType(varlen_patching.MODULE)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(varlen_patching, "_torchs", {})
    theirs = {}

    def serve(varlen_attn, varlen_attn_out=None):
        theirs.update(varlen_attn=varlen_attn, varlen_attn_out=varlen_attn_out)
        for name, form in theirs.items():
            if form is not None:
                form.__module__ = module.__name__
            setattr(module, name, form)
        fastattn.patch()
        ours = [getattr(module, name) for name in theirs if theirs[name] is not None]
        assert not set(ours) & set(theirs.values())
        return ours if len(ours) > 1 else ours[0]

    yield serve
    if theirs:
        fastattn.unpatch()
        assert {name: getattr(module, name) for name in theirs} == theirs


@pytest.fixture
def varlen_attn(serve):
    return serve(of_2_13)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(lengths=LENGTHS, H=4, Hk=2, D=8, Dv=8, dtype=torch.float64, grads=True):
    """query, key, value, cu_seq_q, cu_seq_k, max_q, max_k."""
    generator = torch.Generator().manual_seed(7)
    rows, keys = zip(*lengths)
    shapes = (sum(rows), H, D), (sum(keys), Hk, D), (sum(keys), Hk, Dv)
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    q, k, v = (x.to(dtype).requires_grad_(grads) for x in tensors)
    return q, k, v, offsets(rows), offsets(keys), max(rows), max(keys)


def expected(q, k, v, cu_q, cu_k, *, scale=None, window_size=(-1, -1), used=None):
    """The output (T, H, Dv) and the LSE (H, T) by torch's documentation: sequence by sequence, in
    the tensors' dtype; row i of M stands at i + N - M of N keys."""
    (left, right), group = window_size, q.shape[1] // k.shape[1]
    outs, lses = [], []
    for b in range(len(cu_q) - 1):
        rows = q[cu_q[b] : cu_q[b + 1]]
        end = cu_k[b + 1] if used is None else cu_k[b] + used[b]
        keys, values = (x[cu_k[b] : end].repeat_interleave(group, 1) for x in (k, v))
        M, N = len(rows), len(keys)
        s = torch.einsum("ihd,jhd->hij", rows, keys)
        s = s * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        i, j = torch.arange(M)[:, None] + N - M, torch.arange(N)
        seen = torch.ones(M, N, dtype=torch.bool)
        if left >= 0:
            seen &= j >= i - left
        if right >= 0:
            seen &= j <= i + right
        some = seen.any(1)
        out = rows.new_zeros(M, q.shape[1], v.shape[-1])
        lse = rows.new_full((q.shape[1], M), -math.inf)
        shown = s[:, some].masked_fill(~seen[some], -math.inf)
        out[some] = torch.einsum("hij,jhd->ihd", shown.softmax(-1), values)
        lse[:, some] = shown.logsumexp(-1)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


def near(found, exact, dtype):
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), exact.double(), rtol=tolerance, atol=tolerance)


def gradients(out, lse, inputs):
    """Of a loss on the output and on the LSE of all rows that see a key."""
    seen = lse.isfinite().detach()
    loss = (out.double() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
    loss = loss + (lse.double() * torch.linspace(0, 1, lse.numel()).view(lse.shape))[seen].sum()
    return torch.autograd.grad(loss, inputs)


def compare(varlen_attn, given, dtype, of_oracle, **arguments):
    q, k, v, cu_q, cu_k, *_ = given
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = expected(*wide, cu_q, cu_k, **of_oracle)
    found = varlen_attn(*given, return_aux=LSE, enable_gqa=True, **arguments)
    assert found[0].dtype == dtype and found[0].shape == exact[0].shape
    assert found[1].dtype == torch.promote_types(dtype, torch.float32)
    assert found[1].shape == (q.shape[1], len(q)) and found[1].is_contiguous()
    near(found[0], exact[0], dtype)
    near(found[1], exact[1], torch.float32 if dtype.itemsize < 8 else dtype)
    of_found, of_exact = gradients(*found, (q, k, v)), gradients(*exact, wide)
    for x, want in zip(of_found, of_exact):
        assert x.dtype == dtype
        near(x, want, dtype)


@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_values_and_gradients(varlen_attn, dtype, window_size):
    given = packed(dtype=dtype)
    compare(varlen_attn, given, dtype, dict(window_size=window_size), window_size=window_size)


def test_scale_and_wider_values(varlen_attn):
    given = packed(D=8, Dv=5)
    window = dict(window_size=(4, 0), scale=0.3)
    compare(varlen_attn, given, torch.float64, window, **window)


def test_rows_that_see_no_key(varlen_attn):
    given = packed([(7, 3)])
    out, lse = varlen_attn(*given, window_size=(-1, 0), enable_gqa=True, return_aux=LSE)
    assert torch.equal(out[:4], torch.zeros_like(out[:4])) and (lse[:, :4] == -math.inf).all()
    assert out[4:].all() and lse[:, 4:].isfinite().all()
    (dq,) = torch.autograd.grad(out.sum(), given[0])
    assert not dq[:4].any() and dq[5:].any()  # row 4 sees one key: the softmax is constant


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(0, 3), (0, 0)]], ids=str)
def test_no_rows_at_all(varlen_attn, lengths):
    tensors = packed([*lengths, (1, 1)])[:3]
    q, k, v = (x[:-1] for x in tensors)
    rows, keys = zip(*lengths) if lengths else ((), ())
    cu = offsets(rows), offsets(keys)
    out, lse = varlen_attn(q, k, v, *cu, 0, 3, enable_gqa=True, return_aux=LSE)
    assert out.shape == (0, 4, 8) and lse.shape == (4, 0)


def test_second_derivatives(varlen_attn):
    *tensors, cu_q, cu_k, max_q, max_k = packed([(3, 4), (2, 2)], D=3, Dv=3)

    def call(q, k, v):
        rest = dict(window_size=(2, 0), enable_gqa=True, return_aux=LSE)
        return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **rest)

    assert torch.autograd.gradgradcheck(call, tensors)


def test_positional_and_named_arguments_are_the_same_call(varlen_attn):
    given = packed(Hk=4)
    names = list(inspect.signature(of_2_13).parameters)
    found = varlen_attn(**dict(zip(names, given)))
    assert torch.equal(found, varlen_attn(*given))
    assert torch.equal(found, varlen_attn(*given[:3], **dict(zip(names[3:], given[3:]))))


# ------------------------------------------------------------------------- used keys, and pages


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (2, 0), (1, 1)], ids=str)
def test_used_keys(varlen_attn, window_size):
    """What lies behind them is not read: it is NaN. max_k may count all keys, or the used ones."""
    q, k, v, cu_q, cu_k, max_q, max_k = packed()
    used = torch.tensor([3, 0, 2, 7, 0, 1]).int()
    exact = expected(q, k, v, cu_q, cu_k, window_size=window_size, used=used)
    want = gradients(*exact, (q, k, v))
    holes = [x.detach().clone() for x in (k, v)]
    for b, keys in enumerate(used):
        for x in holes:
            x[cu_k[b] + keys : cu_k[b + 1]] = math.nan
    given = [x.requires_grad_() for x in (q, *holes)]
    rest = dict(window_size=window_size, enable_gqa=True, return_aux=LSE)
    for most in (max_k, int(used.max())):
        found = varlen_attn(*given, cu_q, cu_k, max_q, most, seqused_k=used, **rest)
        near(found[0], exact[0], torch.float64)
        near(found[1], exact[1], torch.float64)
        for x, y in zip(gradients(*found, given), want):
            near(x, y, torch.float64)


@pytest.mark.parametrize("offsets_too", [False, True], ids=["None", "cu_seq_k"])
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (2, 1)], ids=str)
def test_pages(varlen_attn, window_size, offsets_too):
    """The pages of a sequence lie in any order; a table may name what no length reaches."""
    q, k, v, cu_q, cu_k, max_q, _ = packed()
    used = cu_k.diff()
    exact = expected(q, k, v, cu_q, cu_k, window_size=window_size)
    page, blocks = 4, 3
    table = torch.randperm(len(used) * blocks, generator=torch.Generator().manual_seed(1))
    table = table.view(len(used), blocks).int()
    pools = []
    for x in (k, v):
        pool = torch.full((table.numel(), page, *x.shape[1:]), math.nan, dtype=x.dtype)
        for b, keys in enumerate(used):
            for j in range(keys):
                pool[table[b, j // page], j % page] = x[cu_k[b] + j].detach()
        pools.append(pool.requires_grad_())
    cu = torch.arange(len(cu_q)).int() * page * blocks if offsets_too else None
    found = varlen_attn(
        *(q, *pools, cu_q, cu, max_q, page * blocks),
        seqused_k=used,
        block_table=table,
        window_size=window_size,
        enable_gqa=True,
        return_aux=LSE,
    )
    near(found[0], exact[0], torch.float64)
    near(found[1], exact[1], torch.float64)
    of_found, of_exact = gradients(*found, (q, *pools)), gradients(*exact, (q, k, v))
    near(of_found[0], of_exact[0], torch.float64)
    for pool, want in zip(of_found[1:], of_exact[1:]):
        rows = [pool[table[b, j // page], j % page] for b, n in enumerate(used) for j in range(n)]
        near(torch.stack(rows), want, torch.float64)


def test_num_splits(varlen_attn, monkeypatch):
    """1 asks for bits that do not depend on other sequences. A CPU's never do."""
    given = packed(Hk=4)
    whole = varlen_attn(*given)
    for splits in (0, 1, 3):
        assert torch.equal(varlen_attn(*given, num_splits=splits), whole)
    alone = varlen_attn(*(x[:5] for x in given[:3]), *(x[:2] for x in given[3:5]), 5, 5)
    assert torch.equal(alone, whole[:5])

    asked = []

    def spy(q, *_, row_invariant, **__):
        asked.append(row_invariant)
        return q, q[..., 0]

    monkeypatch.setattr(varlen, "attention_packed", spy)
    for device in ("cpu", "meta"):  # meta is any device but a CPU
        tensors = [x.to(device) for x in given[:5]]
        for splits in (None, 1, 3):
            varlen.varlen_attn(*tensors, *given[5:], num_splits=splits)
    assert asked == [False, False, False, False, True, False]


# ------------------------------------------------------------------------------------------ out=


def test_out_is_written_and_returned(serve):
    plain, into = serve(of_2_13, out_of_2_13)
    given = packed(Hk=4)
    want, lse = plain(*given, return_aux=LSE, window_size=(-1, 0))
    out = torch.full_like(given[0].detach(), math.nan)
    found, found_lse = into(out, *given, return_aux=LSE, window_size=(-1, 0))
    assert found is out and torch.equal(out, want) and torch.equal(found_lse, lse)
    for x, y in zip(gradients(out, found_lse, given[:3]), gradients(want, lse, given[:3])):
        assert torch.equal(x, y)
    room = torch.zeros(len(want), 4, 16, dtype=want.dtype)
    assert into(room[..., ::2], *given, window_size=(-1, 0)).shape == want.shape
    assert torch.equal(room[..., ::2], want) and not room[..., 1::2].any()


@pytest.mark.parametrize(
    "out, message",
    [
        (torch.empty(1, 4, 8, dtype=torch.float64), r"out: got shape \(1, 4, 8\)"),
        (torch.empty(18, 4, 9, dtype=torch.float64), r"expected \(18, 4, 8\)"),
        (torch.empty(18, 32, dtype=torch.float64), r"out: got shape \(18, 32\)"),
        (torch.empty(18, 4, 8), r"out.dtype: got torch.float32"),
        (torch.empty(18, 4, 8, dtype=torch.float64, device="meta"), r"out.device: got meta"),
    ],
    ids=["rows", "columns", "dimensions", "dtype", "device"],
)
def test_out_of_another_kind(serve, out, message):
    _, into = serve(of_2_13, out_of_2_13)
    with pytest.raises(ValueError, match=message):
        into(out, *packed(Hk=4))


# --------------------------------------------------------------------- refusals, in torch's names


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(query=1.0), "query: got float, expected a torch.Tensor"),
        (dict(query=torch.zeros(1, 18, 4, 8)), r"query: got shape \(1, 18, 4, 8\)"),
        (dict(key=torch.zeros(24, 4, 8)), "key.dtype: got torch.float32.*, as query has"),
        (dict(key=torch.zeros(24, 4, 9).double()), "key: got .* head dim 8, as query has"),
        (dict(value=torch.zeros(24, 2, 8).double()), "value: got .* 4 heads, as key has"),
        (dict(key=torch.zeros(3, 4, 4, 8)), r"key: got shape \(3, 4, 4, 8\), expected \(tokens"),
        (dict(value=torch.zeros(3, 4, 8).double()), "value: got"),
        (dict(cu_seq_q=torch.zeros(7)), "cu_seq_q.dtype: got torch.float32"),
        (dict(cu_seq_q=offsets([18, 0, 3, 0, 0, 0])), "cu_seq_q: got"),
        (dict(cu_seq_k=None), "cu_seq_k: got None"),
        (dict(cu_seq_k=offsets([1, 2])), "cu_seq_k: got"),
        (dict(max_q=3), "expected at most max_q = 3"),
        (dict(max_k=3), "expected at most max_k = 3"),
        (dict(max_q=3.5), "max_q: got 3.5"),
        (dict(scale="1"), "scale: got '1'"),
        (dict(window_size=4), "window_size: got 4"),
        (dict(window_size=(1, 2, 3)), r"window_size: got \(1, 2, 3\)"),
        (dict(seqused_k=offsets([1] * 5) + 9), "seqused_k: got 9 of sequence 0"),
        (dict(block_table=torch.zeros(6, 2).int()), "key: got shape"),
        (dict(enable_gqa=1), "enable_gqa: got 1"),
        (dict(num_splits="2"), "num_splits: got '2'"),
        (dict(return_aux=NewerAuxRequest(max_scores=True)), "return_aux.max_scores: got True"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refusals_have_torchs_names(varlen_attn, changes, message):
    given = dict(zip(inspect.signature(of_2_13).parameters, packed(Hk=4))) | changes
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        varlen_attn(**given)


def test_pages_need_lengths(varlen_attn):
    q, *_, cu_q, _, max_q, _ = packed()
    pool, table = torch.zeros(3, 4, 4, 8).double(), torch.zeros(6, 1).int()
    with pytest.raises(ValueError, match="seqused_k: got None beside block_table"):
        varlen_attn(q, pool, pool, cu_q, None, max_q, 4, block_table=table)


def test_heads_that_do_not_fit(varlen_attn):
    """With torch's words."""
    with pytest.raises(ValueError, match=r"got Hq=4 and Hkv=2\. Try setting enable_gqa=True"):
        varlen_attn(*packed())
    with pytest.raises(ValueError, match="multiple of kv heads for GQA but got Hq=4 and Hkv=3"):
        varlen_attn(*packed(Hk=3), enable_gqa=True)


@pytest.mark.parametrize("form", [of_2_10, of_2_11, of_2_13, newer])
def test_a_call_that_torchs_does_not_take_is_torchs(serve, form):
    """Then Python raises, with the names of its arguments."""
    function, given = serve(form), packed(Hk=4)
    for args, kwargs in (
        (given[:6], {}),
        ((*given, *[None] * 9), {}),
        (given, dict(no_such_argument=1)),
        (given, dict(max_q=4)),
    ):
        with pytest.raises(TypeError, match=form.__name__):
            function(*args, **kwargs)


# ----------------------------------------------------------------- torch's older and newer forms


def test_the_form_of_2_10(serve):
    function, given = serve(of_2_10), packed()
    for is_causal, window_size in ((False, (-1, -1)), (True, (-1, 0))):
        out, lse = function(*given, is_causal, LSE)
        exact = expected(*given[:5], window_size=window_size)
        near(out, exact[0], torch.float64)
        near(lse, exact[1], torch.float64)
        assert torch.equal(function(*given, is_causal=is_causal), out)


def test_the_form_of_2_11(serve):
    """It has no enable_gqa: its kernel takes fewer key heads as they are."""
    function, given = serve(of_2_11), packed()
    near(
        function(*given, window_size=(2, 0), scale=0.3),
        expected(*given[:5], window_size=(2, 0), scale=0.3)[0],
        torch.float64,
    )
    with pytest.raises(TypeError, match="seqused_k"):
        function(*given, seqused_k=given[4].diff())


def test_an_unknown_argument_has_its_default_or_raises(serve):
    function, given = serve(newer), packed()
    near(function(*given), expected(*given[:5])[0], torch.float64)
    cap = tuple(map(float, (0, 1)))  # equal, another object
    near(function(*given, sinks=None, cap=cap), expected(*given[:5])[0], torch.float64)
    for unknown in (dict(sinks=torch.zeros(4)), dict(on=0), dict(cap=(1, 1.0))):
        (name,) = unknown
        with pytest.raises(NotImplementedError, match=f"^{name}: got .* does not know"):
            function(*given, **unknown)


def test_an_unknown_argument_without_a_default_raises(serve):
    def strange(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, rotation):
        raise RanTorchs

    function, given = serve(strange), packed()
    with pytest.raises(NotImplementedError, match=r"^rotation: got"):
        function(*given, None)


@pytest.mark.parametrize("form", [of_2_10, of_2_13])
def test_the_signature_is_torchs(serve, form):
    """Libraries ask it which arguments this torch has."""
    assert inspect.signature(serve(form)) == inspect.signature(form)


# ----------------------------------------------------------------- what torch's function still runs


def test_other_devices_run_torchs_where_ours_has_no_kernel(varlen_attn, monkeypatch):
    given = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in packed(Hk=4)]
    with pytest.raises(RanTorchs):
        varlen_attn(*given)
    monkeypatch.setitem(fused_kernels.head_dims, "meta", {torch.float64: 8})
    with pytest.raises(RanTorchs):  # ours raises
        varlen_attn(*given, window_size=(1, 2, 3))
    monkeypatch.setitem(fused_kernels.head_dims, "meta", {torch.float64: 7})
    with pytest.raises(RanTorchs):
        varlen_attn(*given)


def test_autocast_is_not_heeded(varlen_attn):
    """As in torch's operator: the output has query's dtype."""
    given = packed(Hk=4, dtype=torch.float32)
    want = varlen_attn(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = varlen_attn(*given)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(found, want)
