"""Sizes that data decides, as of x[keep]: exported and compiled whole, every tensor argument with
such a size in each of its dimensions, with all others of that letter and, in some calls, alone."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

import fastattn
from tests.support.marks import parametrize

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compilers emit warnings

SIZES = {"B": 3, "B+1": 4, "H": 4, "Hk": 4, "M": 5, "N": 6, "D": 8, "Dv": 8, "T": 9, "S": 10}
SIZES |= {"1": 1, "P": 4, "page": 4, "blocks": 2, "E": 32, "BH": 12, "L": 5, "chosen": 3}
DENSE = {"q": "B H M D", "k": "B Hk N D", "v": "B Hk N Dv"}
TOKENS = {"q": "B M H D", "k": "B N Hk D", "v": "B N Hk Dv"}
PACKED = {"q": "T H D", "k": "S Hk D", "v": "S Hk Dv", "cu_q": "B+1", "cu_k": "B+1"}
PAGED = {"q": "T H D", "k": "P page Hk D", "v": "P page Hk Dv", "cu_q": "B+1"}
PAGED |= {"block_table": "B blocks", "key_lengths": "B"}
PADDED = {"query": "B M E", "key": "B N E", "value": "B N E", "key_padding_mask": "B N"}


def sdpa(q, k, v, mask=None, **rest):
    return fastattn.scaled_dot_product_attention(q, k, v, mask, **rest)


def of_tokens(function):
    """The function of heads that are views of tokens, and its result as tokens."""
    return lambda q, k, v: function(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def relative(q, k, v, bias=None):
    def score_mod(score, b, h, i, j):
        return score * 1.5 + (i - j if bias is None else bias[b, h])

    return fastattn.flex_attention(q, k, v, score_mod, mask_mod=lambda b, h, i, j: i - j < 3)


def shown_by_table(q, k, v, table):
    return fastattn.flex_attention(q, k, v, mask_mod=lambda b, h, i, j: table[i, j] < 0.7)


def largest_scores(q, k, v):
    from torch.nn.attention.flex_attention import AuxRequest

    aux = AuxRequest(lse=True, max_scores=True)
    return fastattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + i, return_aux=aux)[1]


def tangents(q, k, v, q_t, v_t):
    return fastattn.attention_jvp(q, k, v, q_t, None, v_t)


def expanded(q, k, v, mask):
    return fastattn.attention(q, k, v, mask=mask.expand(*q.shape[:3], -1))


def merged(q, k, v):
    halves = (slice(0, 3), slice(3, None))
    parts = [fastattn.attention(q, k[:, :, at], v[:, :, at], return_lse=True) for at in halves]
    return fastattn.merge(parts)


class Module(NamedTuple):
    """A call that is a module."""

    build: Callable[[], nn.Module]

    def converted(self):
        torch.manual_seed(0)
        model = nn.ModuleList([self.build()]).eval()
        fastattn.convert(model)
        return model[0]


# A call's function, and the letters of its tensors.
CALLS = {
    "attention": (fastattn.attention, DENSE),
    "bool mask": (fastattn.attention, DENSE | {"mask": "B H M N"}),
    "mask of items": (fastattn.attention, DENSE | {"mask": "B 1 1 N"}),
    "mask of pairs": (fastattn.attention, DENSE | {"mask": "M N"}),
    "float mask": (fastattn.attention, DENSE | {"mask": "B 1 M N"}),
    "expanded mask": (expanded, DENSE | {"mask": "1 1 1 N"}),
    "others": (
        fastattn.attention,
        DENSE | {"key_lengths": "B", "alibi_slopes": "B H", "sinks": "H"},
    ),
    "qv": (fastattn.attention, DENSE | {"qv": "B H M Dv"}),
    "tokens": (of_tokens(fastattn.attention), TOKENS),
    "weights": (
        fastattn.attention_weights,
        {"q": "B H M D", "k": "B Hk N D", "mask": "B 1 1 N", "lse": "B H M"},
    ),
    "jvp": (tangents, DENSE | {"q_t": "B H M D", "v_t": "B Hk N Dv"}),
    "merge": (merged, DENSE),
    "packed": (fastattn.attention_packed, PACKED),
    "packed, max_q": (
        lambda **t: fastattn.attention_packed(**t, max_q=5, max_k=6),
        PACKED | {"mask": "B 1 M N", "alibi_slopes": "B H"},
    ),
    "paged": (fastattn.attention_packed, PAGED),
    "paged, int8": (
        fastattn.attention_packed,
        PAGED | {"k_scale": "P page Hk", "v_scale": "P page Hk"},
    ),
    "selected": (fastattn.attention_selected, DENSE | {"indices": "B 1 M chosen"}),
    "sdpa": (sdpa, DENSE | {"mask": "B H M N"}),
    "sdpa, no mask": (sdpa, DENSE),
    "sdpa, tokens": (of_tokens(sdpa), TOKENS),
    "sdpa, groups": (
        lambda **t: sdpa(**t, enable_gqa=True),
        DENSE | {"mask": "B 1 1 N"},
    ),
    "sdpa, 3-D": (sdpa, {"q": "B M D", "k": "B N D", "v": "B N Dv", "mask": "B M N"}),
    "sdpa, 5-D": (
        sdpa,
        {"q": "B P H M D", "k": "B P H N D", "v": "B P H N Dv", "mask": "B 1 H M N"},
    ),
    "flex": (relative, DENSE),
    "flex, tokens": (of_tokens(relative), TOKENS),
    "flex, bias": (relative, DENSE | {"bias": "B H"}),
    "flex, table": (shown_by_table, DENSE | {"table": "M N"}),
    "flex, aux": (largest_scores, DENSE),
    "MultiheadAttention": (
        Module(lambda: nn.MultiheadAttention(32, 4, batch_first=True)),
        PADDED | {"attn_mask": "M N"},
    ),
    "MultiheadAttention, L first": (
        Module(lambda: nn.MultiheadAttention(32, 4)),
        {"query": "M B E", "key": "N B E", "value": "N B E", "attn_mask": "BH M N"},
    ),
    "TransformerEncoderLayer": (
        Module(lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)),
        {"src": "B L E", "src_mask": "L L", "src_key_padding_mask": "B L"},
    ),
    "nn.SharedHeadAttention": (
        Module(lambda: fastattn.nn.SharedHeadAttention(32, 4)),
        {"q": "B M E", "k": "B N E", "v": "B N E", "mask": "B M N"},
    ),
}
# A graph must know how many heads share a list of keys, and the default scale of `max_scores`.
FIXED = {("selected", "H"), ("selected", "Hk"), ("flex, aux", "D")}


# Calls with one tensor of such a size beside others of a known one.
ALONE = {"others", "qv", "weights", "packed, max_q", "paged, int8", "sdpa", "flex, bias"}
ALONE |= {"MultiheadAttention"}


def letters_of(call):
    found = dict.fromkeys(x for letters in CALLS[call][1].values() for x in letters.split())
    return [x for x in found if x != "1" and (call, x) not in FIXED]


def cases():
    """(call, letter, the tensors that are cut there, whether each by its own count)."""
    for call, (_, tensors) in CALLS.items():
        for letter in letters_of(call):
            having = tuple(name for name, x in tensors.items() if letter in x.split())
            yield call, letter, having, False
            if len(having) > 1:
                yield call, letter, having, True
                if call in ALONE:
                    yield from ((call, letter, (name,), False) for name in having)


def id_of(x):
    if callable(x):
        return x.__name__
    call, letter, names, apart = x
    every = len(names) == sum(letter in x.split() for x in CALLS[call][1].values())
    return f"{call}-{letter} of {'each' if apart else 'all' if every else names[0]}"


def tensor(name, call, shape):
    if name.startswith("cu_"):
        return torch.tensor([0, 3, 7, 9 if name == "cu_q" else 10, 11])[: shape[0]]
    if name in ("block_table", "indices", "key_lengths"):
        return torch.randint(1, 4, shape)
    if "mask" in name and "float" not in call:
        return torch.rand(shape) > (0.8 if "_" in name else 0.2)
    if "int8" in call and name in "kv":
        return torch.randint(-100, 100, shape).to(torch.int8)
    return torch.rand(shape) if "table" in name else torch.randn(shape)


class Cut(nn.Module):
    """The call, with one entry less of the named tensors in each dimension of that letter."""

    def __init__(self, call, letter, names, apart):
        super().__init__()
        function, self.letters = CALLS[call]
        self.function = function.converted() if isinstance(function, Module) else function
        self.letter, self.names, self.apart = letter, names, apart

    def forward(self, keep, tensors):
        kept, found = keep.nonzero().flatten(), dict(tensors)
        for name in self.names:
            kept = keep.nonzero().flatten() if self.apart else kept
            for dim, letter in enumerate(self.letters[name].split()):
                if letter == self.letter:
                    found[name] = found[name].index_select(dim, kept)
        return self.function(**found)


def prepared(call, letter, names, apart):
    """The module and its arguments."""
    torch.manual_seed(0)
    tensors = {}
    for name, letters in CALLS[call][1].items():
        longer = letter if name in names else ""
        shape = [SIZES[x] + (x == longer) for x in letters.split()]
        tensors[name] = tensor(name, call, shape)
    keep = torch.arange(SIZES[letter] + 1) < SIZES[letter]
    return Cut(call, letter, names, apart), keep, tensors


def exported(model, keep, tensors):
    shapes = {0: torch.export.Dim.DYNAMIC}, dict.fromkeys(tensors)
    return torch.export.export(model, (keep, tensors), dynamic_shapes=shapes).module()


def compiled(model, keep, _, backend="eager"):
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(keep, 0)
    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.fixture(autouse=True)
def captured():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


@parametrize(
    "case, how", list(zip(cases(), itertools.cycle([exported, compiled]))), ids=id_of, fast=3
)
def test_every_dimension(case, how):
    model, *given = prepared(*case)
    expected = model(*given)
    torch.testing.assert_close(how(model, *given)(*given), expected)


@parametrize("letter", ["B", "N", "T"], fast=1)
@parametrize("call", ["sdpa", "float mask", "flex, bias", "packed", "MultiheadAttention"], fast=2)
def test_gradients(call, letter):
    if letter not in letters_of(call):
        pytest.skip(f"no tensor has {letter}")
    having = [name for name, x in CALLS[call][1].items() if letter in x.split()]
    model, keep, tensors = prepared(call, letter, having, False)
    moved = [x.requires_grad_() for x in tensors.values() if x.is_floating_point()]
    expected = torch.autograd.grad(first_of(model(keep, tensors)).sin().sum(), moved)
    out = compiled(model, keep, tensors, backend="aot_eager")(keep, tensors)
    torch.testing.assert_close(torch.autograd.grad(first_of(out).sin().sum(), moved), expected)


def first_of(results):
    return results if isinstance(results, torch.Tensor) else results[0]


@parametrize(
    "call, letter, name",
    [
        ("attention", "B", "k"),
        ("attention", "N", "v"),
        ("bool mask", "H", "mask"),
        ("others", "H", "sinks"),
        ("packed", "B+1", "cu_k"),
        ("sdpa, no mask", "B", "q"),
        ("sdpa, no mask", "H", "q"),
        ("flex", "B", "k"),
        ("flex", "H", "q"),
        ("MultiheadAttention", "B", "key_padding_mask"),
        ("MultiheadAttention", "N", "key_padding_mask"),
        ("TransformerEncoderLayer", "B", "src_key_padding_mask"),
    ],
    ids="-".join,
    fast=9,
)
def test_sizes_that_disagree_raise_when_the_program_runs(call, letter, name):
    model, keep, tensors = prepared(call, letter, (name,), False)
    program = exported(model, keep, tensors)
    with pytest.raises((RuntimeError, ValueError)):
        program(torch.ones_like(keep), tensors)


@pytest.mark.parametrize("call", ["sdpa, no mask", "flex"])
def test_fewer_key_heads_raise_without_enable_gqa(call):
    """The kernels would take them for groups."""
    model, keep, tensors = prepared(call, "Hk", ("k", "v"), False)
    program = exported(model, keep, tensors)
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        program(torch.arange(5) < 2, tensors)
