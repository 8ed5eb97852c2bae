"""The part of a call that one rank makes, and the whole of what the ranks return."""

import functools

import torch

from fastattn import distributed
from fastattn.distributed import layout as layouts
from tests.features.calls import dense, packed

OF_ROWS = ("out", "lse", "dq")
MAKE = dict(dense=dense, packed=packed)
ATTENTION = dict(dense=distributed.attention, packed=distributed.attention_packed)


def has_rows(mask):
    return mask is not None and mask.ndim > 1 and mask.shape[-2] != 1


def run_row(group, form, row):
    """The results of a row of tests/features on this rank."""
    call, how = MAKE[form](row), dict(group=group)
    if form == "dense":
        how["layout"] = row["cut"]
        cut = functools.partial(distributed.shard, **how)
        for given in (call.tensors, call.given):
            if has_rows(given.get("mask")):
                given["mask"] = cut(given["mask"], dim=-2)
    else:
        cut = functools.partial(distributed.shard, **how, dim=0)
    call.tensors |= {name: cut(call.tensors[name]) for name in "qkv"}
    call.dout = cut(call.dout)
    call.dlse = None if call.dlse is None else cut(call.dlse)
    call.function = functools.partial(ATTENTION[form], **how, strategy=row["strategy"][0])
    return call.run()


def together(tensors, found, layout="contiguous", dim=2):
    """The whole call's results, assembled from those of the ranks. tensors: those of the whole
    call, with rows and keys along dim."""
    rows, keys = (layouts.spans(layout, tensors[x].shape[dim], len(found)) for x in "qk")
    mask, whole = tensors.get("mask"), {}
    for name in found[0]:
        each = [x[name] for x in found]
        if name in OF_ROWS:
            whole[name] = layouts.whole(each, rows, dim)
        elif name in ("dk", "dv"):
            whole[name] = layouts.whole(each, keys, dim)
        elif name == "dmask" and dim == 2 and has_rows(mask):
            whole[name] = layouts.whole(each, rows, mask.ndim - 2)
        else:
            assert all(torch.equal(x, each[0]) for x in each), f"{name} differs between ranks"
            whole[name] = each[0]
    return whole
