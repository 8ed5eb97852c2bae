"""Models of other libraries on fastattn, by the lines in fastattn/integrations/README.md.

Weights are random; nothing is downloaded. Outputs and gradients are those of the stock model, every
attention call reaches fastattn, and afterwards the stock behaviour is restored.
"""

import importlib
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import fastattn
from bench.peers import optional_deps
from fastattn import api
from fastattn.integrations import diffusers as ours_for_diffusers
from tests.support.marks import parametrize

pytestmark = [
    pytest.mark.usefixtures("nothing_is_small"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
    ),  # from the libraries
]


@pytest.fixture
def calls(monkeypatch):
    """One entry for each call that reaches our kernels. All take the general path, to be seen."""
    found, call = [], api.call
    monkeypatch.setattr("fastattn.dispatch.fast_path.attend", lambda *args: None)

    def spy(*args):
        found.append(args)
        return call(*args)

    for where in ("fastattn.api.call", "fastattn.dropin.sdpa.call"):
        monkeypatch.setattr(where, spy)
    return found


def library(name):
    """Import a library, or skip the test."""
    try:
        return optional_deps.library(name)
    except ModuleNotFoundError as missing:
        pytest.skip(f"{name} is not installed (`make test` installs it): {missing}")


def results(model, call):
    """The output of `call`, and every gradient."""
    torch.manual_seed(0)
    out = call(model)
    out = out if isinstance(out, torch.Tensor) else out[0]
    names, parameters = zip(*model.named_parameters())
    loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {"out": out.detach(), **{n: g for n, g in zip(names, grads) if g is not None}}


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        bound = 2e-5 * x.abs().max().item() + 1e-7
        titled = partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=bound, msg=titled)


def spread_out(model):
    """Random weights large enough that attention matters; zeros at the start would hide it."""
    torch.manual_seed(1)
    with torch.no_grad():
        for x in model.parameters():
            x.normal_(0, 0.3 if x.ndim > 1 else 1)
    return model


def image(size, seed=2):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------- patching


def timm_vit():
    model = library("timm").create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5, dynamic_img_size=True
    )
    return model, lambda m: m(image(32)), 2


def timm_beit():
    """Attention with a learned bias."""
    model = library("timm").create_model(
        "beit_base_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=5
    )
    return model, lambda m: m(image(32)), 2


def timm_swin():
    """Windows with bias and mask; fused only with timm's experimental switch."""
    layers = importlib.import_module(library("timm").__name__ + ".layers")
    layers.set_fused_attn(True, experimental=True)
    model = sys.modules["timm"].create_model(
        "swin_tiny_patch4_window7_224", img_size=56, depths=(2,), num_heads=(2,), embed_dim=16
    )
    layers.set_fused_attn(True)
    return model, lambda m: m(image(56)), 2


def x_transformers_decoder():
    """Causal attention with rotary embeddings and grouped heads."""
    x = library("x_transformers")
    layers = x.Decoder(
        dim=32, depth=2, heads=4, attn_kv_heads=2, rotary_pos_emb=True, attn_flash=True
    )
    model = x.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)
    return model, lambda m: m(torch.arange(40).view(2, 20)), 2


def x_transformers_padded():
    x = library("x_transformers")
    layers = x.Encoder(dim=32, depth=2, heads=2, attn_flash=True)
    model = x.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)
    keep = torch.arange(20) < torch.tensor([[20], [13]])
    return model, lambda m: m(torch.arange(40).view(2, 20), mask=keep) * keep[..., None], 2


def diffusers_unet():
    """A model with attention processors that ignore diffusers' backend setting."""
    model = library("diffusers").UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=8,
    )
    x, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12)
    return model, lambda m: m(x, 3, text, return_dict=False), 8


PATCHED = [
    timm_vit,
    timm_beit,
    timm_swin,
    x_transformers_decoder,
    x_transformers_padded,
    diffusers_unet,
]


@parametrize("build", PATCHED, ids=lambda x: x.__name__, fast=1)
def test_patched(build, calls):
    before = F.scaled_dot_product_attention
    model, call, attentions = build()
    spread_out(model)
    wanted = results(model, call)
    assert not calls
    with fastattn.sdpa():
        found = results(model, call)
    assert len(calls) == attentions
    same(found, wanted)
    assert F.scaled_dot_product_attention is before


# --------------------------------------------------------------------------------------- converting


def torchvision_vit():
    library("torchvision")
    models = importlib.import_module("torchvision.models")
    model = models.VisionTransformer(32, 16, 2, 2, 32, 64, num_classes=5)
    return model, lambda m: m(image(32)), 2


def open_clip_towers():
    library("open_clip")
    clip = importlib.import_module("open_clip.model")
    vision = clip.CLIPVisionCfg(layers=2, width=32, head_width=16, patch_size=16, image_size=32)
    text = clip.CLIPTextCfg(context_length=9, vocab_size=50, width=32, heads=2, layers=2)
    model, tokens = clip.CLIP(16, vision, text), torch.arange(18).view(2, 9)
    return model, lambda m: torch.cat(m(image(32), tokens)[:2]), 4


@pytest.mark.parametrize("build", [torchvision_vit, open_clip_towers], ids=lambda x: x.__name__)
def test_converted(build, calls):
    """Also in eval mode, where torch's module does not call F.scaled_dot_product_attention."""
    model, call, attentions = build()
    spread_out(model)
    classes = [type(x) for x in model.modules()]
    wanted = results(model, call)
    conversion = fastattn.convert(model)
    assert len(conversion.swapped) == attentions and not conversion.left
    same(results(model, call), wanted)
    assert len(calls) == attentions
    with torch.no_grad():
        same({"out": call(model.eval())}, {"out": wanted["out"]})
    assert len(calls) == 2 * attentions
    fastattn.revert(model)
    assert [type(x) for x in model.modules()] == classes


# ---------------------------------------------------------------------------------------- diffusers


def flux():
    model = library("diffusers").FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )
    given = dict(
        hidden_states=torch.randn(2, 6, 4),
        encoder_hidden_states=torch.randn(2, 5, 8),
        pooled_projections=torch.randn(2, 8),
        timestep=torch.tensor([0.5, 1.0]),
        img_ids=torch.randn(6, 3),
        txt_ids=torch.zeros(5, 3),
        return_dict=False,
    )
    return model, lambda m: m(**given), 2


def qwen_image():
    """A model with padded text."""
    model = library("diffusers").QwenImageTransformer2DModel(
        in_channels=4,
        out_channels=1,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        axes_dims_rope=(4, 4, 8),
    )
    given = dict(
        hidden_states=torch.randn(2, 4, 4),
        encoder_hidden_states=torch.randn(2, 5, 8),
        encoder_hidden_states_mask=torch.arange(5) < torch.tensor([[5], [3]]),
        timestep=torch.tensor([0.5, 1.0]),
        img_shapes=[(1, 2, 2)] * 2,
        return_dict=False,
    )
    return model, lambda m: m(**given), 2


@pytest.fixture
def dispatch():
    library("diffusers")
    found = importlib.import_module("diffusers.models.attention_dispatch")
    names, registry = found.AttentionBackendName, found._AttentionBackendRegistry

    def state():
        tables = registry._backends, registry._constraints, registry._supported_arg_names
        members = list(names), dict(names.__members__)
        return *members, *map(dict, tables), registry._active_backend

    before = state()
    yield found
    assert state() == before
    assert not hasattr(names, "FASTATTN")


@parametrize("build", [flux, qwen_image], ids=lambda x: x.__name__, fast=1)
def test_a_backend_of_diffusers(build, calls, dispatch):
    model, call, attentions = build()
    spread_out(model)
    wanted = results(model, call)
    ours_for_diffusers.register()
    ours_for_diffusers.register()
    model.set_attention_backend("fastattn")
    assert dispatch.AttentionBackendName("fastattn") is dispatch.AttentionBackendName.FASTATTN
    same(results(model, call), wanted)
    assert len(calls) == attentions
    ours_for_diffusers.unregister()
    ours_for_diffusers.unregister()
    with pytest.raises(ValueError, match="must be one of"):
        model.set_attention_backend("fastattn")
    model.reset_attention_backend()
    same(results(model, call), wanted)
    assert len(calls) == attentions


def test_flash_of_diffusers_has_no_masks(calls, dispatch):
    """It is flash-attn's function, which has none. "fastattn" takes them."""
    q, k, v = torch.randn(3, 2, 9, 3, 8).unbind()
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    flash = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName.FLASH]
    with pytest.raises(ValueError, match="`attn_mask` is not supported"):
        flash(q, k, v, attn_mask=mask)
    with dispatch.attention_backend("native"):
        wanted = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask)
    ours_for_diffusers.register()
    with dispatch.attention_backend("fastattn"):
        found = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask)
    ours_for_diffusers.unregister()
    torch.testing.assert_close(found, wanted)
    assert len(calls) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_diffusers(ranks, calls, dispatch):
    """Several ranks are refused: attention to part of the sequence would be silently wrong."""
    ours_for_diffusers.register()
    x = torch.randn(1, 6, 2, 8)
    config = SimpleNamespace(context_parallel_config=SimpleNamespace(_world_size=ranks))
    try:
        with dispatch.attention_backend("fastattn"):
            if ranks == 1:
                dispatch.dispatch_attention_fn(x, x, x, parallel_config=config)
                assert len(calls) == 1
            else:
                with pytest.raises(NotImplementedError, match=r"^parallel_config: got 2 ranks"):
                    dispatch.dispatch_attention_fn(x, x, x, parallel_config=config)
    finally:
        ours_for_diffusers.unregister()


@pytest.mark.slow
def test_the_environment_of_diffusers():
    """diffusers reads DIFFUSERS_ATTN_BACKEND on import, before `register` can be called."""
    library("diffusers")
    code = "from fastattn.integrations import diffusers; diffusers.register()"
    environment = os.environ | {"DIFFUSERS_ATTN_BACKEND": "fastattn"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (
        "ValueError: DIFFUSERS_ATTN_BACKEND: got 'fastattn', which diffusers reads" in done.stderr
    )


def test_a_profile_of_timm():
    model, _, attentions = timm_vit()
    with torch.no_grad():
        (found,) = fastattn.profile(model.eval(), image(32)).calls
    assert found.call.path == "blocks.*.attn" and found.call.count == attentions
