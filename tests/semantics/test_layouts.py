"""Tensors that are not plain strided memory: those with a dense meaning are read as dense, others
are refused by name, even if a call of the same kind is cached."""

import pytest
import torch

import fastattn

BACKENDS = [name for name, why in fastattn.available_backends().items() if why is None]
B, H, M, N, D = 2, 4, 5, 7, 3

# ------------------------------------------------------------------------------- other layouts

LAYOUTS = {
    "sparse COO": lambda x: x.to_sparse(),
    "sparse CSR": lambda x: x.to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
}
NAMES = ("q", "k", "v", "mask", "key_lengths", "alibi_slopes", "sinks", "seed", "lse")
MADE = [  # the combinations that torch can make
    (name, layout)
    for name in NAMES
    for layout in LAYOUTS
    if not (layout == "sparse CSR" and name in ("key_lengths", "sinks", "seed"))  # 1-D
    and not (layout == "mkldnn" and name in ("key_lengths", "seed"))  # integers
]


def arguments(dtype=torch.float32):
    def rand(*shape):
        return torch.randn(*shape, dtype=dtype)

    return dict(
        q=rand(B, H, M, D),
        k=rand(B, H, N, D),
        v=rand(B, H, N, D),
        mask=rand(M, N),
        key_lengths=torch.tensor([3, 4]),
        alibi_slopes=rand(B, H),
        sinks=rand(H),
        seed=torch.tensor([3]),
        lse=rand(B, H, M),
        dropout_p=0.5,
    )


def attend(q, k, v, lse=None, **rest):
    return fastattn.attention(q, k, v, **rest)


def weigh(q, k, v=None, **rest):
    return fastattn.attention_weights(q, k, **rest)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    "call, name, layout",
    [
        (call, *made)
        for call, lacks in ((attend, "lse"), (weigh, "v"))
        for made in MADE
        if made[0] != lacks
    ],
)
def test_other_layouts_are_refused(call, name, layout):
    odd = LAYOUTS[layout](arguments()[name])
    kind = layout if layout in ("nested", "jagged") else str(odd.layout)
    for given in (arguments(), {x: y for x, y in arguments().items() if x in ("q", "k", "v")}):
        call(**given)
        for grads in (False, True):
            given["q" if name == "k" else "k"].requires_grad_(grads)
            with pytest.raises(TypeError, match=f"^{name}: got a .*{kind}.*, expected a dense"):
                call(**(dict(dropout_p=0.5) | given | {name: odd}))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    "name, layout", [made for made in MADE if made[0] in ("q", "k", "v", "mask")]
)
def test_other_layouts_are_refused_in_torchs_form(name, layout):
    given = arguments()
    for mask in (given["mask"], None)[: 1 if name == "mask" else 2]:
        odd = given | dict(mask=mask) | {name: LAYOUTS[layout](given[name])}
        with pytest.raises(TypeError, match=r"got a .*, expected a dense"):
            fastattn.scaled_dot_product_attention(odd["q"], odd["k"], odd["v"], odd["mask"])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["sparse COO", "sparse CSR", "mkldnn"])
@pytest.mark.parametrize("name", ["query", "key", "value", "key_padding_mask", "attn_mask"])
def test_other_layouts_are_refused_in_the_module(name, layout):
    shapes = dict(query=(B, M, H), key=(B, N, H), value=(B, N, H), key_padding_mask=(B, N))
    given = {x: torch.zeros(shape) for x, shape in (shapes | dict(attn_mask=(M, N))).items()}
    given[name] = LAYOUTS[layout](given[name])
    module = fastattn.MultiheadAttention(H, 2, batch_first=True)
    with pytest.raises(TypeError, match=f"{name}: got a .*, expected a dense"):
        module(**given)


# ----------------------------------------------------------------- zeros and signs not yet written

FORMS = {
    "zeros that are no memory": (torch.zeros_like, lambda x: efficient_zero(x)),
    "a sign to be changed": (torch.neg, lambda x: torch._neg_view(x)),
}


def efficient_zero(x):
    """Zeros without storage, which autograd makes as the gradient of unused results."""
    return torch._efficientzerotensor(x.shape, dtype=x.dtype)


def gradients(backend, given, dout, dlse):
    leaves = {x: given[x].detach().requires_grad_() for x in ("q", "k", "v", "mask", "sinks")}
    out, lse = attend(**(given | leaves), backend=backend, return_lse=True)
    return torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))


LAZY = [
    (name, form)
    for name in NAMES
    for form in FORMS
    if form != "a sign to be changed" or name not in ("key_lengths", "seed")
]


@pytest.mark.parametrize("name, form", LAZY)
@pytest.mark.parametrize("backend", BACKENDS)
def test_lazy_values_are_read(backend, name, form):
    written, lazy = FORMS[form]
    given = arguments()
    plain, odd = (given | {name: make(given[name])} for make in (written, lazy))
    for call in (attend, weigh):
        torch.testing.assert_close(call(**odd, backend=backend), call(**plain, backend=backend))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["dout", "dlse", "both"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lazy_gradients_are_read(backend, name, form):
    given = arguments()
    grads = dict(dout=torch.randn(B, H, M, D), dlse=torch.randn(B, H, M))
    pairs = []
    for make in FORMS[form]:
        made = {x: make(y) if name in (x, "both") else y for x, y in grads.items()}
        pairs.append(gradients(backend, given, **made))
    for plain, odd in zip(*pairs):
        torch.testing.assert_close(odd, plain)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_lazy_gradients_of_weights_are_read(backend, form):
    given, found = arguments(), []
    dweights = torch.randn(B, H, M, N)
    for make in FORMS[form]:
        q = given["q"].detach().requires_grad_()
        weights = weigh(**(given | dict(q=q)), backend=backend)
        found += torch.autograd.grad(weights, q, make(dweights))
    torch.testing.assert_close(*found)
