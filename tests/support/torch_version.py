"""What the installed torch lacks, for tests of what its own functions do.

Support for a feature is looked up in torch itself where that is possible. Versions are compared
only where it is not.
"""

import pytest
from torch.nn.attention import flex_attention

# Reason -> whether this torch has it.
HAS = {
    "torch has no AuxRequest": hasattr(flex_attention, "AuxRequest"),
    "torch does not mark sliced block masks": hasattr(flex_attention, "_sliced_mask_mod_error"),
}
NO_AUX_REQUEST, NO_SLICED_BLOCK_MASKS = HAS


def needs(reason):
    """Skip the test if this torch lacks a feature, one of the reasons in `HAS`."""
    return pytest.mark.skipif(not HAS[reason], reason=reason)


def skip_without(reason):
    """Skip the test that runs if this torch lacks a feature."""
    if not HAS[reason]:
        pytest.skip(reason)
