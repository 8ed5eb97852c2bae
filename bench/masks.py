"""The kinds of score and mask that are measured, as plain data that every peer and the oracle
read."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = 256  # keys that a row of the sliding window sees
HIDDEN = 0.25  # fraction of the keys hidden by padding
DROPOUT_P = 0.1
SEED = 7  # of our dropout


@dataclass(frozen=True)
class Mask:
    """Row i attends to the keys i - left to i + right (None: no limit) that are not padding."""

    left: int | None = None
    right: int | None = None
    padded: bool = False  # item b has lengths[b] keys, HIDDEN of them hidden on average
    tensor: bool = False  # we too get padding as the boolean (B,1,1,N) that others take
    dense: str = ""  # "bool" or "float": every peer gets the mask as one (B,1,M,N) tensor
    biased: bool = False  # a float (1,H,M,N) is added to the scores
    learned: bool = False  # the bias gets a gradient
    alibi: bool = False  # the bias is ALiBi's, with the paper's slopes; we get the slopes
    dropout_p: float = 0.0

    @property
    def added(self) -> bool:
        """Whether the bias reaches us as a float mask."""
        return self.biased and not self.alibi


MASKS = {
    "full": Mask(),
    "causal": Mask(right=0),
    "window": Mask(left=WINDOW - 1, right=0),
    "padding": Mask(padded=True),
    "bias": Mask(biased=True),
    "dropout": Mask(dropout_p=DROPOUT_P),
    "padding mask": Mask(padded=True, tensor=True),
    "learned bias": Mask(biased=True, learned=True),
    "full, bool": Mask(dense="bool"),
    "causal, float": Mask(right=0, dense="float"),
    "ALiBi": Mask(biased=True, alibi=True),
}
SWEPT = ("full", "causal", "window", "padding", "bias", "dropout")
