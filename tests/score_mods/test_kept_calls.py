"""What is kept of functions between calls: nothing that may change unseen."""

import builtins
import functools
import math
import operator
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import fastattn
from fastattn.score_mods import kept_calls, tracing
from tests.support.backends import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is kept of calls on a GPU")
B, H, M, N, D = 2, 3, 5, 7, 8
Q, K, V = (torch.randn(B, H, n, D, generator=torch.Generator().manual_seed(n)) for n in (M, N, 9))
V = V[:, :, :N]
WIDTH, TABLE = 2, torch.arange(8.0)


def helper(i, j):
    return (i - j).abs() * WIDTH


@pytest.fixture
def traced(monkeypatch):
    """A list to which each trace adds the function."""
    kept_calls._kept.clear()
    found, before = [], tracing._run

    def run(fn, *given):
        found.append(fn)
        return before(fn, *given)

    monkeypatch.setattr(tracing, "_run", run)
    yield found
    kept_calls._kept.clear()


def score(mod):
    """The mod's result for each pair."""
    grid = [torch.arange(n).view(-1, *(1,) * (3 - x)) for x, n in enumerate((B, H, M, N))]
    s = torch.einsum("bhmd,bhnd->bhmn", Q, K) / D**0.5
    return mod(s, *grid)


def right(found, mod):
    s = score(mod)
    torch.testing.assert_close(found, s.float().softmax(-1) @ V, rtol=1e-4, atol=1e-4)


def attend(mod):
    right(fastattn.attention(Q, K, V, score_mod=mod), mod)
    right(fastattn.flex_attention(Q, K, V, score_mod=mod), mod)


# ---------------------------------------------------------------------------------- what is kept


def made(width, table=TABLE, extra=None):
    def mod(s, b, h, i, j, most=4.0):
        s = s * width * math.sqrt(most) + table[j] - helper(i, j)
        return s if extra is None else s * extra

    return mod


def test_a_function_is_traced_once(traced):
    """Also where it is made anew for each call; flex_attention and attention share what is kept."""
    for _ in range(3):
        attend(made(0.5))
    assert len(traced) == 1
    fastattn.attention(Q[:, :, :2], K, V, score_mod=made(0.5))
    assert len(traced) == 2


def test_elements_of_captured_tensors_are_read_anew(traced):
    for number in (1.0, -2.0, math.nan, 0.0):
        table = torch.full((8,), number)
        table[0] = 1.0
        mod = made(1.0, table)
        found = fastattn.attention(Q, K, V, score_mod=mod)
        expected = score(mod).softmax(-1) @ V
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    table = torch.zeros(8)
    for n in range(3):  # in place
        table[n] = 5.0
        attend(made(1.0, table))
    assert len(traced) == 1


def test_masks_and_both_together(traced):
    places = torch.tensor([0, 0, 1, 1, 2, 2, 2])

    def shown(b, h, i, j):
        return (places[i] == places[j]) | (i > j)

    def hidden(s, b, h, i, j):
        return torch.where(shown(b, h, i, j), s + TABLE[i], -math.inf)

    for n in range(3):
        out = fastattn.attention(Q, K, V, mask_mod=shown)
        right(out, lambda s, *at: torch.where(shown(*at), s, -math.inf))
        out = fastattn.attention(Q, K, V, mask_mod=shown, score_mod=made(2.0))
        right(out, lambda s, *at: torch.where(shown(*at), made(2.0)(s, *at), -math.inf))
        right(fastattn.attention(Q, K, V, score_mod=hidden), hidden)
        places[n + 1] = 2  # within the bounds: nothing is traced anew
    assert len(traced) == 4


def test_bounds_of_whole_numbers_that_change(traced):
    """They decide which indices are tested: a wrong one raises, also after right ones."""
    places = torch.zeros(8, dtype=torch.int64)

    def mod(s, b, h, i, j):
        return s + TABLE[places[j]]

    for most in (0, 7, 3):
        places[2] = most
        attend(mod)
    for wrong in (8, -9):
        places[2] = wrong
        with pytest.raises(IndexError):
            fastattn.attention(Q, K, V, score_mod=mod)
    places[2] = -1
    attend(mod)


# -------------------------------------------------------------------------- what a key must contain


def test_numbers_of_closures_globals_and_defaults(traced, monkeypatch):
    for width in (1, 1.0, True, 2, 0.0, -0.0, math.inf):
        fastattn.attention(Q, K, V, score_mod=made(width))
    assert len(traced) == 7
    for width in (3, 4):
        monkeypatch.setitem(globals(), "WIDTH", width)
        attend(made(1.0))
    mod = made(1.0)
    for most in (5.0, 6.0):
        mod.__defaults__ = (most,)
        attend(mod)
    mod.__defaults__, mod.__kwdefaults__ = (3.0,), None
    attend(mod)

    def with_keyword(s, b, h, i, j, *, factor=2.0):
        return s * factor

    attend(with_keyword)
    with_keyword.__kwdefaults__ = {"factor": 3.0}
    attend(with_keyword)


def test_functions_that_are_called(traced, monkeypatch):
    attend(made(1.0))
    monkeypatch.setitem(globals(), "helper", lambda i, j: i + j)
    attend(made(1.0))
    attend(made(1.0, extra=3))

    def chosen(inner):
        return lambda s, b, h, i, j: inner(s) + 1

    for inner in (lambda s: 2 * s, lambda s: 3 * s, torch.tanh, torch.sigmoid, operator.neg, abs):
        attend(chosen(inner))

    def nested(s, b, h, i, j):
        return (lambda x: x * WIDTH)(s)

    attend(nested)
    monkeypatch.setitem(globals(), "WIDTH", 5)
    attend(nested)


def test_shapes_dtypes_and_which_tensor_is_which(traced):
    def of(x, y):
        return lambda s, b, h, i, j: s + x[j] - y[i] * x.shape[0] + (x.dtype == torch.float32)

    a, b = torch.randn(7), torch.randn(7)
    for x, y in ((a, b), (b, a), (a, a), (b, b), (torch.randn(9), a), (a, torch.randn(9).double())):
        attend(of(x, y))
    attend(of(torch.randint(0, 5, (7,)), a))
    assert len(traced) == 5


def test_views_of_one_tensor(traced):
    """The call has them once where they lie on each other, and twice where they do not."""
    table = torch.randn(9)

    def of(x, y):
        return lambda s, b, h, i, j: s + x[j] - 2 * y[j]

    for x, y in ((table[:7], table[:7]), (table[:7], table[2:]), (table[:7], table[:7])):
        attend(of(x, y))
        attend(of(x.clone(), y))


def test_calls_of_other_kinds(traced):
    mod = made(1.0)
    for given in ({}, dict(softcap=2.0), dict(causal=True), dict(place=fastattn.Place(row=2))):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            q, k, v = (x.to(dtype) for x in (Q, K, V))
            found = fastattn.attention(q, k, v, score_mod=mod, **given)
            kept_calls._kept.clear()
            assert torch.equal(found, fastattn.attention(q, k, v, score_mod=mod, **given))


def test_what_inference_mode_makes_is_not_used_in_training(traced):
    def slopes(s, b, h, i, j):  # recognised: a tensor is kept
        return s - (h + 1) * 0.5 * (i - j).abs()

    q = Q.clone().requires_grad_()
    with torch.inference_mode():
        fastattn.attention(q, K, V, score_mod=slopes)
    fastattn.attention(q, K, V, score_mod=slopes).square().sum().backward()
    assert q.grad.any() and len(traced) == 2


NUMBERS, NAMED = [1.0, 2.0], {"one": 1.0, "two": 2.0}
IN_CONTAINERS = {
    "a list": (lambda s, *_: s * NUMBERS[0], lambda x: NUMBERS.__setitem__(0, x)),
    "a dict": (lambda s, *_: s * NAMED["one"], lambda x: NAMED.update(one=x)),
    "the order of a dict": (
        lambda s, *_: s * sum(n * x for n, x in enumerate(NAMED.values())) + NAMED.get("one"),
        lambda x: NAMED.update(one=NAMED.pop("one"), two=NAMED.pop("two") if x > 3 else 2.0),
    ),
    "the length of a list": (
        lambda s, *_: s * len(NUMBERS),
        lambda x: NUMBERS.__setitem__(slice(1, None), [2.0] * int(x)),
    ),
}


@pytest.mark.parametrize("name", IN_CONTAINERS)
def test_numbers_in_lists_and_dicts(traced, name):
    mod, change = IN_CONTAINERS[name]
    for number in (2.0, 5.0, 2.0):
        change(number)
        attend(mod)
    assert len(traced) == 2
    NUMBERS[:] = [1.0, 2.0]
    NAMED.clear()
    NAMED.update(one=1.0, two=2.0)


def test_tensors_in_lists_and_dicts(traced):
    """As code for FlashAttention-4 has them: a list that is an argument."""
    one, two = torch.randn(7), torch.randn(5)

    def with_tensors(s, b, h, i, j, tensors):
        return s + tensors[0][j] * tensors[1][i]

    def of_list(tensors):
        return lambda *at: with_tensors(*at, tensors)

    def of_dict(named):
        return lambda s, b, h, i, j: s + named["key"][j] * named["row"][i]

    for _ in range(3):
        attend(of_list([one, two]))
        attend(of_dict({"key": one, "row": two}))
        one.add_(1)  # elements are read anew
    assert len(traced) == 2
    longer = torch.randn(9)
    attend(of_list([longer, two]))
    assert len(traced) == 3


def test_which_list_is_which(traced):
    def mod(x, y):
        return lambda s, *_: s * 2 if x is y else s * 3

    x, y = [1.0], [1.0]
    for pair in ((x, x), (x, y), (x, x), (y, x)):
        attend(mod(*pair))
    assert len(traced) == 2


# ------------------------------------------------------------------- of what nothing may be kept

STATE = SimpleNamespace(width=1.0)


class Mods:
    def __init__(self):
        self.width = 1.0

    def method(self, s, b, h, i, j):
        return s * self.width

    def __call__(self, s, b, h, i, j):
        return s * self.width


MODS = Mods()


def marked(s, b, h, i, j):
    return s * marked.width


marked.width = 1.0


def change_marked(x):
    marked.width = x


def in_place(x):
    return lambda number: x.fill_(number)


READ = torch.ones(())
CHANGING = {  # a function, and what changes it
    "an attribute of an object": (
        lambda s, *_: s * STATE.width,
        functools.partial(setattr, STATE, "width"),
    ),
    "a method": (MODS.method, functools.partial(setattr, MODS, "width")),
    "an object that is called": (MODS, functools.partial(setattr, MODS, "width")),
    "a partial function": (
        functools.partial(MODS.method),
        functools.partial(setattr, MODS, "width"),
    ),
    "an attribute of itself": (marked, change_marked),
    "globals()": (
        lambda s, *_: s * globals()["WIDTH"],
        lambda x: globals().__setitem__("WIDTH", x),
    ),
    "an element that is read": (lambda s, *_: s * READ.item(), in_place(READ)),
    "a branch on an element": (lambda s, *_: s * 2 if READ > 3 else s, in_place(READ)),
    "an element as a number": (lambda s, *_: s * float(READ), in_place(READ)),
    "a list of elements": (lambda s, *_: s * READ.reshape(1).tolist()[0], in_place(READ)),
    "a computed tensor": (lambda s, *_: s * (READ + 1), in_place(READ)),
    "a stack": (lambda s, *_: s * torch.stack([READ, READ])[0], in_place(READ)),
}


@pytest.mark.parametrize("name", CHANGING)
def test_state_that_changes_is_seen(traced, monkeypatch, name):
    mod, change = CHANGING[name]
    monkeypatch.setitem(globals(), "WIDTH", 1.0)
    for number in (2.0, 5.0, 2.0):
        change(number)
        attend(mod)
    change(1.0)
    assert not kept_calls._kept


@pytest.mark.parametrize("first", [[7, 7], [3, 5]], ids=["whole", "short"])
def test_lengths_of_all_keys_hide_others_later(traced, first):
    lengths, n = torch.tensor(first), torch.tensor(7)

    def of_items(b, h, i, j):
        return j < lengths[b]

    def of_all(b, h, i, j):
        return (j < n) & (i > 8 - lengths[b])

    for now in (first, [7, 2], [4, 7], [7, 7], [1, 1]):
        lengths.copy_(torch.tensor(now))
        n.fill_(now[0])
        for mod in (of_items, of_all):
            mask = mod(
                *(torch.arange(x).view(-1, *(1,) * (3 - y)) for y, x in enumerate((B, H, M, N)))
            )
            found = fastattn.attention(Q, K, V, mask_mod=mod)
            torch.testing.assert_close(found, fastattn.attention(Q, K, V, mask=mask))
            found = fastattn.flex_attention(Q, K, V, mask_mod=mod)
            torch.testing.assert_close(found, fastattn.attention(Q, K, V, mask=mask))


COUNT = 0


def counted(s, b, h, i, j):
    global COUNT
    COUNT = (COUNT + 1) % 3
    return s * float(COUNT + 1)


def toggled():
    flag = False

    def mod(s, b, h, i, j):
        nonlocal flag
        flag = not flag
        return s * (2.0 if flag else 3.0)

    return mod


def imported(s, b, h, i, j):
    import fake_settings

    return s * fake_settings.SCALE


def with_gradients(s, b, h, i, j):
    return s * 2 if torch.is_grad_enabled() else s


def of_seed(s, b, h, i, j):
    return s * float(torch.initial_seed())


def of_torch(s, b, h, i, j):
    return s * torch.my_scale


def of_functional(s, b, h, i, j):
    return s * F.my_scale


def of_math(s, b, h, i, j):
    return s * math.my_scale


def of_builtins(s, b, h, i, j):
    return s * BSCALE  # noqa: F821


def test_what_functions_do_beside_their_result(traced, monkeypatch):
    for mod in (counted, toggled()):
        outs = [fastattn.attention(Q, K, V, score_mod=mod) for _ in range(6)]
        assert not torch.equal(outs[3], outs[4]) and not torch.equal(outs[4], outs[5])
    settings = SimpleNamespace(SCALE=1.0)
    monkeypatch.setitem(sys.modules, "fake_settings", settings)
    for module in (torch, F, math):
        monkeypatch.setattr(module, "my_scale", 1.0, raising=False)
    monkeypatch.setattr(builtins, "BSCALE", 1.0, raising=False)
    for number in (1.0, 3.0, 2.0):
        settings.SCALE = torch.my_scale = builtins.BSCALE = number
        F.my_scale = math.my_scale = number
        torch.manual_seed(int(number))
        for mod in (imported, of_torch, of_functional, of_math, of_builtins, of_seed):
            right(fastattn.attention(Q, K, V, score_mod=mod), lambda s, *_: s * number)  # noqa: B023
    right(fastattn.attention(Q, K, V, score_mod=with_gradients), lambda s, *_: s * 2)
    with torch.no_grad():
        right(fastattn.attention(Q, K, V, score_mod=with_gradients), lambda s, *_: s)
    assert not kept_calls._kept


def test_names_of_what_is_used(traced, monkeypatch):
    def keywords(s, b, h, i, j, *, c=1.0, d=2.0):
        return s * c

    attend(keywords)
    keywords.__kwdefaults__ = {"d": 1.0, "c": 2.0}
    attend(keywords)

    def either(s, b, h, i, j):
        try:
            return s * FIRST
        except NameError:
            return s * SECOND * 3  # noqa: F821

    monkeypatch.setitem(globals(), "SECOND", 2.0)
    attend(either)
    monkeypatch.delitem(globals(), "SECOND")
    monkeypatch.setitem(globals(), "FIRST", 2.0)
    attend(either)


def test_attributes_of_captured_tensors(traced):
    table = torch.randn(7)
    for table.scale in (1.0, 3.0):
        attend(lambda s, b, h, i, j: s * table[j] * table.scale)
    assert not kept_calls._kept


SIZES = torch.randn(7), torch.randn(4, 7)
KEEP, FIRST_OF = torch.ones(7, dtype=torch.bool), torch.tensor(4)


def out_of_range(s, b, h, i, j):
    try:
        SIZES[0][FIRST_OF + 3]
    except IndexError:
        return s * 3
    return s


def of_bare_except(s, b, h, i, j):
    try:
        SIZES[0][FIRST_OF]
    except:  # noqa: E722
        return s * 3
    return s


BY_ELEMENTS = {
    "a bool index": lambda s, *_: s * len(SIZES[0][KEEP]),
    "a slice": lambda s, *_: s * SIZES[0][:FIRST_OF].shape[0],
    "a slice beside a symbol": lambda s, b, h, i, j: s * SIZES[1][FIRST_OF:, j].shape[0],
    "an error": out_of_range,
    "any error": of_bare_except,
}


@pytest.mark.parametrize("name", BY_ELEMENTS)
def test_sizes_and_errors_by_elements_of_captured_tensors(traced, name):
    mod = BY_ELEMENTS[name]
    for n in (4, 2, 0, 9):
        KEEP[:] = torch.arange(7) < n
        FIRST_OF.fill_(n)
        found = fastattn.attention(Q, K, V, score_mod=mod)
        kept_calls._kept.clear()
        assert torch.equal(found, fastattn.attention(Q, K, V, score_mod=mod))


def test_functions_of_torch_that_have_a_state(traced):
    from torch import get_num_threads, initial_seed, is_grad_enabled

    for mod in (
        lambda s, *_: s * 2 if is_grad_enabled() else s,
        lambda s, *_: s * 2 if torch.is_grad_enabled() else s * is_grad_enabled(),
        lambda s, *_: s * initial_seed() + get_num_threads(),
        lambda s, *_: s * torch.__dict__["my_scale"],
        lambda s, *_: s * operator.attrgetter("my_scale")(torch),
    ):
        torch.my_scale = 1.0
        fastattn.attention(Q, K, V, score_mod=mod)
    del torch.my_scale
    assert not kept_calls._kept


def is_grad_enabled():
    """A global of the name of a function of torch."""


def test_a_global_is_no_attribute(traced):
    def mod(s, b, h, i, j):
        return s * 2 if torch.is_grad_enabled() else s

    right(fastattn.attention(Q, K, V, score_mod=mod), lambda s, *_: s * 2)
    with torch.no_grad():
        right(fastattn.attention(Q, K, V, score_mod=mod), lambda s, *_: s)


def test_functions_in_many_functions(traced):
    def wrapped(inner):
        return lambda s, b, h, i, j: inner(s, b, h, i, j) * 1.0

    mod = lambda s, b, h, i, j: s * 2  # noqa: E731
    for _ in range(400):
        mod = wrapped(mod)
    right(fastattn.attention(Q, K, V, score_mod=mod), lambda s, *_: s * 2)


LITERALS = {
    "uniform_": lambda: torch.tensor(0.0).uniform_(),
    "rand_like": lambda: torch.rand_like(torch.tensor(0.0)),
    "bernoulli": lambda: torch.bernoulli(torch.tensor(0.5)),
    "normal": lambda: torch.normal(torch.tensor(0.0), torch.tensor(1.0)),
    "dropout": lambda: F.dropout(torch.tensor(1.0), 0.5),
}


@pytest.mark.parametrize("name", LITERALS)
def test_draws_on_numbers_of_the_function(traced, name):
    draw = LITERALS[name]
    outs = [
        fastattn.attention(Q, K, V, score_mod=lambda s, *_: s * (1 + draw())) for _ in range(20)
    ]
    assert any(not torch.equal(outs[0], x) for x in outs)
    assert not kept_calls._kept


GROWING = [1.0]


def appended(s, *_):
    GROWING.__iadd__([1.0])
    return s * len(GROWING)


def set_first(s, *_):
    GROWING[0] = GROWING[0] + 1.0
    return s * GROWING[0]


def set_by_operator(s, *_):
    operator.setitem(GROWING, 0, GROWING[0] + 1.0)
    return s * GROWING[0]


def grown_in_place(s, *_):
    x = GROWING
    x += [1.0]
    return s * len(x)


@pytest.mark.parametrize(
    "mod", [appended, set_first, set_by_operator, grown_in_place], ids=lambda x: x.__name__
)
def test_lists_that_a_function_changes(traced, mod):
    for n in (2, 3, 4):
        GROWING[:] = [1.0]
        for _ in range(n - 1):
            found = fastattn.attention(Q, K, V, score_mod=mod)
        right(found, lambda s, *_: s * n)  # noqa: B023
    assert not kept_calls._kept


def test_drawn_numbers_are_drawn_in_each_call(traced):
    draw = random.random
    for mod in (
        lambda s, b, h, i, j: s * (1 + draw()),
        lambda s, b, h, i, j: s * (1 + random.random()),
        lambda s, b, h, i, j: s * (1 + torch.rand(())),
    ):
        outs = [fastattn.attention(Q, K, V, score_mod=mod) for _ in range(2)]
        assert not torch.equal(*outs)
    assert not kept_calls._kept


def test_gradients_of_captured_tensors(traced):
    table = torch.zeros(8, requires_grad=True)
    for _ in range(2):
        fastattn.attention(Q, K, V, score_mod=made(1.0, table)).square().sum().backward()
    assert table.grad.any() and not kept_calls._kept


def test_slopes_and_lengths_that_are_recognised(traced):
    """Their values become arguments of the call: for other ones the functions are traced anew."""
    slopes, lengths = torch.tensor([0.5, 0.25, 1.0]), torch.tensor([3, 7])

    def alibi(s, b, h, i, j):
        return s - slopes[h] * (i - j).abs()

    def padding(s, b, h, i, j):
        return torch.where(j < lengths[b], s, -math.inf)

    for n in (3, 5, 7, 3):
        slopes.mul_(1.5)
        lengths[0] = n
        for _ in range(2):
            traced.clear()
            attend(alibi)
            attend(padding)
            out = fastattn.attention(Q, K, V, mask_mod=lambda b, h, i, j: j < lengths[b])
            right(out, padding)
        assert not traced
    fastattn.attention(Q, K, V, score_mod=lambda s, b, h, i, j: s - slopes.neg()[h] * (i - j))
    slopes, lengths = slopes.clone(), lengths.clone()
    traced.clear()
    attend(alibi)
    attend(padding)
    assert not traced


def test_tensors_whose_bits_are_not_their_elements(traced):
    slopes = torch.complex(torch.zeros(H), torch.tensor([0.5, 0.25, 1.0])).conj().imag
    assert slopes.is_neg()
    for _ in range(2):
        attend(with_slopes(slopes))


def test_signs_of_zeros_that_decide_lengths(traced):
    x = torch.zeros(B)

    def shown(b, h, i, j):
        return 2.5 > j - 9 * torch.sign(1 / x[b])

    for zero in (0.0, -0.0, 0.0):
        x.fill_(zero)
        found = fastattn.attention(Q, K, V, mask_mod=shown)
        assert found.any() == (math.copysign(1, zero) > 0)


def test_classes_of_blocks(traced):
    """Those of captured documents are found for each of their values; those of indices alone are
    kept."""
    q, k, v = torch.randn(3, 1, 1, 256, 8).unbind(0)
    documents = torch.arange(256) // 100

    def shown(b, h, i, j):
        return (documents[i] == documents[j]) & (i >= j)

    for size in (100, 30, 200):
        documents.copy_(torch.arange(256) // size)
        found = fastattn.attention(q, k, v, mask_mod=shown)
        mask = (documents[:, None] == documents) & torch.ones(256, 256).tril().bool()
        torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, mask))
        before = len(traced)
        assert torch.equal(found, fastattn.attention(q, k, v, mask_mod=shown))
        assert len(traced) == before
    for _ in range(3):
        found = fastattn.attention(q, k, v, mask_mod=lambda b, h, i, j: i % 64 >= j % 64)
        mask = (torch.arange(256) % 64)[:, None] >= torch.arange(256) % 64
        torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, mask))
    assert len(traced) == before + 1


def test_errors_are_raised_in_each_call(traced):
    def wrong(s, b, h, i, j):
        return s, TABLE

    for _ in range(2):
        with pytest.raises(TypeError, match="returns one value"):
            fastattn.attention(Q, K, V, score_mod=wrong)
        with pytest.raises(ValueError, match="q"):
            fastattn.attention(Q[0], K, V, score_mod=made(1.0))
    attend(made(1.0))
    with pytest.raises(ValueError):
        fastattn.attention(Q[..., :3], K, V, score_mod=made(1.0))


def with_slopes(slopes):
    return lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()


@pytest.mark.slow
def test_captured_tensors_are_not_held(traced):
    import gc
    import weakref

    table, slopes = torch.randn(100), torch.rand(H)
    fastattn.attention(Q, K, V, score_mod=made(1.0, table))
    fastattn.attention(Q, K, V, score_mod=with_slopes(slopes))
    kept = [x.made.call.structure.alibi for x in kept_calls._kept.values()]
    assert all(x is None or x.data_ptr() != slopes.data_ptr() for x in kept)
    gone = [weakref.ref(table), weakref.ref(slopes)]
    traced.clear()
    del table, slopes
    gc.collect()
    assert all(x() is None for x in gone)


@pytest.mark.slow
def test_the_number_of_kept_calls_is_bounded(traced):
    for n in range(kept_calls.MOST + 20):
        fastattn.attention(Q, K, V, score_mod=made(float(n)))
    assert 0 < len(kept_calls._kept) <= kept_calls.MOST
