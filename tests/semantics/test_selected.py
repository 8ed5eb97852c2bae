"""attention_selected has the same bits in every order of the indices and with any number of
threads; it refuses what is wrong. Its values are in tests/features."""

import pytest
import torch
from torch.func import jvp

import fastattn
from fastattn.backends.shared import gathered_pages
from fastattn.call.spec import Feature
from fastattn.selection import key_lists, seen
from tests.support.backends import declares, every_backend, not_interpreted

pytestmark = pytest.mark.usefixtures("one_thread")
B, M, N = 2, 5, 37
GROUPS = {"one list": lambda H, Hk: 1, "by key head": lambda H, Hk: Hk, "by head": lambda H, Hk: H}


def chosen(G, block, S, seed=0, dtype=torch.int64):
    """Unsorted, with repetitions and -1; one row with nothing, one with a single block."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, -(-N // block), (B, G, M, S), generator=draw)
    x[0, 0, 1], x[0, -1, 2] = -1, -(-N // block) - 1
    return x.to(dtype)


def tensors(H, Hk, D, Dv, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = dict(q=(B, H, M, D), k=(B, Hk, N, D), v=(B, Hk, N, Dv))
    return {x: torch.randn(*size, generator=draw).to(dtype) for x, size in shapes.items()}


def results(call, leaves, **given):
    """Out, LSE and the gradients of all leaves."""
    leaves = {x: y.detach().requires_grad_() for x, y in leaves.items()}
    out, lse = call(**leaves, **given)
    loss = (out.double() * torch.linspace(-1, 1, out.shape[3])).sum()
    loss = loss + lse.double().masked_fill(lse == -torch.inf, 0).sin().sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return out.detach(), lse.detach(), *grads


def close(found, expected, bound):
    for x, y in zip(found, expected, strict=True):
        shown = y.isfinite()
        assert x.shape == y.shape and torch.equal(x.isfinite(), shown)
        if shown.any():
            gap = (x.double() - y.double())[shown].abs().max()
            assert float(gap) <= bound * (1 + float(y[shown].abs().max()))


def none_last(x):
    x = x.masked_fill(x < 0, N).sort(-1).values
    return x.masked_fill(x == N, -1)


ORDERS = {
    "sorted": lambda x: x.sort(-1).values,
    "falling": lambda x: x.sort(-1, descending=True).values,
    "each twice": lambda x: torch.cat([x, x], -1),
    "sorted, each twice": lambda x: torch.cat([x, x], -1).sort(-1).values,
    "sorted, each twice, none last": lambda x: none_last(torch.cat([x, x], -1)),
    "with none": lambda x: torch.cat([torch.full_like(x, -1), x], -1),
    "int32, strided": lambda x: x.to(torch.int32).mT.contiguous().mT,
}


@every_backend
@pytest.mark.parametrize("how", ORDERS)
def test_the_order_of_indices_changes_no_bit(name, how):
    declares(name, torch.float32, Feature.PAGED)
    leaves = tensors(4, 2, 16, 16, torch.float32)
    indices = chosen(2, 4, 6)

    def run(given):
        def call(**x):
            x |= dict(block=4, return_lse=True, backend=name)
            return fastattn.attention_selected(indices=given, **x)

        return results(call, leaves)

    for x, y in zip(run(indices), run(ORDERS[how](indices)), strict=True):
        assert torch.equal(x, y)


@every_backend
def test_other_items_change_no_bit(name):
    declares(name, torch.float32, Feature.PAGED)
    leaves, indices = tensors(4, 2, 16, 16, torch.float32), chosen(2, 4, 6)

    def run(items):
        def call(**x):
            given = dict(indices=indices[items], block=4, return_lse=True, backend=name)
            return fastattn.attention_selected(**x, **given)

        return results(call, {x: y[items] for x, y in leaves.items()})

    for x, y in zip(run(slice(2)), run(slice(1)), strict=True):
        assert torch.equal(x[:1], y)


@every_backend
def test_a_local_window_in_the_same_softmax(name):
    """Parts of one softmax are merged: NSA's and DSA's windows."""
    declares(name, torch.float32, Feature.PAGED)
    x = tensors(4, 2, 16, 16, torch.float32)
    far = torch.arange(0, 12).expand(B, 1, M, -1)  # before every row's window
    at = dict(place=fastattn.Place(row=N - M, rows=N), causal=True, window=(3, 0))
    parts = [
        fastattn.attention_selected(**x, indices=far, return_lse=True, backend=name),
        fastattn.attention(**x, **at, return_lse=True, backend=name),
    ]
    i, j = torch.arange(N - M, N)[:, None], torch.arange(N)
    mask = (j < 12) | ((j <= i) & (j >= i - 3))
    close(fastattn.merge(parts), fastattn.attention(**x, mask=mask, return_lse=True), 1e-5)


@pytest.mark.slow
@not_interpreted
def test_compiled():
    x = {name: y.requires_grad_() for name, y in tensors(4, 2, 16, 16, torch.float32).items()}

    def call(q, k, v, indices):
        return fastattn.attention_selected(q, k, v, indices, block=4, causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for S in (3, 6):
        indices = chosen(1, 4, S)
        grads = []
        for run in (call, compiled):
            out = run(*x.values(), indices)
            grads.append([out, *torch.autograd.grad(out.sin().sum(), list(x.values()))])
        close([y.detach() for y in grads[1]], [y.detach() for y in grads[0]], 1e-6)


WRONG = {
    r"indices: got 10, expected values in \[-1, 10\)": dict(indices=torch.full((B, 1, M, 2), 10)),
    r"indices: got -2, expected values in \[-1, 10\)": dict(indices=torch.full((B, 1, M, 2), -2)),
    r"indices: got shape \(2, 3, 5, 1\), expected .* G one of 1, Hk = 2 and H = 4": dict(
        indices=torch.zeros(B, 3, M, 1, dtype=torch.int64)
    ),
    r"indices: got shape \(5, 1\), expected 4 dim": dict(indices=torch.zeros(M, 1).long()),
    r"indices.dtype: got torch.float32": dict(indices=torch.zeros(B, 1, M, 1)),
    r"block: got 3, expected one of \(1, 4": dict(block=3),
    r"causal: got 'left'": dict(causal="left"),
    r"key_lengths: got 38, expected values in \[0, N\]": dict(key_lengths=torch.tensor([38, 0])),
    r"key_lengths: got -1, expected": dict(key_lengths=torch.tensor([-1, 0])),
    r"key_lengths: got shape \(1,\)": dict(key_lengths=torch.tensor([3])),
    r"sinks: got shape \(2,\), expected \(H,\)": dict(sinks=torch.zeros(2)),
    r"k: got shape .* q's B and D": dict(k=torch.zeros(B, 2, N, 8)),
    r"v: got shape .* k's B, Hk and N": dict(v=torch.zeros(B, 2, N - 1, 8)),
    r"dropout_p: got 2": dict(dropout_p=2.0),
}


@not_interpreted
@pytest.mark.parametrize("message", WRONG)
def test_hostile_arguments_raise(message):
    given = tensors(4, 2, 16, 16, torch.float32) | dict(indices=chosen(1, 4, 2), block=4)
    with pytest.raises(ValueError, match=message):
        fastattn.attention_selected(**given | WRONG[message])
    for name in ("q", "k", "v", "indices", "key_lengths", "sinks"):
        with pytest.raises(TypeError, match=f"{name}: got int"):
            fastattn.attention_selected(**given | {name: 3})


@not_interpreted
def test_values_that_are_not_checked_are_clamped(monkeypatch):
    """As on a GPU: a block out of range is none, a length is cut to the keys."""
    for module in (key_lists, seen):
        monkeypatch.setattr(module, "checks_values", lambda device: False)
    x = tensors(4, 2, 16, 16, torch.float32)
    wild = torch.tensor([3, 10**9, -(10**9), 10, -2, 9]).to(torch.int32).expand(B, 1, M, 6)
    tame = torch.tensor([3, 9]).expand(B, 1, M, 2)
    for lengths, cut in ((None, None), (torch.tensor([10**9, -5]), torch.tensor([N, 0]))):
        found = fastattn.attention_selected(**x, indices=wild, block=4, key_lengths=lengths)
        right = fastattn.attention_selected(**x, indices=tame, block=4, key_lengths=cut)
        assert torch.equal(found, right)


@not_interpreted
@pytest.mark.parametrize("zero", ("B", "H", "M", "N", "S", "Dv"))
def test_sizes_of_zero(zero):
    size = dict(B=2, H=4, Hk=2, M=3, N=8, D=4, Dv=5, S=2) | {zero: 0}
    if zero == "H":
        size["Hk"] = 0
    b, h, hk, m, n, d, dv, s = size.values()
    q, k, v = torch.zeros(b, h, m, d), torch.zeros(b, hk, n, d), torch.zeros(b, hk, n, dv)
    leaves = dict(q=q, k=k, v=v)
    indices = torch.full((b, 1, m, s), -1 if zero == "N" else 0)

    def call(**x):
        return fastattn.attention_selected(indices=indices, block=4, return_lse=True, **x)

    out, lse, *grads = results(call, leaves)
    assert out.shape == (b, h, m, dv) and lse.shape == (b, h, m)
    assert [x.shape for x in grads] == [x.shape for x in leaves.values()]


@not_interpreted
def test_other_derivatives_say_that_there_are_none():
    x = tensors(4, 2, 16, 16, torch.float32)
    indices = chosen(1, 1, 4)

    def call(q):
        return fastattn.attention_selected(q, x["k"], x["v"], indices)

    message = "block_table.* first derivative in reverse mode and no other"
    with pytest.raises(NotImplementedError, match=message):
        jvp(call, (x["q"],), (x["q"],))
    q = x["q"].requires_grad_()
    (grad,) = torch.autograd.grad(call(q).sin().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=message):
        grad.sum().backward()


@every_backend
@pytest.mark.parametrize("groups", GROUPS)
def test_rows_a_few_at_a_time(name, groups, monkeypatch):
    """Where gathered pages would take too much memory."""
    declares(name, torch.float32, Feature.PAGED_GRAD)
    indices = chosen(GROUPS[groups](4, 2), 4, 6)
    leaves = tensors(4, 2, 16, 16, torch.float32) | dict(sinks=torch.tensor([0.5, -1.0, 0.0, 2.0]))

    def call(**x):
        rest = dict(block=4, return_lse=True, backend=name)
        return fastattn.attention_selected(indices=indices, **x, **rest)

    whole = results(call, leaves)
    monkeypatch.setattr(gathered_pages, "ROOM", 1 << 14)
    close(results(call, leaves), whole, 1e-5)
