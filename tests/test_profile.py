"""profile: every attention call of a model, what its masks show, and no trace of having looked."""

import importlib.util
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

import fastattn
from fastattn import api, patching, profiling
from fastattn.structure import structure

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@pytest.fixture(autouse=True)
def quick(threads, monkeypatch):
    threads(1)
    monkeypatch.setattr(profiling, "SECONDS", 0.02)
    monkeypatch.setattr(patching, "SMALL", 0)


# -------------------------------------------------------------------------------- what a mask shows

N = 12
I, J = torch.arange(N)[:, None], torch.arange(N)
CAUSAL = J <= I
LENGTHS = torch.tensor([[12], [7]])
RIGHT, LEFT = (J < LENGTHS)[:, None, None], (J >= N - LENGTHS)[:, None, None]
SAME = (torch.arange(N) < 5)[:, None] == (torch.arange(N) < 5)
PADDED = CAUSAL & LEFT


def added(keep, value=-torch.inf):
    return torch.zeros(keep.shape).masked_fill(~keep, value)


SHOWN = {
    "all": (torch.ones(N, N, dtype=torch.bool), "shows everything"),
    "zeros": (torch.zeros(1, 1, N, N), "shows everything"),
    "causal": (CAUSAL[None, None], "causal"),
    "causal, added": (added(CAUSAL), "causal"),
    "causal, finfo.min": (added(CAUSAL, torch.finfo(torch.float32).min), "causal"),
    "every head": (CAUSAL.expand(2, 3, N, N), "causal"),
    "last rows": (CAUSAL[-4:], "causal from the bottom right"),
    "right padding": (RIGHT.expand(2, 1, N, N), "right padding"),
    "small already": (RIGHT, "right padding"),
    "left padding": (LEFT, "left padding"),
    "hidden keys": ((J % 5 > 0).expand(N, N), "hidden keys"),
    "causal right": (CAUSAL & RIGHT, "causal + right padding"),
    "causal left": (PADDED, "causal + left padding"),
    "causal left, as transformers": (
        PADDED | ~PADDED.any(-1, keepdim=True),
        "causal + left padding",
    ),
    "window": (CAUSAL & (J > I - 4), "causal + a window of (3, 0)"),
    "window left": (CAUSAL & (J > I - 4) & LEFT, "causal + a window of (3, 0) + left padding"),
    "both sides": ((I - J).abs() < 3, "a window of (2, 2)"),
    "documents": (SAME, "documents, up to 2 in a row"),
    "causal documents": (SAME & CAUSAL, "causal documents, up to 2 in a row"),
    "prefix": (CAUSAL | (J < 4), "causal after a prefix of up to 4 keys"),
    "bias": (torch.linspace(0, 1, N * N).view(N, N), "added to the scores: a bias"),
    "-1e4 hides nothing": (added(CAUSAL, -1e4), "added to the scores: a bias"),
    "heads": (torch.stack([CAUSAL, ~CAUSAL])[None], "other keys for each head"),
    "no structure": ((I + J) % 3 > 0, "no structure that is known, 67% shown"),
    "padded rows": (CAUSAL & RIGHT & RIGHT.mT, "causal + right padding"),
    "padded documents": (SAME & CAUSAL & RIGHT & RIGHT.mT, "causal documents, up to 2 in a row"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_mask_shows(name):
    """Named, and where arguments stand for it, the call with those is the call with it."""
    mask, what = SHOWN[name]
    M = mask.shape[-2] if mask.shape[-2] > 1 else N
    found = structure(mask, M, N)
    assert found.what == what
    if found.arguments is None:
        return
    assert found.instead and set(found.arguments) <= {
        "causal",
        "window",
        "key_lengths",
        "mask",
    }
    q, k = torch.randn(2, 3, M, 8), torch.randn(2, 3, N, 8)
    given = dict(found.arguments)
    if "key_lengths" in given:
        given["key_lengths"] = given["key_lengths"].expand(2)
    wanted = fastattn.attention(q, k, k, mask=mask)
    out = fastattn.attention(q, k, k, **given)
    seen = (out * wanted).abs().sum(-1, keepdim=True) > 0  # padding sees nothing, by one of them
    assert seen.sum() > M
    torch.testing.assert_close(out * seen, wanted * seen)


def test_rows_that_nobody_sees_say_nothing_of_keys():
    """Padding among the queries of an item whose others see all keys is none among its keys."""
    rows = torch.tensor([[True] * 3 + [False] * 3, [True] * 6])
    assert structure(rows[:, None, :, None].expand(2, 1, 6, 10), 6, 10).what == "shows everything"


@pytest.mark.parametrize("shape", [(1, 1, 1, 3, 4), (0, 1, 3, 4), (2, 1, 0, 0)])
def test_a_mask_that_cannot_be_looked_at(shape):
    assert structure(torch.ones(shape).bool(), *shape[-2:]).arguments is None


# ------------------------------------------------------------------------------ what a model calls


def encoder(**kwargs):
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, **kwargs)
    return nn.TransformerEncoder(layer, 2)


X = torch.randn(2, 9, 32)
PADDING = torch.arange(9) >= torch.tensor([[9], [5]])


def test_training():
    report = fastattn.profile(encoder(), X, src_key_padding_mask=PADDING)
    (m,) = report.calls
    assert dict(m.call.where) == {"layers.0.self_attn": 1, "layers.1.self_attn": 1}
    assert m.call.path == "layers.*.self_attn" and m.call.q == m.call.k == (2, 2, 9, 16)
    assert (m.call.runs, m.ours_runs) == ("torch math", "fastattn cpu")  # of dropout
    assert m.call.shown.what == "right padding" and m.call.options == "dropout 0.1"
    assert set(m.seconds) == set(m.bytes) == {"now", "sdpa", "shown"}
    text = str(report)
    assert text.startswith("TransformerEncoder, forward and backward, 1 thread: ")
    assert "(2, 2, 1, 9) float32, but right padding: pass key_lengths=lengths" in text
    assert "fastattn.convert(model)" in text and "(measured; " in text


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_the_inference_path_of_a_layer(padded):
    """Padded, it is nested tensors."""
    with torch.no_grad():
        given = dict(src_key_padding_mask=PADDING) if padded else {}
        (m,) = fastattn.profile(encoder().eval(), X, **given).calls
    assert m.call.function.startswith("nn.TransformerEncoderLayer")
    assert m.call.count == 2 and m.call.q == (2, 2, -1 if padded else 9, 16)
    assert m.ours_runs == "fastattn cpu" and {"now", "sdpa"} == set(m.seconds)


def test_the_inference_path_of_heads():
    heads = nn.MultiheadAttention(32, 2, batch_first=True).eval()
    with torch.no_grad():
        report = fastattn.profile(heads, X, X, X, key_padding_mask=PADDING, need_weights=False)
    (m,) = report.calls
    assert m.call.function.startswith("nn.MultiheadAttention") and m.call.path == ""
    assert m.call.shown.what == "right padding" and m.ours_runs == "fastattn cpu"


class Mixed(nn.Module):
    """Calls of every sort, a buffer that changes, and random numbers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(9)
        self.heads = fastattn.MultiheadAttention(32, 2, batch_first=True)
        self.fails = False

    def forward(self, x):
        x = self.norm(x) + torch.rand(())
        x = self.heads(x, x, x)[0]
        q = x.view(2, 9, 2, 16).transpose(1, 2)
        F.scaled_dot_product_attention(q, q, q, torch.ones(9, 9, dtype=torch.bool).tril())
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.1)
        if self.fails:
            raise KeyError("the model's")
        return {"out": out, "n": 3}


def test_calls_of_every_sort():
    report = fastattn.profile(Mixed(), X)
    found = {(m.call.function, m.call.options, m.call.mask): m for m in report.calls}
    assert len(found) == 4
    assert found["fastattn attention", "", ""].call.runs == "fastattn cpu"
    assert found["fastattn weights", "", ""].call.path == "heads"
    m = found["scaled_dot_product_attention", "", "(9, 9) bool, dense"]
    assert m.call.shown.instead == "causal=True" and "shown" in m.seconds
    assert ("scaled_dot_product_attention", "causal, a scale", "") in found


def test_a_patched_model_says_so():
    with fastattn.sdpa():
        report = fastattn.profile(lambda: F.scaled_dot_product_attention(*[X[:, None]] * 3))
    assert report.calls[0].call.runs == "fastattn.patch()"


def test_why_a_call_stays_torchs(monkeypatch):
    wide = torch.randn(1, 1, 4, 600)
    report = fastattn.profile(lambda: F.scaled_dot_product_attention(wide, wide, wide))
    assert report.calls[0].ours_runs == "torch: a head dim over 512"
    monkeypatch.setattr(patching, "SMALL", 1 << 20)
    report = fastattn.profile(encoder(), X)
    assert "calling costs more" in report.calls[0].ours_runs


def test_no_attention():
    assert "No attention call was seen" in str(fastattn.profile(nn.Linear(32, 3), X))


def test_a_mask_that_is_small_already():
    """There is nothing to pass instead, unless keys could be skipped."""
    q, columns = torch.randn(2, 1, 9, 8), PADDING.logical_not()[:, None, None]
    (m,) = fastattn.profile(lambda: F.scaled_dot_product_attention(q, q, q, columns.flip(-1))).calls
    assert (m.call.shown.what, m.call.shown.instead) == ("left padding", "")
    (m,) = fastattn.profile(lambda: F.scaled_dot_product_attention(q, q, q, columns)).calls
    assert m.call.shown.instead == "key_lengths=lengths" and "dense" not in m.call.mask


def test_growing_keys_are_one_line():
    def decode():
        for n in range(3, 9):
            k = torch.randn(1, 2, n, 8)
            F.scaled_dot_product_attention(k[:, :, :1], k, k)

    report = fastattn.profile(decode)
    assert len(report.calls) == 1 and report.calls[0].call.count == 6
    assert "k (1, 2, 3 to 8, 8)" in str(report)


def test_json_and_plot(tmp_path):
    report = fastattn.profile(Mixed(), X)
    record = json.loads(report.json())
    assert record["model"] == "Mixed" and len(record["calls"]) == 4
    assert record["calls"][0]["seconds"]["now"] > 0
    if importlib.util.find_spec("matplotlib"):
        report.plot(tmp_path / "profile.png")
        assert (tmp_path / "profile.png").stat().st_size > 1000


def state(model):
    """What a look must not change, by identity where it has one."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return (
        F.scaled_dot_product_attention,
        torch._native_multi_head_attention,
        torch._transformer_encoder_layer_fwd,
        api.call,
        [len(x) for x in (modules._global_forward_hooks, modules._global_forward_pre_hooks)],
        [(type(m), m.training, *(dict(getattr(m, x)) for x in hooks)) for m in model.modules()],
        [id(x.grad) for x in model.parameters()],
        [id(x) for x in model.buffers()],
        [x.tolist() for x in model.buffers()],
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("build", [Mixed, encoder], ids=lambda x: x.__name__)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_nothing_is_changed(build, mode):
    model = build().train(mode == "train")
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = state(model)
    fastattn.profile(model, X)
    assert state(model) == before


def test_nothing_is_changed_by_an_exception():
    model = Mixed()
    before = state(model)
    model.fails = True
    with pytest.raises(KeyError, match="the model's"):
        fastattn.profile(model, X)
    assert state(model) == before


def test_compiled_models_are_looked_at_eagerly():
    model = torch.compile(encoder(), backend="eager")
    (m,) = fastattn.profile(model, X).calls
    assert m.call.count == 2


def test_a_model_of_transformers():
    """Padded on the left, its mask is dense. A cache that it is given does not grow."""
    if not importlib.util.find_spec("transformers"):
        pytest.skip("transformers is not installed: `make setup` installs it")
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=20,
        attn_implementation="sdpa",
    )
    model, ids = LlamaForCausalLM(config).eval(), torch.arange(18).view(2, 9)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        report = fastattn.profile(
            model, ids, attention_mask=PADDING.flip(1).logical_not().long(), past_key_values=cache
        )
    (m,) = report.calls
    assert m.call.path == "model.layers.*.self_attn" and m.call.count == 2
    assert m.call.shown.what == "causal + left padding"
    assert cache.get_seq_length() == 0
