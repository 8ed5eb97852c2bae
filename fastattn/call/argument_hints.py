"""The error text for an unknown keyword argument: it names the argument to use instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from .sizes import known

_CAUSAL = 'causal=True (row i sees the keys up to i) or causal="bottom_right"'
_MASK = "mask: bool, True = may attend, or float, added to the scores"
_PADDING = "key_lengths, or mask: bool, True = may attend (the reverse of torch's padding masks)"
_WINDOW = "window=(left, right)"
_GROUPS = "no such argument: k and v may have fewer heads than q"
INSTEAD = {  # the name in other libraries -> what fastattn expects
    "is_causal": _CAUSAL,
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "attn_bias": _MASK,
    "bias": _MASK,
    "key_padding_mask": _PADDING,
    "padding_mask": _PADDING,
    "seq_lens": "key_lengths",
    "enable_gqa": _GROUPS,
    "num_kv_heads": _GROUPS,
    "dropout": "dropout_p",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "scaling": "scale",
    "window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "logits_soft_cap": "softcap",
    "s_aux": "sinks",
    "need_weights": "a call of attention_weights",
    "return_weights": "a call of attention_weights",
}


def by_position(function: str, taken: str, surplus: Sequence[object]) -> TypeError:
    """The error for arguments that must be given by keyword. taken: those that need not be."""
    n = len(surplus)
    return TypeError(
        f"{function}() takes {taken} by position: got {n} more, expected keywords, such as mask="
    )


def mask_shape(shape: Sequence[int], sizes: Mapping[str, int]) -> str:
    """What to do with a mask that does not broadcast to (B, H, M, N); "" if it has another form."""
    forms = {"B N": "mask[:, None, None, :]", "B M N": "mask[:, None]", "B 1 N": "mask[:, None]"}
    for letters, use in forms.items():
        expected = [sizes.get(letter, 1) for letter in letters.split()]
        if len(shape) == len(expected) and all(known(n == m) for n, m in zip(shape, expected)):
            return f": if it is ({', '.join(letters.split())}), give {use}"
    return ""


def rows_before_heads(q: Sequence[int], k: Sequence[int]) -> str:
    """What to do where the heads of k do not divide q's, if q and k may be (B, M, H, D)."""
    fit = known(k[2] != 0) and known(q[2] % k[2] == 0)
    return "; if rows come before heads, give x.transpose(1, 2) of q, k and v" if fit else ""


def unknown_argument(name: str, known: Iterable[str]) -> str:
    """The text for the argument `name`. known: the valid names."""
    if name in INSTEAD:
        expected = INSTEAD[name]
    else:
        close = difflib.get_close_matches(name, list(known), n=1)
        expected = close[0] if close else f"one of {', '.join(known)}"
    return f"got an unexpected keyword argument {name!r}, expected {expected}"
