"""`attn_implementation="owner/name"` in transformers: the kernel of the hub, loaded from a local
folder, gives the results of eager attention, or raises. Weights are random; nothing is downloaded.

A `kernels` of the version that transformers asks for loads it; without one, the stand-in."""

import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AttentionInterface, modeling_flash_attention_utils  # noqa: E402
from transformers.integrations import hub_kernels  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402

import fastattn  # noqa: E402

from ..support import hub  # noqa: E402
from ..support.marks import parametrize  # noqa: E402
from ..support.transformers_families import FAMILY, inputs, made, text  # noqa: E402
from .test_integration_transformers import (  # noqa: E402
    families,
    outputs_and_gradients,
    worst,
)
from .test_integration_transformers_batching import (  # noqa: E402
    HOOKED,
    NAMES,
    alone,
    manager,
    rested,  # noqa: F401  a fixture of every test here, too
    same,
    together,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own warnings
NAME, FLASH = "owner/attention", "owner/flash"  # transformers treats names with "flash" otherwise


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with a tiny model."""
    folder = tmp_path_factory.mktemp("checkpoint")
    made(FAMILY["Llama"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def kernel(checkpoint, tmp_path_factory):
    """The kernel, after transformers has loaded it, from a folder, with a model."""
    folder = tmp_path_factory.mktemp("hub") / "fastattn"
    hub.lay_out(folder)
    with pytest.MonkeyPatch.context() as patch:
        # What the kernel changes in transformers, to be restored.
        for interface in (AttentionInterface, AttentionMaskInterface):
            patch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
        for owner, name in (*HOOKED, (AttentionMaskInterface, "register")):
            patch.setattr(owner, name, getattr(owner, name))
        patch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
        patch.setenv("LOCAL_KERNELS", f"{NAME}={folder}:{FLASH}={folder}")
        if not hub_kernels.is_kernels_available():
            patch.setattr(hub_kernels, "is_kernels_available", lambda: True)
            patch.setattr(hub_kernels, "get_kernel", hub.get_kernel)
        load(checkpoint)
        yield hub_kernels.get_kernel(NAME, version=1)


def load(folder, implementation=NAME):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=implementation
    )


@pytest.fixture
def calls(monkeypatch, kernel):
    """The names of the kernel's functions, as often as transformers' layers reach them."""
    found = []
    for module in ("transformers_attention", "transformers_paged"):
        owner = sys.modules[f"{kernel.__name__}.integrations.{module}"]
        for name in {"attention", "attention_packed"} & vars(owner).keys():
            original = getattr(owner, name)

            def spy(*args, original=original, name=name, **kwargs):
                found.append(name)
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, name, spy)
    return found


@pytest.mark.parametrize("implementation", [NAME, FLASH])
def test_a_checkpoint_runs_the_kernel_of_a_local_folder(kernel, checkpoint, implementation):
    model, ids = load(checkpoint, implementation), text("none")[0]
    assert model.config._attn_implementation == implementation
    with torch.profiler.profile() as profile:
        logits = model(ids).logits
    events = [x.name for x in profile.events() if x.name.endswith("::attention")]
    assert events == [f"{kernel.__name__}::attention"] * model.config.num_hidden_layers
    expected = load(checkpoint, "eager")(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


FIRST = ["Llama", "Gemma2", "GptOss", "Bert", "T5"]
OTHERS = [x.values[0].name for x in families("text", "encoded", "pair", "pixels", "waves")]


@parametrize("name", dict.fromkeys(FIRST + OTHERS), fast=len(FIRST))
def test_logits_and_gradients(name, calls):
    family = FAMILY[name]
    for padding in ("none", "left", "right") if family.given in ("text", "encoded") else ("none",):
        model, given = made(family), inputs(family, padding)
        calls.clear()
        y, grads = outputs_and_gradients(model, given, NAME)
        ours = len(calls)
        expected, exact = outputs_and_gradients(model, given, "eager")
        assert 0 < ours == len(calls)
        if family.given in ("text", "encoded"):  # outputs at padding are meaningless
            real = given["attention_mask"].bool()
            y, expected = y[real], expected[real]
        assert worst(y, expected) < 1e-5, padding
        assert grads.keys() == exact.keys()
        for x, gradient in exact.items():
            assert worst(grads[x], gradient, 1e-3) < 1e-4, (padding, x)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@parametrize("name", ["Llama", "Gemma2", "GptOss", "Mistral"], fast=2)
def test_tokens_after_padding_on_the_left(name, cache, calls):
    model, (ids, mask) = made(FAMILY[name]), text("left")
    given = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    given |= {} if cache == "dynamic" else dict(cache_implementation=cache, disable_compile=True)
    found = []
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(ids, attention_mask=mask, **given))
    assert torch.equal(*found) and len(calls) == 6 * model.config.num_hidden_layers


@parametrize(
    "name, implementation",
    [("Llama", NAME), ("Llama", FLASH), ("Gemma2", FLASH), *((x, NAME) for x in NAMES[1:])],
    fast=1,
)
def test_continuous_batching(name, implementation, calls):
    """Each prompt's tokens, and their probabilities, are as alone, and as sdpa's."""
    model = made(FAMILY[name])
    expected = alone(model)
    found = together(model, implementation, max_batch_tokens=14, num_blocks=14)
    assert same(found, expected) and set(calls) == {"attention_packed"}
    assert model.config._attn_implementation == implementation
    if (name, implementation) == ("Llama", FLASH):  # sdpa knows no softcap, and no sinks
        assert same(together(model, "sdpa", max_batch_tokens=14, num_blocks=14), expected)


def test_the_manager_does_not_replace_the_kernel(kernel):
    model = made(FAMILY["Llama"])
    model.set_attn_implementation(NAME)
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        assert manager(model, auto_switch_to_flash=True).max_batch_tokens
        expected = "paged|eager" if implementation == "eager" else implementation
        assert model.config._attn_implementation == expected


@pytest.mark.slow
def test_compiled_in_one_graph(kernel):
    model, (ids, mask) = made(FAMILY["Llama"]).eval(), text("none")
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation(NAME)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, attention_mask=mask).logits, expected)


# ------------------------------------------------------------------------------- what is refused


def test_a_model_that_computes_its_own_attention_raises(kernel):
    """It would add fastattn's mask, which is no tensor, to its scores."""
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation=NAME)
    with pytest.raises(TypeError, match="expected it in fastattn's attention function alone"):
        model(text("none")[0])


@pytest.mark.parametrize(
    "model, name, why",
    [
        ("bridgetower", "BridgeTowerSelfAttention", "its eager attention is not causal"),
        ("deepseek_v4", "DeepseekV4Attention", "picks keys, or has sinks"),
    ],
)
def test_a_layer_of_a_model_with_another_attention_raises(model, name, why, kernel):
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    kind = getattr(modeling, name)
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=f"for a model with {name}.*{why}"):
        kernel.flash_attn_forward(kind.__new__(kind), q, q, q, None)


def test_an_unknown_argument_raises(kernel):
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(TypeError, match=r"^tilt: got this argument of attention"):
        kernel.flash_attn_forward(torch.nn.Identity(), q, q, q, None, tilt=0.5)


def test_another_version_of_transformers_raises(monkeypatch):
    """Its models may do what these do not."""
    monkeypatch.setattr("transformers.__version__", "5.99.0")
    monkeypatch.delitem(sys.modules, "fastattn.integrations.transformers_hub", raising=False)
    register = AttentionMaskInterface.register
    with pytest.raises(ImportError, match=r"^transformers: got 5\.99\.0, expected 5\.23 or"):
        hasattr(fastattn, "flash_attn_forward")
    assert AttentionMaskInterface.register == register


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_two_dimensions_are_padding(dtype, kernel):
    """Models pass it to kernels with "flash" in their name; here as many rows as items."""
    q, k, v = torch.randn(3, 4, 2, 4, 8)
    seen = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 1, 0]]).to(dtype)
    out, _ = kernel.flash_attn_forward(torch.nn.Identity(), q, k, v, seen)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None, None].bool()
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_the_names_that_transformers_looks_for_first_are_not_there(kernel):
    """For them it would call the kernel otherwise."""
    assert not hasattr(kernel, "flash_attn_varlen_func")
    assert not hasattr(kernel, "sparse_atten_func")
    assert hub_kernels.get_attn_kernel_version(NAME) == hub.script().VERSION
