"""profile reports models of all sorts: their outputs, conversions, side effects and threads."""

import concurrent.futures
import contextlib
import dataclasses
import threading

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

import fastattn
from fastattn.inspection.report import ModelTimes, Profile
from tests.inspection.test_profile import PADDING, Heads, Mixed, Under, X, encoder

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


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


def test_a_model_that_gives_a_dataclass():
    model = Wrapped()
    report = fastattn.profile(model, X)
    assert report.step == "forward and backward" and model.backwards >= 7
    assert report.calls[0].call.backward
    model = Wrapped(detached=True)
    report = fastattn.profile(model, X)
    assert report.step == "forward" and not report.calls[0].call.backward
    assert report.attention <= report.now


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


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("whole", [True, False], ids=["encoder", "layer"])
def test_the_inference_path_with_a_mask(padded, whole):
    model = encoder().eval() if whole else encoder().eval().layers[0]
    given = {"src_key_padding_mask": PADDING} if padded else {}
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    with torch.no_grad():
        (m,) = fastattn.profile(model, X, mask.isinf(), **given).calls
        assert m.call.mask_structure.what == "causal" + " + right padding" * padded
        assert m.ours_runs == "fastattn cpu"
        torch.testing.assert_close(m.call.run_original(), m.call.ours())


def jagged():
    return torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 5)], layout=torch.jagged)


def test_jagged_calls():
    q = jagged().transpose(1, 2)
    (m,) = fastattn.profile(lambda: F.scaled_dot_product_attention(q, q, q)).calls
    assert m.call.q == (2, 2, -1, 8) and m.ours_runs == "fastattn cpu"


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


@pytest.mark.parametrize("build", [Heads, encoder], ids=["heads", "layer"])
def test_a_method_that_runs_no_hooks(build):
    model = build(batch_first=True).heads if build is Heads else build().layers[0]
    inputs = [X] * (3 if build is Heads else 1)
    with torch.no_grad():
        report = fastattn.profile(model.eval().forward, *inputs)
    (m,) = report.calls
    assert m.call.path == "" and m.ours_runs == "fastattn cpu"


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


@pytest.mark.parametrize("name", HELD)
def test_buffers_of_every_sort(name):
    assert fastattn.profile(Buffered(HELD[name]()), X[:, None]).calls[0].call.count == 1


# ------------------------------------------------------------------------------------ side effects


def test_a_graph_in_flight():
    model = Mixed().eval()
    x = X.clone().requires_grad_()
    out = model(x)["out"].sum()
    fastattn.profile(model, X)
    out.backward()
    assert x.grad is not None


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


def test_padding_masks_are_not_dense():
    """A mask of keys alone, one per item, is not reported as dense."""
    heads = nn.MultiheadAttention(32, 2, batch_first=True).eval()
    with torch.no_grad():
        report = fastattn.profile(heads, X, X, X, key_padding_mask=PADDING)
    assert "dense" not in report.calls[0].call.mask and "converted fastattn" in str(report)


def test_few_rounds_must_agree():
    def verdict(*gains):
        rounds = [ModelTimes(x, 1.0, True) for x in gains]
        return Profile("M", False, "forward", 1, rounds, []).verdict()

    assert verdict(2.0, 2.0, 2.0).startswith("Worth it")
    assert verdict(2.0, 2.0, 0.9).startswith("No difference that could be measured")
    assert verdict(0.5, 0.5, 1.1).startswith("No difference that could be measured")
    assert verdict(*[2.0] * 5, 0.9).startswith("Worth it")
    assert 3 <= len(fastattn.profile(nn.Linear(32, 3), X).rounds) <= 40
