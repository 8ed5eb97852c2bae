"""What is not recognised of transformers raises: another version, a function of another form, an
unknown argument, a cache that is updated elsewhere."""

import copy
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import masking_utils as masks  # noqa: E402
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as stock  # noqa: E402

import fastattn.integrations.transformers as ours  # noqa: E402
from fastattn.flash_attn import transformers_checks  # noqa: E402
from fastattn.integrations import (  # noqa: E402
    transformers_attention,
    transformers_forms,
    transformers_masks,
)
from fastattn.integrations.transformers_masks import make_mask  # noqa: E402

from .test_integration_transformers_batching import MODULE, Given, offsets  # noqa: E402
from .test_transformers_selected import INDEXER, LATENT, SIZES  # noqa: E402

# ------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("version", ("5.22.2", "5.25.0", "5.25.0.dev0", "5.2.3", "6.23.0"))
def test_another_minor_version_is_refused(version, monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    mapping = dict(transformers.AttentionInterface._global_mapping)
    with pytest.raises(ImportError, match=f"^transformers: got {version}, expected 5.23 or 5.24"):
        ours.register()
    assert mapping == transformers.AttentionInterface._global_mapping


@pytest.mark.parametrize("version", ("5.23.0", "5.24.0", "5.24.7"))
def test_the_tested_minor_versions_are_accepted(version):
    transformers_forms.check_version(version)


# --------------------------------------------------------------------------- functions of models

EXPANDS = "key_states, value_states = self.expand_kv(k_pass, k_rot)"
SPLIT = "torch.split(kv_nope, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)"
# What the class does otherwise: the text of its module before, after, and the error.
CONSTRUCTION = "got 'fastattn' for a model with {}.*expected the arguments and the source of"
CHANGES = {
    "indexer, argument new": (
        "position_ids: torch.Tensor,  # Kept for BC",
        "position_ids: torch.Tensor, temperature: float = 1.0,",
        CONSTRUCTION.format("DeepseekV32Indexer.forward"),
    ),
    "indexer, cache not given": (
        r"(\w+)=\1,\n        \)  # \[B, S, topk\]",
        r"\1=None)",
        "^cache: got 1 keys of the indexer, expected 25, as its mask has",
    ),
    "expand_kv, values first": (
        re.escape("k_nope, value_states = " + SPLIT),
        "value_states, k_nope = torch.split("
        "kv_nope, [self.v_head_dim, self.qk_nope_head_dim], dim=-1)",
        CONSTRUCTION.format("DeepseekV32Attention.expand_kv"),
    ),
    "attention, keys changed after expand_kv": (
        re.escape(EXPANDS),
        EXPANDS + "\n        key_states = key_states * 2",
        CONSTRUCTION.format("DeepseekV32Attention.forward"),
    ),
    "attention, argument renamed": (
        "indices=sparse_indices",
        "chosen=sparse_indices",
        "picks keys, or has sinks, that it does not pass",
    ),
    "attention, argument new": (
        "indices=sparse_indices",
        "indices=sparse_indices, temperature=2.0",
        "^temperature: got this argument of attention, which fastattn does not know",
    ),
    "nothing": ("", "", None),
}


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """Import the module of DeepSeek-V3.2 with a change of its text."""

    def load(before, after):
        text = Path(stock.__file__).read_text()
        found = re.sub(before, after, text) if before else text
        assert (found != text) == bool(before)
        path = tmp_path / "changed.py"
        path.write_text(found)
        name = f"{stock.__package__}.changed"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_model_raises(what, changed, registered):
    """Otherwise its tokens would differ from those of eager attention."""
    before, after, error = CHANGES[what]
    kind = changed(before, after).DeepseekV32ForCausalLM
    config = transformers.DeepseekV32Config(**SIZES | LATENT | INDEXER)
    ids = torch.randint(3, 97, (1, 24), generator=torch.Generator().manual_seed(0))

    def tokens(name):
        torch.manual_seed(0)
        model = kind._from_config(copy.deepcopy(config), attn_implementation=name).eval()
        return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)

    if error is None:
        assert torch.equal(tokens("fastattn"), tokens("eager"))
        return
    with pytest.raises((ValueError, TypeError), match=error):
        tokens("fastattn")


def test_a_form_is_that_of_names_and_statements():
    """Comments, annotations and the old name of the cache do not count."""

    def first(x: int, past_key_values=None):
        """Doc."""
        if x:
            x = x + 1  # more
        return past_key_values

    def same(x, cache=None):
        if x:
            x = x + 1
        return cache

    def nested(x, cache=None):
        if x:
            x = x + 1
            return cache

    def another(x, cache=0):
        if x:
            x = x + 1
        return cache

    def operator(x, cache=None):
        if x:
            x = x - 1
        return cache

    def renamed(y, cache=None):
        if y:
            y = y + 1
        return cache

    form = transformers_forms.form
    assert form(first) == form(same)
    assert len({form(x) for x in (same, nested, another, operator, renamed)}) == 5
    assert form(exec) is None


# ------------------------------------------------------------------------------------- arguments


def keywords(text, called):
    """The names of the keyword arguments of each call in a source."""
    for start in re.finditer(rf"\b{called}\(", text):
        depth, at, found = 1, start.end(), ""
        while depth:
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
            found += text[at] if depth == 1 else "_"
            at += 1
        yield from re.findall(r"(?:^|,)\s*(?:#.*\n\s*)*(\w+)=", found)


@pytest.mark.slow
def test_every_argument_of_every_model_is_known():
    """Of this transformers: a new one has to be understood before its version is accepted."""
    models = Path(transformers.__file__).parent / "models"
    found = set()
    for path in models.glob("*/modeling_*.py"):
        found |= set(keywords(path.read_text(), "attention_interface"))
    named = set(transformers_attention.attend.__code__.co_varnames)
    assert len(found) > 12 and found <= named | transformers_attention.KNOWN
    called = set(keywords(Path(masks.__file__).read_text(), "mask_interface"))
    assert len(called) > 10
    assert called <= set(make_mask.__code__.co_varnames) | transformers_masks._KNOWN


def test_an_unknown_argument_raises():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(TypeError, match=r"^temperature: got this argument of attention, which"):
        transformers_attention.attend(MODULE, q, q, q, None, temperature=q)
    with pytest.raises(TypeError, match=r"^prefix: got this argument of a mask, which"):
        make_mask(1, 3, 3, prefix=2)
    for value in (None, False):
        assert transformers_attention.attend(MODULE, q, q, q, None, temperature=value)
        assert make_mask(1, 3, 3, prefix=value).arguments == {"causal": True}


NEW_WINDOW = """
def sliding_window_overlay(sliding_window, first):
    def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
        return (kv_idx > q_idx - sliding_window) | (kv_idx < first)
    return inner_mask
"""


def test_a_mask_function_with_a_new_argument_raises():
    scope = {"__name__": masks.__name__}
    exec(NEW_WINDOW, scope)
    function = masks.and_masks(masks.causal_mask_function, scope["sliding_window_overlay"](4, 2))
    with pytest.raises(ValueError, match="got sliding_window_overlay of first, sliding_window, ex"):
        make_mask(1, 9, 9, mask_function=function)


def test_positions_that_restart_without_packed_sequences_are_exact():
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    function = masks.remap_positions_for_packed_sequence(masks.causal_mask_function, positions)
    found = make_mask(1, 5, 5, mask_function=function).arguments
    assert torch.equal(found["mask"][0, 0], positions[0] <= positions[0][:, None])


# ----------------------------------------------------------------------------------- paged caches

CHOSEN = dict(cu_seq_lens_k=offsets([9]), max_length_k=9)  # what an update leaves for a layer
WHOLE = {name: {"full_attention": x} for name, x in CHOSEN.items()}
PAGED = {  # the cache is given; keys; arguments
    "given, and updated": (True, 9, CHOSEN),
    "given, with all keys": (True, 9, WHOLE),
    "neither given nor updated": (False, 3, WHOLE),
    "updated, with all keys beside a block table": (
        False,
        9,
        CHOSEN | dict(block_table=torch.zeros(1, 2)),
    ),
}


@pytest.mark.parametrize("what", PAGED)
def test_a_paged_cache_is_updated_once(what, monkeypatch):
    is_given, keys, arguments = PAGED[what]
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, keys, 8)
    cache = Given(k, k)
    paged = pytest.importorskip("fastattn.integrations.transformers_paged")
    before = paged._running.set(cache)
    given = dict(cu_seq_lens_q=offsets([3]), max_length_q=3, write_index=[0], is_causal=True)
    given |= arguments | (dict(cache=cache) if is_given else {})
    try:
        with pytest.raises(NotImplementedError, match=r"^cache: got a paged one that is .*updated"):
            transformers_attention.attend(MODULE, q, k, k, None, **given)
    finally:
        paged._running.reset(before)


def test_an_updated_cache_outside_of_a_batch_is_named():
    q = torch.randn(1, 2, 3, 8)
    given = dict(cu_seq_lens_q=offsets([3]), write_index=[0], **CHOSEN)
    with pytest.raises(NotImplementedError, match=r"^cache: got NoneType, expected transformers'"):
        transformers_attention.attend(MODULE, q, q, q, None, **given)


# ------------------------------------------------------------------------------- other libraries


def test_another_check_of_flash_attn_stays(monkeypatch):
    """transformers then refuses flash-attn on a CPU itself."""

    def is_flash_attn_2_available(device: str = "cpu") -> bool:
        return False

    theirs = types.ModuleType("theirs")
    theirs.is_flash_attn_2_available = is_flash_attn_2_available
    monkeypatch.setitem(sys.modules, transformers_checks._CHECKS, theirs)
    transformers_checks._answer_checks()
    assert is_flash_attn_2_available() is False and not transformers_checks._before


def test_an_unknown_argument_of_diffusers_raises():
    dispatch = pytest.importorskip(
        "diffusers.models.attention_dispatch", reason="diffusers is not installed"
    )
    from fastattn.integrations import diffusers

    diffusers.register()
    try:
        x, given = torch.randn(1, 6, 2, 8), dict(backend=dispatch.AttentionBackendName("fastattn"))
        dispatch.dispatch_attention_fn(x, x, x, attention_kwargs={"softcap": None}, **given)
        with pytest.raises(TypeError, match=r"^softcap: got this argument of attention, expected"):
            dispatch.dispatch_attention_fn(x, x, x, attention_kwargs={"softcap": 3.0}, **given)
    finally:
        diffusers.unregister()
