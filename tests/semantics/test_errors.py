"""Bad input raises at once and says what was got, what was expected, or what to do."""

import inspect

import numpy as np
import pytest
import torch

import fastattn
from fastattn.call import argument_hints

B, H, HK, M, N, D, DV = 2, 4, 2, 5, 7, 3, 6
BACKENDS = [None, *(name for name, why in fastattn.available_backends().items() if why is None)]


def call(**changes):
    given = dict(q=torch.randn(B, H, M, D), k=torch.randn(B, HK, N, D), v=torch.randn(B, HK, N, DV))
    given |= changes
    return fastattn.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


r = torch.randn
BAD = {
    "q is a list": (dict(q=[1.0]), TypeError, r"q: got list.*torch.as_tensor\(q\)"),
    "v is None": (dict(v=None), TypeError, "v: got NoneType"),
    "k and v are None": (
        dict(k=None, v=None), TypeError, r"k: got NoneType.*attention\(x, x, x\)"
    ),
    "k is an array": (
        dict(k=np.zeros((B, HK, N, D))), TypeError, r"k: got ndarray.*torch.as_tensor\(k\)"
    ),
    "q is a number": (dict(q=1.0), TypeError, "q: got float, expected a torch.Tensor$"),
    "q of 3 dimensions": (dict(q=r(H, M, D)), ValueError, "4 dimensions"),
    "v of 5 dimensions": (dict(v=r(1, B, HK, N, DV)), ValueError, "4 dimensions"),
    "k of other batch": (dict(k=r(3, HK, N, D)), ValueError, "batch size 2"),
    "v of other batch": (dict(v=r(1, HK, N, DV)), ValueError, "batch size 2"),
    "k of other head dim": (dict(k=r(B, HK, N, D + 1)), ValueError, "head dim 3"),
    "indivisible heads": (dict(k=r(B, 3, N, D), v=r(B, 3, N, DV)), ValueError, "3 heads.*divisor"),
    "no key heads": (dict(k=r(B, 0, N, D), v=r(B, 0, N, DV)), ValueError, "divisor of"),
    "v of other heads": (dict(v=r(B, 1, N, DV)), ValueError, "2 heads"),
    "v of other length": (dict(v=r(B, HK, N + 1, DV)), ValueError, "7 rows"),
    "int q": (dict(q=torch.ones(B, H, M, D).int()), ValueError, "q.dtype.*int32"),
    "mixed dtypes": (dict(k=r(B, HK, N, D).double()), ValueError, "k.dtype.*float64"),
    "other device": (dict(k=r(B, HK, N, D, device="meta")), ValueError, "k.device.*meta"),
    "sparse q": (dict(q=r(B, H, M, D).to_sparse()), TypeError, "q: got a torch.sparse_coo"),
    "rows before heads": (
        dict(q=r(B, 8, HK, D), k=r(B, 9, HK, D), v=r(B, 9, HK, DV)),
        ValueError, r"9 heads.*q's 8 heads; if rows come before heads.*transpose\(1, 2\)",
    ),
    "mask is a list": (dict(mask=[[True]]), TypeError, r"mask: got list.*torch.as_tensor\(mask\)"),
    "mask of keys": (
        dict(mask=r(B, N)), ValueError, r"it is \(B, N\), give mask\[:, None, None, :\]"
    ),
    "mask of all heads": (
        dict(mask=r(B, M, N)), ValueError, r"it is \(B, M, N\), give mask\[:, None\]"
    ),
    "int mask": (dict(mask=torch.ones(M, N).int()), ValueError, "mask.dtype.*torch.bool"),
    "double mask": (dict(mask=r(M, N).double()), ValueError, "mask.dtype"),
    "bfloat16 mask": (dict(mask=r(M, N).bfloat16()), ValueError, "mask.dtype"),
    "mask of other size": (dict(mask=r(M, N + 1)), ValueError, "broadcasts to"),
    "mask of many dimensions": (dict(mask=r(1, 1, 1, M, N)), ValueError, "broadcasts to"),
    "mask of other batch": (dict(mask=r(3, 1, M, N)), ValueError, "broadcasts to"),
    "mask on other device": (dict(mask=r(M, N, device="meta")), ValueError, "mask.device"),
    "causal name": (dict(causal="left"), ValueError, "causal: got 'left'.*top_left"),
    "causal number": (dict(causal=1), ValueError, "causal: got 1, expected False, True"),
    "causal 0": (dict(causal=0), ValueError, "causal: got 0, expected False, True"),
    "return_lse text": (dict(return_lse="yes"), TypeError, "return_lse: got 'yes' .str."),
    "return_lse number": (dict(return_lse=1), TypeError, "return_lse: got 1 .int., expected True"),
    "return_lse 0": (dict(return_lse=0), TypeError, "return_lse: got 0 .int., expected True"),
    "row_invariant 0": (dict(row_invariant=0), TypeError, "row_invariant: got 0 .int."),
    "causal list": (dict(causal=[True]), ValueError, "causal"),
    "causal tensor": (dict(causal=torch.tensor(True)), ValueError, "causal"),
    "causal None": (dict(causal=None), ValueError, "causal"),
    "window of one": (dict(window=3), ValueError, "window.*pair"),
    "window of three": (dict(window=(1, 2, 3)), ValueError, "window.*pair"),
    "window left": (dict(window=(-1, None)), ValueError, "window left: got -1"),
    "window right": (dict(window=(None, -2)), ValueError, "window right: got -2"),
    "window float": (dict(window=(1.5, 0)), TypeError, "window left: got 1.5"),
    "lengths list": (dict(key_lengths=[N, N]), TypeError, "key_lengths: got list"),
    "lengths dtype": (dict(key_lengths=torch.ones(B)), ValueError, "key_lengths.dtype"),
    "lengths shape": (dict(key_lengths=torch.ones(B + 1).long()), ValueError, r"lengths.*\(B,\)"),
    "lengths rank": (dict(key_lengths=torch.ones(B, 1).long()), ValueError, "key_lengths"),
    "lengths device": (
        dict(key_lengths=torch.ones(B, device="meta").long()), ValueError, "key_lengths.device"
    ),
    "lengths above": (dict(key_lengths=torch.tensor([N + 1, 0])), ValueError, r"got 8.*\[0, 7\]"),
    "lengths below": (dict(key_lengths=torch.tensor([0, -3])), ValueError, r"got -3.*\[0, 7\]"),
    "slopes shape": (dict(alibi_slopes=r(H + 1)), ValueError, "alibi_slopes"),
    "slopes of other batch": (dict(alibi_slopes=r(1, H)), ValueError, "alibi_slopes"),
    "slopes dtype": (dict(alibi_slopes=torch.ones(H).int()), ValueError, "alibi_slopes.dtype"),
    "slopes with grad": (dict(alibi_slopes=r(H).requires_grad_()), ValueError, "detach"),
    "softcap 0": (dict(softcap=0.0), ValueError, "softcap: got 0.0.*above 0"),
    "softcap below 0": (dict(softcap=-1.0), ValueError, "softcap"),
    "softcap nan": (dict(softcap=torch.nan), ValueError, "softcap"),
    "softcap inf": (dict(softcap=torch.inf), ValueError, "softcap"),
    "softcap text": (dict(softcap="1"), TypeError, "softcap"),
    "sinks shape": (dict(sinks=r(B, H)), ValueError, "sinks"),
    "sinks dtype": (dict(sinks=torch.ones(H).long()), ValueError, "sinks.dtype"),
    "dropout below": (dict(dropout_p=-0.1), ValueError, r"dropout_p: got -0.1.*\[0, 1\]"),
    "dropout above": (dict(dropout_p=1.1), ValueError, "dropout_p"),
    "dropout nan": (dict(dropout_p=torch.nan), ValueError, "dropout_p: got nan"),
    "dropout text": (dict(dropout_p="0.1"), TypeError, "dropout_p"),
    "seed text": (dict(dropout_p=0.1, seed="a"), TypeError, "seed: got 'a'"),
    "seed float": (dict(dropout_p=0.1, seed=1.0), TypeError, "seed: got 1.0"),
    "seed bool": (dict(dropout_p=0.1, seed=True), TypeError, "seed: got True"),
    "seed numpy bool": (dict(dropout_p=0.1, seed=np.True_), TypeError, "seed: got np.True_"),
    "q is a list, with dropout": (dict(q=[1.0], dropout_p=0.1), TypeError, "q: got list"),
    "seed of 65 bits": (dict(dropout_p=0.1, seed=2**64), ValueError, "seed.*64 bits"),
    "seed dtype": (dict(dropout_p=0.1, seed=torch.tensor([1.0])), ValueError, "seed.dtype"),
    "two seeds": (dict(dropout_p=0.1, seed=torch.tensor([1, 2])), ValueError, "one element"),
    "seed device": (
        dict(dropout_p=0.1, seed=torch.ones(1, device="meta").long()), ValueError, "seed.device"
    ),
    "scale nan": (dict(scale=torch.nan), ValueError, "scale: got nan"),
    "scale inf": (dict(scale=-torch.inf), ValueError, "scale"),
    "scale text": (dict(scale="1"), TypeError, "scale"),
    "scale list": (dict(scale=[1.0]), TypeError, "scale"),
    "scale bool": (dict(scale=True), TypeError, "scale: got True"),
    "scale no float holds": (dict(scale=10**400), ValueError, "scale: got 10000.*a float holds"),
    "softcap no float holds": (dict(softcap=10**400), ValueError, "softcap: got 10000"),
    "dropout bool": (dict(dropout_p=True), TypeError, "dropout_p: got True"),
    "dropout None": (dict(dropout_p=None), TypeError, "dropout_p: got None"),
    "window bool": (dict(window=(True, None)), TypeError, "window left: got True"),
    "window tensor": (dict(window=torch.tensor([1, 2])), TypeError, "window left: got tensor"),
    "backend list": (dict(backend=["cpu"]), TypeError, "backend: got .*expected a name"),
    "scale tensor": (dict(scale=torch.tensor(1.0)), TypeError, "scale"),
    "no such backend": (dict(backend="gpu"), ValueError, "backend: got 'gpu'.*cpu"),
    "no such argument": (dict(depth=1), TypeError, "'depth', expected one of mask, causal"),
    "misspelt argument": (dict(key_length=1), TypeError, "'key_length', expected key_lengths"),
    "torch's is_causal": (dict(is_causal=True), TypeError, "'is_causal', expected causal=True"),
    "torch's attn_mask": (dict(attn_mask=r(M, N)), TypeError, "'attn_mask', expected mask: bool"),
    "torch's enable_gqa": (dict(enable_gqa=True), TypeError, "fewer heads than q"),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, backend):
    changes, kind, message = BAD[name]
    call(backend=backend, scale=1, dropout_p=0, window=(1, None))
    call(backend=backend)  # a cached good call must not let a bad one through
    for _ in range(2):
        with pytest.raises(kind, match=f"(?s){message}"):
            call(**(dict(backend=backend) | changes))


CU = torch.tensor([0, 3])
CACHE = dict(batch=1, heads=1, head_dim=32, capacity=8)
TELLING = {
    "a mask by position": (
        lambda q, k, v: fastattn.attention(q, k, v, r(M, N)),
        TypeError, r"attention\(\) takes q, k, v by position: got 1 more.*mask=",
    ),
    "weights of values": (
        lambda q, k, v: fastattn.attention_weights(q, k, v, r(M, N)),
        TypeError, r"attention_weights\(\) takes q, k by position: got 2 more",
    ),
    "packed, by position": (
        lambda q, k, v: fastattn.attention_packed(*(r(3, 1, 2),) * 3, CU, CU, 3),
        TypeError, r"attention_packed\(\) takes q, k, v, cu_q, cu_k by position: got 1 more",
    ),
    "a tensor for a block mask": (
        lambda q, k, v: fastattn.flex_attention(q, q, q, block_mask=torch.ones(M, M).bool()),
        TypeError, "block_mask: got Tensor, expected the BlockMask.*mask_mod=.*mask=mask",
    ),
    "the name of a dtype": (
        lambda q, k, v: fastattn.KVCache(**CACHE, storage="int8"),
        ValueError, "storage: got 'int8', expected None for torch.float32, torch.int8 or .*int4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TELLING)
def test_the_error_says_what_to_do(name):
    function, kind, message = TELLING[name]
    with pytest.raises(kind, match=f"(?s){message}"):
        function(r(B, H, M, D), r(B, HK, N, D), r(B, HK, N, DV))


IS_CAUSAL = dict(is_causal=True)


@pytest.mark.parametrize(
    "function, arguments, message",
    [
        (fastattn.attention, dict(attn_mask=None), r"attention\(\) got .*'attn_mask'.*mask: bool"),
        (fastattn.explain, IS_CAUSAL, "'is_causal', expected causal=True"),
        (fastattn.attention_weights, IS_CAUSAL, "'is_causal', expected causal=True"),
        (fastattn.attention_weights, dict(v=r(2)), r"attention_weights\(\) got .*'v'"),
        (fastattn.attention_weights, dict(normaliser=1), r"attention_weights\(\) got .*normaliser"),
    ],
)
def test_an_unknown_argument_is_reported_by_the_called_function(function, arguments, message):
    q = r(B, H, M, D)
    tensors = (q, q) if function is fastattn.attention_weights else (q, q, q)
    with pytest.raises(TypeError, match=message):
        function(*tensors, **arguments)


def test_hints_are_about_arguments_that_do_not_exist():
    assert (
        not argument_hints.INSTEAD.keys() & inspect.signature(fastattn.attention).parameters.keys()
    )


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_lengths_are_checked_on_every_call(backend, grads):
    q = torch.randn(B, H, M, D, requires_grad=grads)
    for lengths in ([N, 0], [1, 2]):
        call(q=q, key_lengths=torch.tensor(lengths), backend=backend)
        with pytest.raises(ValueError, match="key_lengths: got 8"):
            call(q=q, key_lengths=torch.tensor([lengths[0], N + 1]), backend=backend)


@pytest.mark.parametrize(
    "lse, message",
    [
        (torch.zeros(B, H, M + 1), "lse: got"),
        (torch.zeros(B, H, M).double(), "lse.dtype"),
        (torch.zeros(B, H, M, device="meta"), "lse.device"),
    ],
)
def test_bad_lse_for_weights(lse, message):
    with pytest.raises(ValueError, match=message):
        fastattn.attention_weights(r(B, H, M, D), r(B, HK, N, D), lse=lse)
    with pytest.raises(TypeError, match="lse: got list"):
        fastattn.attention_weights(r(B, H, M, D), r(B, HK, N, D), lse=[1])


def test_bad_input_raises_while_compiling_too():
    q, k, v = r(B, H, M, D), r(B, HK, N, D), r(B, HK, N, DV)
    with pytest.raises(Exception, match="head dim 3"):
        torch.compile(fastattn.attention, fullgraph=True, backend="aot_eager")(q, k[..., :2], v)
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="key_lengths: got 8"):
        torch.compile(fastattn.attention, fullgraph=True, backend="aot_eager")(
            q, k, v, key_lengths=torch.tensor([8, 0])
        )


def in_words(changes):
    """A test's id. Tensors are named by dtype and shape: their values differ between processes."""

    def word(x):
        return f"{str(x.dtype)[6:]} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)

    return ", ".join(f"{name}={word(x)}" for name, x in changes.items())


@pytest.mark.parametrize(
    "changes",
    [
        dict(causal=np.True_),
        dict(scale=np.float32(0.5)),
        dict(scale=1),
        dict(scale=np.int64(2)),
        dict(softcap=np.float32(2.5)),
        dict(dropout_p=np.float32(0.5), seed=np.int64(7)),
        dict(dropout_p=0.5, seed=np.uint64(2**64 - 1)),
        dict(window=(1, 1)),
        dict(window=(np.uint8(1), 2**70)),
        dict(window=[2, None]),
        dict(window=(np.int64(2), 10**9)),
        dict(dropout_p=0),
        dict(dropout_p=1, seed=1),
        dict(seed=5),
        dict(mask=torch.tensor(True)),
        dict(mask=torch.ones(())),
        dict(alibi_slopes=r(H).half()),
        dict(sinks=r(H).double()),
        dict(key_lengths=torch.tensor([1, 2], dtype=torch.int32)),
        dict(key_lengths=torch.tensor([1, 9, 2])[::2]),
    ],
    ids=in_words,
)
def test_unusual_but_valid_calls(changes):
    given = dict(q=r(B, H, M, D), k=r(B, HK, N, D), v=r(B, HK, N, DV)) | changes
    found = call(**given)
    exact = fastattn.reference.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "alibi_slopes"])
def test_a_tensor_with_freed_storage(name):
    """The tensor has its shape, but a null address."""
    tensors = dict(zip("qkv", torch.randn(3, 1, 2, 5, 4).clone().unbind()))
    tensors |= dict(mask=torch.zeros(5, 5), alibi_slopes=torch.ones(2))
    tensors[name] = tensors[name].clone()
    tensors[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"^{name}: got a tensor without storage"):
        fastattn.attention(**tensors)


def test_slopes_that_require_grad_are_fine_where_nothing_is_differentiated():
    with torch.no_grad():
        call(alibi_slopes=r(H).requires_grad_())


VMAPPED = {
    "k of other batch": (dict(k=r(3, 1, HK, N, D)), r"k: got shape \(1, 2, 7, 3\).*batch size 2"),
    "q of 3 dimensions": (
        dict(q=r(3, H, M, D)),
        r"q: got shape \(4, 5, 3\), expected 4 dimensions",
    ),
    "mask of other batch": (dict(mask=r(3, 5, 1, M, N)), r"mask: got shape \(5, 1, 5, 7\)"),
    "lengths": (dict(key_lengths=torch.ones(3, 5).long()), r"key_lengths: got shape \(5,\)"),
    "slopes": (dict(alibi_slopes=r(3, 5, H)), r"alibi_slopes: got shape \(5, 4\)"),
}


def attend(given):
    q, k, v = (given.pop(x) for x in ("q", "k", "v"))
    return fastattn.attention(q, k, v, **given)


@pytest.mark.parametrize("name", VMAPPED)
def test_bad_input_under_vmap_is_reported_per_call(name):
    changes, message = VMAPPED[name]
    given = dict(q=r(3, B, H, M, D), k=r(3, B, HK, N, D), v=r(3, B, HK, N, DV)) | changes
    with pytest.raises(ValueError, match=message):
        torch.func.vmap(attend)(given)


def test_weights_without_keys_name_k_in_the_error():
    with pytest.raises(TypeError, match="k: got NoneType"):
        fastattn.attention_weights(r(B, H, M, D), None)


def test_a_non_tensor_raises_inside_forward_mode_too():
    with torch.autograd.forward_ad.dual_level(), pytest.raises(TypeError, match="q: got str"):
        fastattn.attention("q", r(B, H, M, D), r(B, H, M, D))
