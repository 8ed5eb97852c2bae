"""fastattn: attention, attention_packed, and KVCache for the rows of a quantised cache.

The variant "unquantised" computes those rows from contiguous keys in the dtype of queries."""

import torch
import torch_tensors
from protocol import Declined, Prepared, Sizes, Tensors

import fastattn

# The row's storage: KVCache's.
STORAGE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": "int4"}


def version() -> str:
    return fastattn.__version__


def prepare(sizes: Sizes, tensors: Tensors, threads: int, variant: str) -> Prepared:
    torch.set_num_threads(threads)
    q, k, v = torch_tensors.read(tensors)
    causal, precision = sizes["causal"], sizes["dtype"]
    unquantised = variant == "unquantised"
    if unquantised and not sizes["storage"]:
        raise Declined("is for quantised caches")
    if sizes["storage"] and not unquantised:
        precision = sizes["storage"]
        cache = _cache(q, k, v, STORAGE[precision])

        def call():
            return cache.attention(q)

    elif sizes["lengths"]:
        cu = torch.tensor([0, *sizes["lengths"]]).cumsum(0)
        most = max(sizes["lengths"])

        def call():
            return fastattn.attention_packed(q, k, v, cu, cu, max_q=most, max_k=most, causal=causal)

    else:

        def call():
            return fastattn.attention(q, k, v, causal=causal)

    return Prepared(call, lambda path: torch_tensors.write(call(), path), precision)


def _cache(q, k, v, storage):
    """Raises Declined where KVCache lacks the storage."""
    batch, heads, n, dim = k.shape
    try:
        cache = fastattn.KVCache(batch, heads, dim, capacity=n, dtype=q.dtype, storage=storage)
    except (TypeError, ValueError) as error:
        raise Declined(f"KVCache has no storage {storage!r}") from error
    cache.append(k, v)
    return cache
