"""The reference has every public name, and no other."""

from __future__ import annotations

import inspect
import runpy
from types import ModuleType

import pytest

import fastattn
import fastattn.integrations.diffusers
import fastattn.integrations.transformers
from fastattn import distributed, flash_attn, mla, nn
from tests.support.checkout import ROOT

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
MODULES: dict[str, ModuleType] = {"nn.": nn, "distributed.": distributed, "mla.": mla}

pytestmark = pytest.mark.skipif(not PAGES, reason="no docs: not a checkout")


def public() -> set[str]:
    names = {x for x in dir(fastattn) if not x.startswith("__")}
    names = {x for x in names if not isinstance(getattr(fastattn, x), ModuleType)}
    names |= {f"{prefix}{x}" for prefix, module in MODULES.items() for x in module.__all__}
    of_flash_attn = (x for x in flash_attn.__all__ if callable(getattr(flash_attn, x)))
    names |= {f"flash_attn.{x}" for x in of_flash_attn}
    for module in ("flash_attn_3", "cute", "mha", "rotary", "norms", "losses", "activations"):
        names |= {f"flash_attn.{module}.{x}" for x in getattr(flash_attn, module).__all__}
    for library in ("transformers", "diffusers", "vllm"):
        names |= {f"integrations.{library}.{x}" for x in ("register", "unregister")}
    return names | {"reference.attention"}


CALLS = [
    *(fastattn.attention, fastattn.attention_packed, fastattn.attention_weights),
    *(fastattn.attention_jvp, distributed.attention, distributed.attention_packed),
    distributed.explain,
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.__module__}.{call.__name__}")
def test_keywords_begin_with_the_mask(call):
    """In help() and editors, too; a call's own keywords follow the shared ones."""
    parameters = inspect.signature(call).parameters.values()
    keywords = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
    assert keywords[:2] == ["mask", "causal"]


def test_every_public_name_is_there_once():
    extension = runpy.run_path(str(ROOT / "docs" / "extensions" / "docstrings.py"))
    assert sorted(extension["FILES"]) == sorted(public())
