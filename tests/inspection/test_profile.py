"""profile: it reports every attention call of a model and its masks, and changes nothing."""

import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import json
import threading

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

import fastattn
from fastattn import api
from fastattn.dropin import patching
from fastattn.inspection.report import ModelTimes, Profile
from tests.support.transformers_families import FAMILY, made, text

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


@pytest.mark.slow
def test_a_number_in_a_name_is_kept():
    """A number alone counts layers; one behind letters tells modules apart."""
    with torch.no_grad():
        report = fastattn.profile(Numbered(), torch.randn(5, 8))
        assert {m.call.path for m in report.calls} == {"attn10", "attn11"}


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_inference_path_of_heads():
    heads = nn.MultiheadAttention(32, 2, batch_first=True).eval()
    with torch.no_grad():
        report = fastattn.profile(heads, X, X, X, key_padding_mask=PADDING, need_weights=False)
    (m,) = report.calls
    assert m.call.function.startswith("nn.MultiheadAttention") and m.call.path == ""
    assert m.call.mask_structure.what == "right padding" and m.ours_runs == "fastattn cpu"
    assert "dense" not in m.call.mask


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_functions_are_named():
    table = torch.zeros(4, 25)

    def model(x):
        bias = lambda s, b, h, i, j: s + table[h, i - j + 12]  # noqa: E731
        return fastattn.flex_attention(x, x, x, bias, mask_mod=lambda b, h, i, j: (i + j) % 3 != 1)

    (kind,) = fastattn.profile(model, torch.randn(1, 4, 12, 8)).calls
    assert "score_mod: a program of" in kind.call.options
    assert "mask_mod: a program of" in kind.call.options
    assert "captured" not in kind.call.options


@pytest.mark.slow
def test_a_call_left_to_torch_has_a_reason(monkeypatch):
    wide = torch.randn(1, 1, 4, 1100)
    report = fastattn.profile(lambda: F.scaled_dot_product_attention(wide, wide, wide))
    assert report.calls[0].ours_runs == "torch: a head dim over 1024"
    monkeypatch.setattr(patching, "SMALL", 1 << 20)
    report = fastattn.profile(encoder(), X)
    assert "calling costs more" in report.calls[0].ours_runs


@pytest.mark.slow
def test_no_attention():
    assert "No attention call was seen" in str(fastattn.profile(nn.Linear(32, 3), X))


@pytest.mark.slow
def test_a_mask_that_is_small_already():
    """No arguments are advised in its place, unless key_lengths could skip keys."""
    q, columns = torch.randn(2, 1, 9, 8), PADDING.logical_not()[:, None, None]
    (m,) = fastattn.profile(lambda: F.scaled_dot_product_attention(q, q, q, columns.flip(-1))).calls
    assert (m.call.mask_structure.what, m.call.mask_structure.instead) == ("left padding", "")
    (m,) = fastattn.profile(lambda: F.scaled_dot_product_attention(q, q, q, columns)).calls
    assert m.call.mask_structure.instead == "key_lengths=lengths" and "dense" not in m.call.mask


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_compiled_models_are_profiled_eagerly():
    model = torch.compile(encoder(), backend="eager")
    (m,) = fastattn.profile(model, X).calls
    assert m.call.count == 2


@pytest.mark.slow
def test_a_model_of_transformers():
    """With padding on the left its mask is dense. A cache passed to the model does not grow."""
    transformers = pytest.importorskip("transformers")
    model, (ids, mask) = made(FAMILY["Llama"]), text("left")
    model.set_attn_implementation("sdpa")
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        report = fastattn.profile(model, ids, attention_mask=mask, past_key_values=cache)
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


@pytest.mark.slow
def test_kernels_that_the_model_chose():
    math = torch.nn.attention.SDPBackend.MATH
    model = Under(lambda: torch.nn.attention.sdpa_kernel(math))
    (m,) = fastattn.profile(model, X[:, None]).calls
    assert m.call.runs == "torch math"
    assert m.ours_runs == "torch: sdpa_kernel(...) or torch.backends.cuda ruled out flash or math"
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.slow
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


@pytest.mark.slow
def test_weights_and_both_masks():
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1)
    report = fastattn.profile(Heads(batch_first=True), X, attn_mask=mask, key_padding_mask=PADDING)
    assert report.calls[0].call.mask_structure.what == "causal + right padding"
    assert "(9, 9) float32, dense and (2, 9) float32, but causal" in str(report)


@pytest.mark.slow
def test_without_weights_it_is_torchs_function():
    (m,) = fastattn.profile(Heads(), X, need_weights=False).calls
    assert m.call.function == "scaled_dot_product_attention" and m.call.of_multihead


class Derived(nn.MultiheadAttention):
    pass


@pytest.mark.slow
def test_heads_that_convert_leaves():
    model = Derived(32, 2)
    (m,) = fastattn.profile(model, X, X, X).calls
    assert "a subclass of nn.MultiheadAttention" in m.ours_runs and "sdpa" not in m.seconds


@pytest.mark.slow
def test_a_verdict_without_calls_recommends_a_conversion(monkeypatch):
    report = fastattn.profile(Heads(), X)
    report.calls.clear()
    assert "by fastattn.convert(model)" in report.verdict()
    opaque_to_dynamo = fastattn.profile(nn.Linear(32, 3), X).verdict()
    assert "set_fused_attn(True, experimental=True)" in opaque_to_dynamo
    assert "register()" in opaque_to_dynamo and 'attn_implementation="fastattn"' in opaque_to_dynamo


# ------------------------------------------------------------------------------- outputs of models


@dataclasses.dataclass
class Given:
    hidden: object
    backwards: int = 0


class Wrapped(nn.Module):
    """A model that returns a dataclass and counts backward passes."""

    def __init__(self, detached=False):
        super().__init__()
        self.linear, self.detached, self.backwards = nn.Linear(32, 32), detached, 0

    def forward(self, x):
        q = self.linear(x)[:, None]
        out = F.scaled_dot_product_attention(q, q, q)
        out.register_hook(self.count)
        return Given([{"out": out.detach() if self.detached else out}])

    def count(self, _):
        self.backwards += 1


@pytest.mark.slow
def test_a_model_that_gives_a_dataclass():
    model = Wrapped()
    report = fastattn.profile(model, X)
    assert report.step == "forward and backward" and model.backwards >= 7
    assert report.calls[0].call.backward
    model = Wrapped(detached=True)
    report = fastattn.profile(model, X)
    assert report.step == "forward" and not report.calls[0].call.backward
    assert report.attention <= report.now


@pytest.mark.slow
def test_checkpoints_are_not_counted_twice():
    """A checkpoint repeats calls in backward; the report counts the repeated ones separately."""

    class Checkpointed(Wrapped):
        def forward(self, x):
            run = torch.utils.checkpoint.checkpoint
            q = self.linear(x)[:, None]
            return run(attend, q, use_reentrant=False)

    def attend(q):
        return F.scaled_dot_product_attention(q, q, q).exp()

    report = fastattn.profile(Checkpointed(), X)
    assert sorted((m.call.backward, m.call.count) for m in report.calls) == [(False, 1), (True, 1)]
    assert str(report).count("without backward") == 1


# ------------------------------------------------------------------------------ models of all sorts


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("layers", [2, 1])
def test_the_inference_path(layers, padded, causal):
    """An encoder with padding and no mask uses nested tensors."""
    model = encoder().eval() if layers > 1 else encoder().eval().layers[0]
    given = dict(src_key_padding_mask=PADDING) if padded else {}
    nested = padded and not causal and layers > 1
    mask = nn.Transformer.generate_square_subsequent_mask(9).isinf() if causal else None
    with torch.no_grad():
        (m,) = fastattn.profile(model, X, mask, **given).calls
        assert m.call.function.startswith("nn.TransformerEncoderLayer")
        assert m.call.count == layers and m.call.q == (2, 2, -1 if nested else 9, 16)
        assert m.ours_runs == "fastattn cpu" and {"now", "sdpa"} == set(m.seconds)
        if causal:
            assert m.call.mask_structure.what == "causal" + " + right padding" * padded
        if not nested:
            torch.testing.assert_close(m.call.run_original(), m.call.ours())


def jagged():
    return torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 5)], layout=torch.jagged)


@pytest.mark.slow
def test_jagged_calls():
    q = jagged().transpose(1, 2)
    (m,) = fastattn.profile(lambda: F.scaled_dot_product_attention(q, q, q)).calls
    assert m.call.q == (2, 2, -1, 8) and m.ours_runs == "fastattn cpu"


@pytest.mark.slow
@pytest.mark.parametrize("rows", [9, 4])
def test_causal_biases(rows):
    """torch's CausalBias recognises only F's original function, by identity."""
    from torch.nn.attention.bias import causal_lower_right

    q, k = torch.randn(1, 2, rows, 8), torch.randn(1, 2, 9, 8)
    bias, outs = causal_lower_right(rows, 9), []
    wanted = F.scaled_dot_product_attention(q, k, k, bias)
    report = fastattn.profile(lambda: outs.append(F.scaled_dot_product_attention(q, k, k, bias)))
    for out in outs:
        torch.testing.assert_close(out, wanted)
    (m,) = report.calls
    torch.testing.assert_close(m.call.run_original(), wanted)
    assert (m.call.mask, m.ours_runs) == ("CausalBias", "fastattn cpu") and "now" in m.seconds


@pytest.mark.slow
@pytest.mark.parametrize("build", [Heads, encoder], ids=["heads", "layer"])
def test_a_method_that_runs_no_hooks(build):
    model = build(batch_first=True).heads if build is Heads else build().layers[0]
    inputs = [X] * (3 if build is Heads else 1)
    with torch.no_grad():
        report = fastattn.profile(model.eval().forward, *inputs)
    (m,) = report.calls
    assert m.call.path == "" and m.ours_runs == "fastattn cpu"


@pytest.mark.slow
def test_a_method_is_looked_up_in_a_converted_class():
    model, ran = nn.MultiheadAttention(32, 2), []
    forward = fastattn.MultiheadAttention.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fastattn.MultiheadAttention,
            "forward",
            lambda self, *args, **kw: (ran.append(type(self)), forward(self, *args, **kw))[1],
        )
        report = fastattn.profile(model.forward, X, X, X)
        assert len(ran) >= len(report.rounds)


@pytest.mark.slow
def test_scripted_and_traced():
    traced = torch.jit.trace(Buffered(torch.ones(2)), X[:, None])
    for model, x in ((torch.jit.script(nn.BatchNorm1d(9)), X), (traced, X[:, None])):
        before = [y.clone() for y in model.buffers()]
        assert "scripted" in str(fastattn.profile(model, x))
        assert all(map(torch.equal, before, model.buffers()))


class Buffered(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.register_buffer("held", held)

    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q)


HELD = {
    "expanded": lambda: torch.ones(1).expand(4),
    "nan": lambda: torch.full((2,), torch.nan),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "jagged": jagged,
    "inference": torch.inference_mode()(lambda: torch.ones(2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_buffers_of_every_sort(name):
    assert fastattn.profile(Buffered(HELD[name]()), X[:, None]).calls[0].call.count == 1


# ------------------------------------------------------------------------------------ side effects


@pytest.mark.slow
def test_a_graph_in_flight():
    model = Mixed().eval()
    x = X.clone().requires_grad_()
    out = model(x)["out"].sum()
    fastattn.profile(model, X)
    out.backward()
    assert x.grad is not None


@pytest.mark.slow
def test_inputs_changed_in_place():
    """Each run starts from the original values of the inputs."""
    seen, x, same = [], X.clone(), X.clone()

    def model(x, held):
        seen.append((x.mean().item(), held["y"] is x))
        return F.scaled_dot_product_attention(*[x.add_(1)[:, None]] * 3)

    fastattn.profile(model, x, {"y": x})
    assert len(seen) > 4 and set(seen) == {(X.mean().item(), True)}
    assert torch.equal(x, X)
    with pytest.raises(KeyError):
        fastattn.profile(lambda x: {}[x.mul_(2)], same)
    assert torch.equal(same, X)


def test_a_lazy_module():
    with pytest.raises(ValueError, match=r"lazy module .weight., expected one that has run once"):
        fastattn.profile(nn.LazyLinear(3), X)


@pytest.mark.slow
def test_calls_of_threads():
    class Threaded(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Under(contextlib.nullcontext) for _ in range(4))

        def forward(self, q):
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                barrier = threading.Barrier(4)
                parts = [lambda part=part: (barrier.wait(), part(q)) for part in self.parts]
                return [x.result()[1] for x in [pool.submit(part) for part in parts]]

    (m,) = fastattn.profile(Threaded(), torch.randn(2, 4, 256, 32)).calls
    assert dict(m.call.where) == {f"parts.{i}": 1 for i in range(4)}


@pytest.mark.slow
def test_growing_keys_of_grouped_heads():
    """Query heads may be stored as rows, so a token has several. Chunks get separate lines."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Cross() for _ in range(2))

        def forward(self, q):
            for n in range(5, 10):
                for layer in self.layers:
                    layer(q, torch.randn(1, 2, n, 8))
            for n in (20, 30):
                self.layers[0](q, torch.randn(2, 2, n, 8), torch.ones(3, n, dtype=torch.bool))

    class Cross(nn.Module):
        def forward(self, q, k, mask=None):
            q = q if mask is None else q.expand(2, -1, -1, -1)
            return F.scaled_dot_product_attention(q, k, k, mask)

    report = fastattn.profile(Layers(), torch.randn(1, 2, 3, 8))
    assert sorted(m.call.count for m in report.calls) == [1, 1, 10]
    assert "k (1, 2, 5 to 9, 8)" in str(report)


@pytest.mark.slow
def test_few_rounds_must_agree():
    def verdict(*gains):
        rounds = [ModelTimes(x, 1.0, True) for x in gains]
        return Profile("M", False, "forward", 1, rounds, []).verdict()

    assert verdict(2.0, 2.0, 2.0).startswith("Worth it")
    assert verdict(2.0, 2.0, 0.9).startswith("No difference that could be measured")
    assert verdict(0.5, 0.5, 1.1).startswith("No difference that could be measured")
    assert verdict(*[2.0] * 5, 0.9).startswith("Worth it")
    assert 3 <= len(fastattn.profile(nn.Linear(32, 3), X).rounds) <= 40
