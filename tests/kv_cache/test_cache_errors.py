"""What a KVCache refuses, and that an error changes nothing."""

import ast
import inspect
import itertools
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from fastattn import KVCache, Place
from fastattn.dispatch import dispatcher
from fastattn.kv_cache import block_pool, cache
from tests.kv_cache.test_cache import DV, HK, B, D, H, Model
from tests.support.backends import not_interpreted
from tests.support.cache_model import same, state
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), not_interpreted]


x = torch.zeros(B, HK, 2, D)
PACKED = torch.zeros(2, HK, D), torch.zeros(2, HK, DV)
FOUR = torch.zeros(2, 3, 1, 64)


def made(**given):
    return KVCache(1, 2, 8, **dict(capacity=4) | given)


def in_four_bits(**given):
    return KVCache(2, 3, 64, capacity=9, page_size=4, **dict(storage="int4") | given)


VALUES = {  # raise a ValueError
    r"v: got \(3, 2, 2, 8\), expected \(B, Hk, n, D\) with": lambda c: c.append(x, x),
    "k: got .* B = 3": lambda c: c.append(x[:2], x),
    "k: got torch.float64 on cpu, expected": lambda c: c.append(x.double(), x),
    "v: got 3 rows, expected 2": lambda c: c.append(x, torch.zeros(B, HK, 3, DV)),
    "k: got .*T, Hk, D": lambda c: c.append(x[0].mT, PACKED[1], torch.arange(B + 1)),
    "cu: got .*, expected offsets that begin at 0, never fall, and end at 2": (
        lambda c: c.append(*PACKED, torch.arange(B + 1))
    ),
    r"cu: got \(2,\), expected \(B \+ 1,\) = \(4,\)": (
        lambda c: c.append(*PACKED, torch.tensor([0, 2]))
    ),
    r"q: got .*, expected \(B, H, M, D\) with B = 3": lambda c: c.attention(x[:2]),
    r"counts: got 1 keys of item 0, .* \[0, 0\]": lambda c: c.evict([1, 0, 0]),
    "lengths: got -1": lambda c: c.truncate(-1),
    r"items: got \[3\], expected numbers in \[0, 3\)": lambda c: c.fork([3]),
    r"counts: got shape \(2,\), expected one number, or": lambda c: c.evict([1, 2]),
    "place: got .*, expected no row": lambda c: c.attention(x, place=Place(row=1)),
    "q: got 99 rows of item 0 on": lambda c: c.attention(torch.zeros(B, H, 99, D)),
    r"cu_q: got shape \(2,\), expected \(B \+ 1,\) = \(": (
        lambda c: c.attention(x[0].transpose(0, 1), cu_q=torch.tensor([0, 1]))
    ),
    "value_dim: got -1": lambda c: made(value_dim=-1),
    "latent: got 4 beside value_dim = 3, expected one": lambda c: made(value_dim=3, latent=4),
    "latent: got 9, expected at most head_dim = 8": lambda c: made(latent=9),
    "dtype: got torch.int8": lambda c: made(dtype=torch.int8),
    "capacity: got 0, expected 1 or more": lambda c: made(capacity=0),
    "page_size: got 0": lambda c: made(page_size=0),
    'storage: got torch.int16, expected None for torch.float32, torch.int8 or .*, or "int4"': (
        lambda c: made(storage=torch.int16)
    ),
    "storage: got 'int5', expected None for torch.float32, .*int4": lambda c: made(storage="int5"),
    "storage: got torch.uint8, expected None": lambda c: made(storage=torch.uint8),
    'head_dim: got 8, expected a multiple of 32 with storage="int4"': (
        lambda c: made(storage="int4")
    ),
    "value_dim: got 8, expected a multiple of 32": lambda c: in_four_bits(value_dim=8),
    "latent: got 40, expected a multiple of 32": lambda c: in_four_bits(latent=40),
    r"k: got \(2, 3, 1, 40\), expected .* D = 64": (
        lambda c: in_four_bits().append(FOUR[..., :40], FOUR)
    ),
    r"v: got \(2, 3, 1, 32\), expected .* D = 64": (
        lambda c: in_four_bits().append(FOUR, FOUR[..., :32])
    ),
    r"k: got \(6, 1, 64\), expected \(T, Hk, D\) with Hk = 3": (
        lambda c: in_four_bits().append(*(FOUR.flatten(0, 1),) * 2, torch.arange(3))
    ),
    "k: got torch.uint8 on cpu, expected torch.float32": (
        lambda c: in_four_bits().append(FOUR.byte(), FOUR)
    ),
}
TYPES = {  # raise a TypeError
    "k: got int": lambda c: c.append(3, x),
    "counts: got torch.float32, expected whole": lambda c: c.evict([0.5, 0, 0]),
    "items: got torch.bool": lambda c: c.free(torch.tensor([True, False, True])),
    "items: got torch.float32": lambda c: c.fork([0.7]),
    "cu: got torch.float32": lambda c: c.append(*PACKED, torch.tensor([0.0, 1.5, 2, 2])),
    "key_lengths: got an arg": lambda c: c.attention(x, key_lengths=c.lengths),
    "max_q: got 7 without cu_q, expected None": lambda c: c.attention(x, max_q=7),
    "page_size: got 2.5": lambda c: made(page_size=2.5),
    "v: got an argument, expected None: latent gives": (
        lambda c: KVCache(B, HK, D, capacity=4, latent=2).append(x, x)
    ),
    "v: got NoneType, expected a torch.Tensor": lambda c: c.append(x),
}
WRONG = [(call, ValueError, message) for message, call in VALUES.items()]
WRONG += [(call, TypeError, message) for message, call in TYPES.items()]
FULL = [
    (lambda c: c.append(*zeros(9)), RuntimeError, "is full: got 14 keys of item 0"),
    (lambda c: c.append(*zeros(3)), RuntimeError, "is full: got . more pages of . keys to find"),
    (lambda c: c.evict(1), RuntimeError, "is full: got . more pages of . keys to find"),
]
REFUSED = [  # raised by torch, or by the checks of attention
    (lambda c: c.append(zeros(1)[0], zeros(1)[1].to_sparse()), RuntimeError, ""),
    (lambda c: c.append(torch.zeros(B, HK, 1, D, device="meta"), 1), ValueError, "k: got"),
    (lambda c: c.append(*zeros(1), cu=3), ValueError, "k: got"),
    (lambda c: c.append(*(x[:, :, 0] for x in zeros(1)), cu=3), ValueError, "cu: got int"),
    (lambda c: c.attention(x, mask=torch.zeros(2, 5)), ValueError, "mask"),
    (lambda c: c.attention(x, sinks=torch.zeros(H + 1)), ValueError, "sinks"),
    (lambda c: c.attention(x.double()), ValueError, "dtype"),
    (lambda c: c.attention(x[..., :3]), ValueError, "D"),
    (lambda c: c.attention(x, window=3.5), Exception, "window"),
    (lambda c: c.attention(x, what=1), TypeError, "what"),
]


def zeros(n):
    return torch.zeros(B, HK, n, D), torch.zeros(B, HK, n, DV)


def crowded(page_size=4):
    """A nearly full cache, and a fork that shares its last pages."""
    model = Model(page_size, capacity=8)
    model.append([5, 6, 5])
    return model.cache, model.cache.fork()


@pytest.mark.parametrize("call, error, message", WRONG, ids=[message[:24] for *_, message in WRONG])
def test_inputs_of_wrong_sizes_raise(call, error, message):
    with pytest.raises(error, match=message):
        call(Model(4).cache)


@pytest.mark.parametrize("window", [None, (0, 0), (2, None), (None, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("causal", (False, True, "bottom_right"))
@pytest.mark.parametrize("packed", (False, True), ids=["dense", "packed"])
def test_rows_without_a_key_raise(packed, causal, window):
    """Exactly those with an LSE of -inf, for any number of rows and keys."""
    seen = set()
    for keys, rows in itertools.product([(0, 0, 0), (1, 4, 0), (4, 2, 3)], (0, 1, 2, 3, 5, 9)):
        model = Model(4)
        model.append(keys)
        given = dict(causal=causal, window=window)
        q = torch.zeros(B, H, rows, D)
        if packed:  # the last item has no row
            q = q[:2].transpose(1, 2).flatten(0, 1)
            given["cu_q"] = torch.tensor([0, rows, 2 * rows, 2 * rows])
        for at_end in (False, True) if causal is not True else (False,):
            given["place"] = Place(bottom_right=at_end)
            _, lse = model.cache.attention(q, return_lse=True, allow_empty_rows=True, **given)
            if is_empty := bool(lse.isinf().any()):
                with pytest.raises(ValueError, match=f"q: got {rows} rows of item . on"):
                    model.cache.attention(q, **given)
            else:
                model.cache.attention(q, **given)
            seen.add(is_empty)
    assert seen == {False, True}


def test_offsets_on_a_gpu_are_not_read(monkeypatch):
    """Only that no item has a key is known without them."""
    monkeypatch.setattr(cache, "checks_values", lambda device: False)
    model, given = Model(4), dict(cu_q=torch.tensor([0, 1, 2, 2]))
    q = torch.zeros(2, H, D)
    with pytest.raises(ValueError, match="q: got 2 rows of item 0"):
        model.cache.attention(q, **given)
    model.append([0, 3, 0])
    assert (model.cache.attention(q, **given)[0] == 0).all()


def test_rows_without_a_key_raise_before_any_is_computed():
    model, lengths = Model(4), []
    model.append([4, 4, 0])

    def observer(run, op, t, o):
        lengths.append(t.key_lengths.tolist())
        return run(op, t, o)

    with dispatcher.observed(observer), pytest.raises(ValueError, match="q: got 3 rows of item 2"):
        model.cache.attention(torch.zeros(B, H, 3, D))
    assert lengths == [[0, 0, 0]]


def test_rows_without_a_key_raise_after_each_change():
    own = crowded()[0].fork()
    q = torch.zeros(B, H, 6, D)
    for change, least in (
        (lambda: None, 5),
        (lambda: own.append(*zeros(1)), 6),
        (lambda: own.append(*zeros(1)), 7),
        (lambda: own.truncate(5), 5),
        (lambda: own.append(*zeros(1)), 6),
        (lambda: own.evict([0, 0, 1]), 5),
        (lambda: own.free([1]), 0),
    ):
        own.grow = True
        change()
        assert int(own.lengths.min()) == least
        if least < 6:
            with pytest.raises(ValueError, match=r"q: got 6 rows of item . on"):
                own.attention(q)
        else:
            own.attention(q)


def test_other_wrong_arguments_are_named_before_rows_without_a_key():
    offsets = torch.tensor([0, 2, 4, 6])
    dense = {
        "q": dict(q=3),
        "q ": dict(q=x[0]),
        "q.dtype": dict(q=x.long()),
        "k": dict(q=torch.zeros(B, H, 2, D + 1)),
        "causal": dict(causal="no"),
        "window": dict(window=3.5),
        "window left": dict(window=("a", 0)),
        "window right": dict(window=(0, -1)),
        "place": dict(place=3),
        "mask": dict(mask=torch.zeros(3, 5)),
        "backend": dict(backend="no"),
    }
    rows = torch.zeros(6, H, D)
    packed = {
        "q": dict(q=3, cu_q=offsets),
        "cu_q": dict(cu_q=3),
        "cu_q ": dict(cu_q=offsets[:2]),
        "cu_q  ": dict(cu_q=torch.tensor(3)),
        "cu_q.dtype": dict(cu_q=offsets.double()),
        "cu_q   ": dict(cu_q=torch.tensor([0, 4, 2, 6])),
        "max_q": dict(cu_q=offsets, max_q=2.5),
    }
    for wrong, q in ((dense, torch.zeros(B, H, 2, D)), (packed, rows)):
        for name, given in wrong.items():
            with pytest.raises((ValueError, TypeError), match=rf"^{name.strip()}: got") as caught:
                Model(4).cache.attention(**dict(q=q) | given)
            assert "let each row see a key" not in str(caught.value)


@pytest.mark.parametrize("storage", (None, torch.int8), ids=str)
@pytest.mark.parametrize("latent", (False, True), ids=["keys and values", "latent"])
def test_a_gradient_is_not_dropped(latent, storage):
    """A derivative by what is appended raises, unless gradients are off."""
    own = KVCache(B, HK, D, capacity=8, storage=storage, **(dict(latent=4) if latent else {}))
    wrong = [x.requires_grad_() for x in torch.randn(2, B, HK, 2, D)]
    wrong.append((wrong[0] * 2).transpose(-1, -2).contiguous().transpose(-1, -2))
    plain = torch.randn(B, HK, 2, D)
    calls = [lambda x: own.append(x) if latent else own.append(x, plain)]
    calls += [] if latent else [lambda x: own.append(plain, x)]
    for call, x in itertools.product(calls, wrong):
        with pytest.raises(ValueError, match=r"(k|v): got a tensor that requires grad.*no_grad"):
            call(x)
        with forward_ad.dual_level():
            with pytest.raises(ValueError, match=r"(k|v): got a tensor with a tangent"):
                call(forward_ad.make_dual(plain, plain))
            call(forward_ad.make_dual(plain, plain).detach())
        assert own.lengths.tolist() == [2] * B
        own.free()
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            calls[0](wrong[0])
    assert not own.k_pages.requires_grad and own.lengths.tolist() == [4] * B


@pytest.mark.parametrize("page_size", (4, None))
def test_an_error_changes_nothing(page_size):
    """The errors include every `raise` of the cache, which the last line checks."""
    raised = set()
    for call, error, _ in WRONG + FULL + REFUSED:
        both = crowded(page_size)
        before = [state(x) for x in both]
        for x in both:
            with pytest.raises((error, RuntimeError)) as caught:  # or it is full
                call(x)
            same(before, [state(x) for x in both])
            raised |= places(caught.value)
    assert page_size is None or raised >= everywhere_raised(cache, block_pool)


def test_an_error_in_a_cache_that_grows_changes_nothing():
    for page_size in (4, None):
        model = Model(page_size, capacity=8, grow=True)
        model.append([5, 6, 5])
        for n in (1, 3, 20):  # within the last page, a new one, more capacity
            k, v = zeros(n)
            before = [state(model.cache)]
            with pytest.raises(RuntimeError):
                model.cache.append(k, v.to_sparse())
            same(before, [state(model.cache)])


class Failing(TorchFunctionMode):
    """After `calls` calls of torch functions, the next one raises."""

    def __init__(self, calls):
        self.left = calls

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.left -= "grad_enabled" not in function.__name__  # wrappers of a method do not count
        if self.left < 0:
            raise MemoryError("no more")
        return function(*args, **kwargs or {})


CHANGES = {
    "append": lambda c: c.append(*zeros(1)),
    "new_pages": lambda c: c.append(*zeros(3)),
    "grow": lambda c: c.append(*zeros(20)),
    "packed": lambda c: c.append(zeros(1)[0][:, :, 0], zeros(1)[1][:, :, 0], torch.arange(B + 1)),
    "fork": lambda c: c.fork([0, 2]),
    "evict": lambda c: c.evict([4, 0, 4] if c.page_size == 4 else c.lengths),
    "truncate": lambda c: c.truncate([3, 6, 0]),
    "free": lambda c: c.free([1]),
}


@parametrize("name", CHANGES, fast=3)
@pytest.mark.parametrize("page_size", (4, None))
def test_a_change_is_atomic(page_size, name):
    """Wherever torch runs out of memory. Evictions that move rows are excluded: their new places
    may hold other rows that move."""
    for calls in range(1000):
        cache, fork = crowded(page_size)
        cache.grow = True
        before = [state(cache), state(fork)]
        try:
            with Failing(calls):
                made = CHANGES[name](cache)
            break
        except MemoryError:
            pass
        same(before, [state(cache), state(fork)])
    assert 3 < calls < 999 and isinstance(made, KVCache) == (name == "fork")


def places(error):
    """The (file, line) pairs in the cache's files of an error's traceback."""
    found, at = set(), error.__traceback__
    while at:
        found.add((at.tb_frame.f_code.co_filename, at.tb_lineno))
        at = at.tb_next
    return found


def everywhere_raised(*modules):
    files = [inspect.getsourcefile(x) for x in modules]
    trees = [(file, ast.parse(Path(file).read_text())) for file in files]
    return {(f, x.lineno) for f, tree in trees for x in ast.walk(tree) if isinstance(x, ast.Raise)}
