"""score_mod and mask_mod in compiled and exported code: one graph, with the bits of eager code."""

import copy
import io

import pytest
import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import create_block_mask

import fastattn
from fastattn.call.spec import Options, Tensors
from fastattn.score_mods.tracing import trace_score_mod
from fastattn.score_mods.unlowered import Unlowered, is_unlowered, lowered_call
from tests.support.marks import parametrize
from tests.support.program_operators import CASES, IDS, function_of
from tests.support.torch_version import NO_AUX_REQUEST, skip_without

B, H, N, D = 2, 4, 37, 16
G = torch.Generator().manual_seed(3)
TABLE = torch.randn(H, 201, generator=G).requires_grad_()
BIAS = torch.randn(H, N, N, generator=G).requires_grad_()
LEARNED = TABLE, BIAS
DOCUMENTS = torch.arange(100) // 11
OPEN = torch.rand(100, generator=G) > 0.2


def relative(s, b, h, i, j):
    return torch.where(i >= j, s + TABLE[h, i - j + 100].tanh(), -float("inf"))


def shown(b, h, i, j):
    return (DOCUMENTS[i] == DOCUMENTS[j]) & OPEN[j] | (i == j)


def tensors(n=N, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, n, D, generator=draw).requires_grad_() for _ in range(3)]


def flex(**arguments):
    return lambda q, k, v: fastattn.flex_attention(q * 2, k, v, **arguments)


def plain(**arguments):
    return lambda q, k, v: fastattn.attention(q * 2, k, v, **arguments)


def packed(q, k, v):
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    cu, n = torch.tensor([0, 20, 2 * N]), 2 * N - 20
    return fastattn.attention_packed(*flat, cu, cu, max_q=n, max_k=n, score_mod=relative)


def weights(q, k, v):
    return fastattn.attention_weights(q, k, score_mod=relative, mask_mod=shown) @ v


def each(q, k, v):
    one = lambda *x: fastattn.attention(*(y[None] for y in x), score_mod=relative)  # noqa: E731
    return torch.vmap(one)(q, k, v)


def largest(q, k, v):
    skip_without(NO_AUX_REQUEST)
    aux = torchs.AuxRequest(lse=True, max_scores=True)
    out, aux = fastattn.flex_attention(q, k, v, relative, return_aux=aux)
    return out + (aux.lse + aux.max_scores.detach())[..., None]


def checkpointed(q, k, v):
    inner = plain(score_mod=MODS[0], mask_mod=MODS[1])
    return torch.utils.checkpoint.checkpoint(inner, q, k, v, use_reentrant=False)


BLOCKS = create_block_mask(shown, None, None, N, N, device="cpu", BLOCK_SIZE=16)
MODS = fastattn.Mod(relative), fastattn.Mod(shown)
NEAR = fastattn.and_masks(shown, lambda b, h, i, j: i - j < 9)
CALLS = {
    "flex": flex(score_mod=relative, mask_mod=shown),
    "flex-causal": flex(mask_mod=lambda b, h, i, j: i >= j),
    "flex-cap": flex(score_mod=lambda s, b, h, i, j: 5 * torch.tanh(s / 5)),
    "flex-and_masks": flex(mask_mod=NEAR),
    "flex-aux": largest,
    "flex-dropout": flex(score_mod=relative, dropout_p=0.2, seed=7),
    "flex-block_mask": flex(score_mod=relative, block_mask=BLOCKS),
    "flex-learned-bias": flex(score_mod=lambda s, b, h, i, j: s + BIAS[h, i, j]),
    "flex-rows": flex(
        score_mod=lambda s, b, h, i, j: s + torch.dot(TABLE[:3, i], TABLE[:3, j]),
        mask_mod=lambda b, h, i, j: (TABLE[:, i] - TABLE[:, j]).norm() < 3,
    ),
    "flex-oracle": flex(score_mod=lambda s, b, h, i, j: s * BIAS[h, i, j]),
    "attention": plain(score_mod=relative, mask_mod=shown, causal=True, softcap=5.0),
    "attention-learned-bias": plain(
        score_mod=lambda s, b, h, i, j: s + BIAS[h, i, j], mask=torch.rand(N, N) > 0.3
    ),
    "packed": packed,
    "weights": weights,
    "vmap": each,
    "Mod": plain(score_mod=MODS[0], mask_mod=MODS[1]),
    "Mod-flex": flex(score_mod=MODS[0], mask_mod=MODS[1]),
    "Mod-checkpoint": checkpointed,
}
EDGE, SLOPE = 7, 0.25  # numbers of a closure may be symbols in compiled code
CALLS["flex-numbers"] = flex(
    score_mod=lambda s, b, h, i, j: s - SLOPE * abs(i - j), mask_mod=lambda b, h, i, j: i - j < EDGE
)
OF_ONE_LENGTH = {"flex-block_mask", "flex-learned-bias", "flex-oracle", "packed"}
OF_ONE_LENGTH |= {"attention-learned-bias"}


@pytest.mark.slow
@parametrize("name", CALLS, fast=1)
@parametrize("dynamic", [None, True], ids=["static", "dynamic"], fast=1)
def test_one_graph_with_the_bits_of_eager_code(name, dynamic):
    call = CALLS[name]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for n in (N,) if name in OF_ONE_LENGTH or not dynamic else (N, 61):
        given = tensors(n)
        results = []
        for run in (compiled, call):
            out = run(*given)
            wanted = (*given, *LEARNED)
            grads = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
            results.append([out, *grads])
        for got, expected in zip(*results):
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(got, expected)


@parametrize("whole, name, text", CASES, ids=IDS, fast=2)
def test_every_operator(whole, name, text):
    score_mod = function_of(text, whole)
    if "~" in text:  # torch.compile does not follow it
        score_mod = fastattn.Mod(score_mod)

    def program(x):
        return x + 1, trace_score_mod(score_mod).program.text()

    given = torch.zeros(1)
    assert torch.compile(program, backend="eager", fullgraph=True)(given)[1] == program(given)[1]


@pytest.mark.slow
def test_what_is_not_followed_breaks_the_graph():
    given = [x.detach() for x in tensors()]
    call = plain(mask_mod=lambda b, h, i, j: ~OPEN[j] | (i == j))
    assert torch.equal(torch.compile(call, backend="eager")(*given), call(*given))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="invert"):
        torch.compile(call, backend="eager", fullgraph=True)(*given)


@pytest.mark.slow
def test_a_new_length_of_a_captured_tensor_is_not_compiled_again():
    counter = torch._dynamo.testing.CompileCounter()

    def model(q, k, v, documents):
        same = lambda b, h, i, j: documents[b, i] == documents[b, j]  # noqa: E731
        return fastattn.attention(q, k, v, mask_mod=same)

    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for n in (20, 33, 41, 57):
        documents = torch.randint(0, 4, (B, n)).sort(1)[0]
        assert torch.equal(compiled(*tensors(n), documents), model(*tensors(n), documents))
    assert counter.frame_count <= 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(H, 201))
        self.register_buffer("documents", torch.arange(100) // 11)

    def forward(self, q, k, v):
        return fastattn.flex_attention(
            q,
            k,
            v,
            lambda s, b, h, i, j: s + self.table[h, i - j + 100],
            mask_mod=lambda b, h, i, j: self.documents[i] == self.documents[j],
        )


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@parametrize("strict", [True, False], ids=["strict", "not-strict"], fast=1)
def test_an_exported_model_keeps_its_table_and_runs_at_any_length(strict):
    model = Model()
    length = torch.export.Dim("length", min=2, max=100)
    given = tuple(x.detach() for x in tensors())
    shapes = tuple({2: length} for _ in given)
    exported = torch.export.export(model, given, strict=strict, dynamic_shapes=shapes)
    targets = [x.target for x in exported.graph_signature.input_specs if x.target]
    assert sorted(targets) == ["documents", "table"]
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    with torch.no_grad():
        loaded.table.mul_(2)
        model.table.mul_(2)
    longer = [x.detach() for x in tensors(61, seed=1)]
    assert torch.equal(loaded(*longer), model(*longer))


@pytest.mark.slow
def test_attention_jvp():
    q, k, v = (x.detach() for x in tensors())

    def call(q, k, v):
        given = dict(score_mod=lambda s, b, h, i, j: s.tanh() + TABLE.detach()[h, i - j + 100])
        return fastattn.attention_jvp(q, k, v, k, None, q, mask_mod=shown, **given)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for got, expected in zip(compiled(q, k, v), call(q, k, v)):
        assert torch.equal(got, expected)


@pytest.mark.slow
def test_a_branch_says_what_to_write():
    branching = lambda s, b, h, i, j: s if i > j else s + 1  # noqa: E731
    call, given = plain(score_mod=branching), [x.detach() for x in tensors()]
    with pytest.raises(TypeError, match=r"torch\.where"):
        torch.compile(call, backend="eager")(*given)
    with pytest.raises(Exception, match=r"torch\.where"):
        torch.compile(call, backend="eager", fullgraph=True)(*given)


@pytest.mark.slow
def test_an_index_out_of_range():
    short = torch.zeros(9)
    compiled = torch.compile(
        plain(score_mod=lambda s, b, h, i, j: s + short[i]), backend="eager", fullgraph=True
    )
    with pytest.raises(IndexError, match="out of range"):
        compiled(*tensors())


@pytest.mark.slow
def test_whole_numbers_of_more_than_32_bits():
    large = torch.arange(N) << 40
    given = [x.detach() for x in tensors()]
    call = plain(mask_mod=lambda b, h, i, j: large[i] + i >= large[j] + j)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(NotImplementedError, match="32 bits"):
        compiled(*given)
    wide = [x.double() for x in given]
    assert torch.equal(compiled(*wide), call(*wide))


class TestMod:
    def test_in_eager_code_it_is_its_function(self):
        table = torch.zeros(9)
        mod = fastattn.Mod(lambda s, b, h, i, j: s + table[j])
        assert mod(1, 0, 0, 0, 3) == 1
        table = torch.arange(9.0)  # the function looks it up anew
        given = [x[:, :, :9] for x in tensors()]
        expected = fastattn.attention(*given, score_mod=lambda s, b, h, i, j: s + j)
        assert torch.equal(fastattn.attention(*given, score_mod=mod), expected)
        assert "Mod(" in repr(mod)
        assert copy.deepcopy(mod) is mod

    @pytest.mark.slow
    def test_elements_are_read_at_each_call(self):
        table = torch.zeros(N)
        mod = fastattn.Mod(lambda s, b, h, i, j: s + table[j])
        compiled = torch.compile(plain(score_mod=mod), backend="eager", fullgraph=True)
        compiled(*tensors())
        table += torch.arange(N) % 3
        assert torch.equal(compiled(*tensors()), plain(score_mod=mod)(*tensors()))

    @pytest.mark.parametrize(
        "fn, error, words",
        [
            (lambda s, b: s, TypeError, "takes"),
            (lambda s, b, h, i, j: s if i > j else s + 1, TypeError, "branch"),
            (lambda b, h, i, j: i + j, TypeError, "returns a bool"),
        ],
        ids=["arguments", "branch", "no-bool"],
    )
    def test_a_wrong_function_raises_at_once(self, fn, error, words):
        with pytest.raises(error, match=words):
            fastattn.Mod(fn)

    def test_a_score_mod_is_no_mask_mod(self):
        compiled = torch.compile(plain(mask_mod=MODS[0]), backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="of a score_mod"):
            compiled(*tensors())


def lowered(text, sizes, floats=None, ints=None):
    q = torch.zeros(1, 1, 5, 8)
    t = Tensors(q, q, q, captured_floats=floats, captured_ints=ints)
    return lowered_call(t, Options(score_mod=text, captured_sizes=sizes))


MASK = "captured int:1\nj int\nload int @0 0\ni int\nge bool 1 2"


class TestText:
    def test_round_trip(self):
        given = Unlowered(trace_score_mod(relative).program, None)
        assert is_unlowered(given.text())
        assert Unlowered.parse(given.text()) == given

    def test_lowered_text_is_left_alone(self):
        t, o = lowered(f"\n\n{MASK}\n\nunlowered", [5], ints=torch.arange(5))
        assert not is_unlowered(o.score_mod)
        assert o.captured_sizes is None
        assert lowered_call(t, o) == (t, o)

    @pytest.mark.parametrize(
        "text, sizes, ints, words",
        [
            ("unlowered", [], None, "programs"),
            (f"{MASK}\n\n\n\nunlowered", [5], torch.arange(5), "expected float"),
            (f"\n\n{MASK}\n\nunlowered", [6], torch.arange(5), "captured_sizes"),
            (f"\n\n{MASK}\n\nunlowered", [], torch.arange(5), "captured_sizes"),
            (f"\n\n{MASK}\n\nunlowered", [5], None, "captured_sizes"),
        ],
        ids=["no-programs", "kind", "size", "no-size", "no-numbers"],
    )
    def test_a_wrong_one_raises(self, text, sizes, ints, words):
        with pytest.raises(ValueError, match=words):
            lowered(text, sizes, ints=ints)
