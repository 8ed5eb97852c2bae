"""What transformers takes from a kernel of Hugging Face's hub that has the whole of fastattn.

`attn_implementation="owner/name"` loads the kernel, looks for functions of a few names and
registers one under the kernel's name. This kernel has `flash_attn_forward`, which needs
`supports_flash_attn` beside it: it gets every argument of a layer. For `flash_attn_varlen_func`
transformers would drop the arguments that FlashAttention does not have, such as T5's position
bias, and the model would compute other numbers.

Importing this module makes transformers give the kernel fastattn's masks, and accept it in
continuous batching, under each name of the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface

from . import transformers_forms
from .transformers import why_not_layer
from .transformers_attention import attend
from .transformers_masks import StructuredMask, make_mask
from .transformers_paged import hooks, runs

supports_flash_attn = True


def flash_attn_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: StructuredMask | Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `transformers_attention.attend` does, which has the arguments.

    attention_mask may also be (B,N), nonzero where a key is not padding: some models pass that to a
    kernel with "flash" in its name. Raises ValueError for a layer of a model that does not attend
    as transformers' interface does.
    """
    _check_layer(type(module))
    if attention_mask is not None and attention_mask.ndim == 2:
        attention_mask = attention_mask[:, None, None].bool()
    return attend(module, query, key, value, attention_mask, *args, **kwargs)


@torch.compiler.assume_constant_result
def _check_layer(kind: type) -> None:
    if why := why_not_layer(kind):
        raise ValueError(
            f"attn_implementation: got a kernel of the hub for a model with {kind.__name__}, "
            "expected a model whose attention goes through transformers' AttentionInterface: "
            f"{why}; leave it at 'eager' or 'sdpa'"
        )


def _with_our_masks(original: Callable[[str, Callable], None]) -> Any:
    """Wrap the registration of masks: transformers registers sdpa's for this kernel."""

    @functools.wraps(original)
    def register(key: str, value: Callable) -> None:
        original(key, make_mask if runs(flash_attn_forward, key) else value)

    return staticmethod(register)


HOOKS = [(AttentionMaskInterface, "register", _with_our_masks), *hooks(flash_attn_forward)]
transformers_forms.check_version(transformers.__version__)
for owner, name, wrapper in HOOKS:  # for good: transformers keeps a kernel for as long
    setattr(owner, name, wrapper(getattr(owner, name)))
