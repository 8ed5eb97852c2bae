"""Attention over the ranks of torch.distributed: the same function as on one rank.

Each rank has a part of the sequence. Masks, windows, bias, sinks, gradients and dropout's draws are
those of one call on the whole: `fastattn.Place` gives kernels the position of a block in it.
"""

from ..public_names import set_module
from .attention_call import attention
from .explaining import explain
from .packed import attention_packed
from .sharding import shard, unshard

__all__ = ["attention", "attention_packed", "explain", "shard", "unshard"]
set_module(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
