"""The kinds of mask that are measured, each as plain data that every peer and the oracle read."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = 256  # keys that a row of the sliding window sees
HIDDEN = 0.25  # of the keys, by padding
DROPOUT_P = 0.1
SEED = 7  # of our own draws


@dataclass(frozen=True)
class Mask:
    """Row i sees the keys i - left to i + right, None being no limit, that are not padding."""

    left: int | None = None
    right: int | None = None
    padded: bool = False  # item b has lengths[b] keys, HIDDEN of them hidden on average
    tensor: bool = False  # padding reaches us, too, as the boolean (B,1,1,N) that others take
    biased: bool = False  # a float (1,H,M,N) is added to the scores
    learned: bool = False  # and its gradient is wanted
    dropout_p: float = 0.0


MASKS = {
    "full": Mask(),
    "causal": Mask(right=0),
    "window": Mask(left=WINDOW - 1, right=0),
    "padding": Mask(padded=True),
    "bias": Mask(biased=True),
    "dropout": Mask(dropout_p=DROPOUT_P),
    "padding mask": Mask(padded=True, tensor=True),
    "learned bias": Mask(biased=True, learned=True),
}
SWEPT = ("full", "causal", "window", "padding", "bias", "dropout")
