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

NAME = "fastattn"
_MISSING = object()
_undo: list[Callable[[], None]] = []


def register() -> None:
    """Lets models of transformers 5 have `attn_implementation="fastattn"`: attention and masks, and
    `generate_batch`.

    A second call changes nothing. A model that computes its attention itself, and so would never
    call fastattn, raises ValueError where it is made; what reaches the mask of another one, which
    is for fastattn alone, raises TypeError. Raises ImportError without transformers.
    """
    if _undo:
        return
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

    from .transformers_attention import attend
    from .transformers_masks import make_mask
    from .transformers_paged import hooks

    for interface, function in ((AttentionInterface, attend), (AttentionMaskInterface, make_mask)):
        _replace(interface._global_mapping, function)
    _wrap(PreTrainedModel, "get_correct_attn_implementation", _refusing)
    for owner, name, wrapper in hooks(NAME):
        _wrap(owner, name, wrapper)


def unregister() -> None:
    """Undoes `register`. Models that have the name raise KeyError when they run. Without one,
    nothing."""
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
        if getattr(owner, name) is ours:  # else somebody wrapped it since, and calls it
            setattr(owner, name, original)

    _undo.append(put_back)


def _refusing(original: Callable) -> Callable:
    """transformers asks this of every model that is made, and of one whose implementation is
    set."""

    @functools.wraps(original)
    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        if requested_attention == NAME and (why := _why_not(type(self))):
            raise ValueError(
                f"attn_implementation: got {NAME!r} for {type(self).__name__}, expected a model "
                f"whose attention goes through transformers' AttentionInterface: {why}; leave it "
                "at 'eager' or 'sdpa'"
            )
        return original(self, requested_attention, *args, **kwargs)

    return get_correct_attn_implementation


# By a source: what looks a class of attention up by name, and else.
_OWN = r"_CLASSES\[\S*attn_implementation\]"
_ELSE = {
    # Keys are picked and that is added to the mask for these two alone or for tensors; a sink of
    # each row is handed over.
    r"""attn_implementation in \("eager", "sdpa"\)|^\s+sinks="""
    r"""|isinstance\(attention_mask, torch\.Tensor\) and kv""": (
        "this one picks keys, or has sinks, that other implementations are not told of"
    ),
    r"Attention\(config, is_causal=True": (
        "this one calls causal what its eager attention shows all of"
    ),
}


@functools.cache
def _why_not(kind: Any) -> str | None:
    """Why the attention of a model is not all in what the interface is told, by its source: as
    transformers finds out whether an implementation can be set. None where it is."""
    from transformers import PreTrainedModel

    for base in kind.__mro__:  # a class of a notebook has no source, but its base has
        if base is PreTrainedModel:
            break
        try:
            source = inspect.getsource(sys.modules[base.__module__])
        except (KeyError, OSError, TypeError):
            continue
        if not base._can_set_attn_implementation() or re.search(_OWN, source):
            break
        found = (why for sign, why in _ELSE.items() if re.search(sign, source, re.MULTILINE))
        return next(found, None)
    return "this one computes its own and would never call fastattn"
