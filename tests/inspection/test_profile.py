"""profile: it reports every attention call of a model and its masks, and changes nothing."""

import importlib.util
import json

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

import fastattn
from fastattn import api
from fastattn.dropin import patching

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


# ------------------------------------------------------------------------------ what a model calls


def encoder(**kwargs):
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, **kwargs)
    return nn.TransformerEncoder(layer, 2)


X = torch.randn(2, 9, 32)
PADDING = torch.arange(9) >= torch.tensor([[9], [5]])


class Numbered(nn.Module):
    """Two modules with numbers of two digits in their names."""

    def __init__(self):
        super().__init__()
        self.attn10 = nn.MultiheadAttention(8, 2)
        self.attn11 = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.attn11(self.attn10(x, x, x)[0], x, x)[0]


def test_a_number_in_a_name_is_kept():
    """A number alone counts layers; one behind letters tells modules apart."""
    with torch.no_grad():
        report = fastattn.profile(Numbered(), torch.randn(5, 8))
        assert {m.call.path for m in report.calls} == {"attn10", "attn11"}


def test_training():
    report = fastattn.profile(encoder(), X, src_key_padding_mask=PADDING)
    (m,) = report.calls
    assert dict(m.call.where) == {"layers.0.self_attn": 1, "layers.1.self_attn": 1}
    assert m.call.path == "layers.*.self_attn" and m.call.q == m.call.k == (2, 2, 9, 16)
    assert (m.call.runs, m.ours_runs) == ("torch math", "fastattn cpu")  # because of dropout
    assert m.call.mask_structure.what == "right padding" and m.call.options == "dropout 0.1"
    assert set(m.seconds) == set(m.bytes) == {"now", "sdpa", "shown"}
    text = str(report)
    assert text.startswith("TransformerEncoder, forward and backward, 1 thread: ")
    assert "(2, 2, 1, 9) float32, but right padding: pass key_lengths=lengths" in text
    assert "fastattn.convert(model)" in text and "(measured; " in text


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_the_inference_path_of_a_layer(padded):
    """With padding, this path uses nested tensors."""
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
    assert m.call.mask_structure.what == "right padding" and m.ours_runs == "fastattn cpu"


class Mixed(nn.Module):
    """Several kinds of calls, a buffer that changes, and random numbers."""

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
    assert m.call.mask_structure.instead == "causal=True" and "shown" in m.seconds
    assert ("scaled_dot_product_attention", "causal, a scale", "") in found


def test_a_patched_model_is_reported_as_patched():
    with fastattn.sdpa():
        report = fastattn.profile(lambda: F.scaled_dot_product_attention(*[X[:, None]] * 3))
    assert report.calls[0].call.runs == "fastattn.patch()"


def test_functions_are_named():
    table = torch.zeros(4, 25)

    def model(x):
        bias = lambda s, b, h, i, j: s + table[h, i - j + 12]  # noqa: E731
        return fastattn.flex_attention(x, x, x, bias, mask_mod=lambda b, h, i, j: (i + j) % 3 != 1)

    (kind,) = fastattn.profile(model, torch.randn(1, 4, 12, 8)).calls
    assert "score_mod: a program of" in kind.call.options
    assert "mask_mod: a program of" in kind.call.options
    assert "captured" not in kind.call.options


def test_a_call_left_to_torch_has_a_reason(monkeypatch):
    wide = torch.randn(1, 1, 4, 1100)
    report = fastattn.profile(lambda: F.scaled_dot_product_attention(wide, wide, wide))
    assert report.calls[0].ours_runs == "torch: a head dim over 1024"
    monkeypatch.setattr(patching, "SMALL", 1 << 20)
    report = fastattn.profile(encoder(), X)
    assert "calling costs more" in report.calls[0].ours_runs


def test_no_attention():
    assert "No attention call was seen" in str(fastattn.profile(nn.Linear(32, 3), X))


def test_a_mask_that_is_small_already():
    """No arguments are advised in its place, unless key_lengths could skip keys."""
    q, columns = torch.randn(2, 1, 9, 8), PADDING.logical_not()[:, None, None]
    (m,) = fastattn.profile(lambda: F.scaled_dot_product_attention(q, q, q, columns.flip(-1))).calls
    assert (m.call.mask_structure.what, m.call.mask_structure.instead) == ("left padding", "")
    (m,) = fastattn.profile(lambda: F.scaled_dot_product_attention(q, q, q, columns)).calls
    assert m.call.mask_structure.instead == "key_lengths=lengths" and "dense" not in m.call.mask


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
    """State that profiling must not change; objects are compared by identity."""
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


def test_compiled_models_are_profiled_eagerly():
    model = torch.compile(encoder(), backend="eager")
    (m,) = fastattn.profile(model, X).calls
    assert m.call.count == 2


def test_a_model_of_transformers():
    """With padding on the left its mask is dense. A cache passed to the model does not grow."""
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
    assert m.call.mask_structure.what == "causal + left padding"
    assert cache.get_seq_length() == 0


# ---------------------------------------------------------------------------- what a call ran under


class Under(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.context = context

    def forward(self, q):
        with self.context():
            return F.scaled_dot_product_attention(q, q, q)


def test_kernels_that_the_model_chose():
    math = torch.nn.attention.SDPBackend.MATH
    model = Under(lambda: torch.nn.attention.sdpa_kernel(math))
    (m,) = fastattn.profile(model, X[:, None]).calls
    assert m.call.runs == "torch math"
    assert m.ours_runs == "torch: sdpa_kernel(...) or torch.backends.cuda ruled out flash or math"
    assert torch.backends.cuda.flash_sdp_enabled()


def test_autocast_that_the_model_chose():
    q = X[:, None].clone().requires_grad_()
    model = Under(lambda: torch.autocast("cpu", torch.bfloat16))
    (m,) = fastattn.profile(model, q).calls
    assert m.call.dtype == "bfloat16" and m.ours_runs == "fastattn cpu"
    with m.call.state.entered():
        assert m.call.run_original().dtype == m.call.ours().dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


# --------------------------------------------------------------------------------- weights returned


class Heads(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.heads = nn.MultiheadAttention(32, 2, **kwargs)

    def forward(self, x, **given):
        return self.heads(x, x, x, **given)[0]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_heads_with_weights(mode, batch_first):
    model = Heads(batch_first=batch_first, dropout=0.1).train(mode == "train")
    padding = PADDING if batch_first else torch.zeros(9, 2, dtype=torch.bool)
    report = fastattn.profile(model, X, key_padding_mask=padding)
    (m,) = report.calls
    B, L = (2, 9) if batch_first else (9, 2)
    assert m.call.function == "nn.MultiheadAttention with weights" and m.call.path == "heads"
    assert m.call.q == m.call.k == (B, 2, L, 16) and m.call.backward == (mode == "train")
    assert m.call.options == "dropout 0.1" * (mode == "train")
    assert m.ours_runs == "fastattn cpu" and {"now", "sdpa"} == set(m.seconds)
    assert m.call.mask_structure.what == ("right padding" if batch_first else "shows everything")
    assert "by fastattn.convert(model)" in str(report)
    assert "\n  converted fastattn cpu: " in str(report) and "patched" not in str(report)
    if mode == "eval":
        torch.testing.assert_close(
            m.call.run_original()[0], as_first(m.call.ours()[0], batch_first)
        )


def as_first(out, batch_first):
    return out.transpose(0, 1) if batch_first else out


def test_weights_and_both_masks():
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1)
    report = fastattn.profile(Heads(batch_first=True), X, attn_mask=mask, key_padding_mask=PADDING)
    assert report.calls[0].call.mask_structure.what == "causal + right padding"
    assert "(9, 9) float32, dense and (2, 9) float32, but causal" in str(report)


def test_without_weights_it_is_torchs_function():
    (m,) = fastattn.profile(Heads(), X, need_weights=False).calls
    assert m.call.function == "scaled_dot_product_attention" and m.call.of_multihead


class Derived(nn.MultiheadAttention):
    pass


def test_heads_that_convert_leaves():
    model = Derived(32, 2)
    (m,) = fastattn.profile(model, X, X, X).calls
    assert "a subclass of nn.MultiheadAttention" in m.ours_runs and "sdpa" not in m.seconds


def test_a_verdict_without_calls_recommends_a_conversion(monkeypatch):
    report = fastattn.profile(Heads(), X)
    report.calls.clear()
    assert "by fastattn.convert(model)" in report.verdict()
    opaque_to_dynamo = fastattn.profile(nn.Linear(32, 3), X).verdict()
    assert "set_fused_attn(True, experimental=True)" in opaque_to_dynamo
    assert "register()" in opaque_to_dynamo and 'attn_implementation="fastattn"' in opaque_to_dynamo
