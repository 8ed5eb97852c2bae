"""`attn_implementation="fastattn"` in transformers.

import fastattn.integrations.transformers

fastattn.integrations.transformers.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fastattn")
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from . import transformers_forms, transformers_latent

NAME = "fastattn"
_MISSING = object()
_undo: list[Callable[[], None]] = []


def register() -> None:
    """Enable `attn_implementation="fastattn"` in transformers 5.23 and 5.24.

    This includes attention, masks and `generate_batch`. A second call changes nothing. Later calls
    of transformers raise for models that fastattn cannot run:

    - Making a model that computes its attention itself, and so would never call fastattn, raises
      ValueError; also if fastattn replaces one of its functions, and that has other arguments or
      another source than in these versions.
    - An attention layer, or a mask, with an argument that fastattn does not know raises TypeError.
    - A model that uses its mask in an operation of its own raises TypeError: the mask is an object
      that only fastattn can read.

    Raises:
        ImportError: There is no transformers, or it is of another minor version: models are
            recognised by the sources and arguments that they have in these two.

    Example:
        Needs the library transformers.

        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import fastattn.integrations.transformers
        >>> fastattn.integrations.transformers.register()
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=50)
        >>> config = LlamaConfig(num_attention_heads=2, attn_implementation="fastattn", **sizes)
        >>> model = LlamaForCausalLM(config)
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 50])
        >>> fastattn.integrations.transformers.unregister()
    """
    if _undo:
        return
    from transformers import AttentionInterface, PreTrainedModel, __version__

    transformers_forms.check_version(__version__)
    from transformers.masking_utils import AttentionMaskInterface

    from .transformers_attention import attend
    from .transformers_masks import make_mask
    from .transformers_paged import hooks

    for interface, function in ((AttentionInterface, attend), (AttentionMaskInterface, make_mask)):
        _replace(interface._global_mapping, function)
    _wrap(PreTrainedModel, "get_correct_attn_implementation", _refusing)
    for owner, name, wrapper in hooks(attend):
        _wrap(owner, name, wrapper)


def unregister() -> None:
    """Undo `register`.

    Models set to "fastattn" then raise KeyError when they run. Nothing happens if `register` was
    not called.

    Example:
        Needs the library transformers.

        >>> from transformers import AttentionInterface
        >>> import fastattn.integrations.transformers
        >>> fastattn.integrations.transformers.register()
        >>> "fastattn" in AttentionInterface().valid_keys()
        True
        >>> fastattn.integrations.transformers.unregister()
        >>> "fastattn" in AttentionInterface().valid_keys()
        False
    """
    while _undo:
        _undo.pop()()


def _replace(mapping: dict[str, Any], function: Callable) -> None:
    before = mapping.get(NAME, _MISSING)
    mapping[NAME] = function

    def put_back() -> None:
        if mapping.get(NAME) is function:
            del mapping[NAME]
            if before is not _MISSING:
                mapping[NAME] = before

    _undo.append(put_back)


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    original = getattr(owner, name)
    ours = wrapper(original)
    setattr(owner, name, ours)

    def put_back() -> None:
        if getattr(owner, name) is ours:  # else later code wrapped ours, and still calls it
            setattr(owner, name, original)

    _undo.append(put_back)


def _refusing(original: Callable) -> Callable:
    """Wrap transformers' check of an implementation, which runs when a model is made or its
    implementation is set: raise ValueError if "fastattn" cannot run the model, and let its layers
    with latent attention keep latent vectors."""

    @functools.wraps(original)
    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        if requested_attention == NAME:
            from . import transformers_selected  # imports transformers

            if why := _why_not(type(self)):
                raise ValueError(
                    f"attn_implementation: got {NAME!r} for {type(self).__name__}, expected a "
                    "model whose attention goes through transformers' AttentionInterface: "
                    f"{why}; leave it at 'eager' or 'sdpa'"
                )
            for layer in transformers_latent.layers(type(self)):
                if transformers_latent.original_of(layer) is None:
                    _wrap(layer, "expand_kv", transformers_latent.keeping_latent(NAME))
            for indexer in transformers_selected.indexers(type(self)):
                if not hasattr(indexer.forward, "made_by_fastattn_of"):
                    _wrap(indexer, "forward", transformers_selected.choosing)
        return original(self, requested_attention, *args, **kwargs)

    return get_correct_attn_implementation


# Patterns of a model's source. _OWN: it looks up an attention class by name. _ELSE: pattern to the
# reason why fastattn cannot run the model.
_KEEPS = r"""attn_implementation in \("eager", "sdpa"\)"""  # a selection of keys; _GIVES: it does
_GIVES = r"^\s+(indices=sparse_indices|block_indices=block_indices),"
_PICKS = "this one picks keys, or has sinks, that it does not pass to other implementations"
_OWN = r"_CLASSES\[\S*attn_implementation\]"
_ELSE = {
    # The model selects keys, and adds that selection to the mask only if that is a tensor; or it
    # passes a sink for each row.
    r"""^\s+sinks="""
    r"""|isinstance\(attention_mask, torch\.Tensor\) and kv""": _PICKS,
    r"Attention\(config, is_causal=True": (
        "this one declares causal attention, but its eager attention is not causal"
    ),
}


@functools.cache
def _why_not(kind: Any) -> str | None:
    """The reason why a model does not pass all of its attention through the interface, or None.
    Its module's source is searched, as transformers does to see if an implementation can be set."""
    from transformers import PreTrainedModel

    for base in kind.__mro__:  # a class of a notebook has no source; its base has
        if base is PreTrainedModel:
            break
        if (source := _source_beside(base)) is None:
            continue
        if not base._can_set_attn_implementation() or re.search(_OWN, source):
            break
        return _differs(source)
    return "this one computes its own attention and would never call fastattn"


@functools.cache
def why_not_layer(kind: type) -> str | None:
    """The reason why a model with attention layers of this class needs attention that is not that
    of the interface, or None."""
    sources = (_source_beside(base) for base in kind.__mro__)
    return next((_differs(x) for x in sources if x is not None), None)


def _source_beside(kind: type) -> str | None:
    """The source of the module of a class. None: it has none."""
    try:
        return inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return None


def _differs(source: str) -> str | None:
    if re.search(_KEEPS, source) and not re.search(_GIVES, source, re.MULTILINE):
        return _PICKS
    reasons = (why for sign, why in _ELSE.items() if re.search(sign, source, re.MULTILINE))
    return next(reasons, None)
