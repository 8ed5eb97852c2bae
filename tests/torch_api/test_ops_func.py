"""A call under torch.func: grad, vjp, jacrev and vmap."""

import pytest
import torch
import torch._dynamo.testing
from torch.func import grad, vmap

import fastattn
from tests.support.torch_calls import close, everything, inputs

pytestmark = pytest.mark.usefixtures("one_thread")  # threads would only wait for each other


MAPPED = ("q", "k", "v", "mask", "key_lengths", "alibi_slopes", "sinks")


def mapped_call(f, names, dropout_p=0.0):
    """One call per index of a new dimension of the named tensors, and the same by vmap."""
    q, k, v = inputs()
    rest = everything(dropout_p=dropout_p)
    fixed = {n: rest.pop(n) for n in ("causal", "window", "softcap", "dropout_p", "seed", "scale")}
    tensors = dict(q=q, k=k, v=v, **rest)
    stacked, dims = {}, {}
    for at, name in enumerate(names):
        x = tensors[name]
        others = [x.clamp(max=5), x] if x.dtype == torch.int64 else [x * 0.5, x + 0.25]
        dims[name] = at % (x.ndim + 1)  # the new dimension at various positions
        stacked[name] = torch.stack([x, *others], dim=dims[name])

    def one(chosen):
        given = tensors | chosen
        return f(given.pop("q"), given.pop("k"), given.pop("v"), **given, **fixed)

    def each():
        picks = [{n: x.select(dims[n], i) for n, x in stacked.items()} for i in range(3)]
        return torch.stack([one(pick) for pick in picks])

    return each, lambda: vmap(one, in_dims=(dims,))(stacked), one, stacked, dims


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("names", [MAPPED, MAPPED[:3], *((n,) for n in MAPPED)], ids="+".join)
def test_vmap_over_any_tensor(attention, names, dropout_p):
    each, mapped, *_ = mapped_call(attention, names, dropout_p)
    close(mapped(), each())


@pytest.mark.parametrize(
    "names", [MAPPED[:3], ("q", "mask"), ("sinks",), ("k", "sinks")], ids="+".join
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_vmap_of_grad(attention, names, dropout_p):
    _, _, one, stacked, dims = mapped_call(attention, names, dropout_p)
    _, _, exact, *_ = mapped_call(fastattn.reference.attention, names, dropout_p)
    found = vmap(grad(lambda x: one(x).sin().sum()), in_dims=(dims,))(stacked)
    for name in names:
        wanted = [
            grad(lambda x: exact(x).sin().sum())(
                {n: x.select(dims[n], i) for n, x in stacked.items()}
            )[name]
            for i in range(3)
        ]
        close(found[name], torch.stack(wanted))


def test_grad_through_vmap_and_nested_vmap(attention):
    q, k, v = inputs()
    qs = torch.stack([q, 2 * q, -q])

    def total(qs):
        return vmap(lambda q: attention(q, k, v))(qs).square().sum()

    exact = torch.stack([
        grad(lambda q: fastattn.reference.attention(q, k, v).square().sum())(q) for q in qs
    ])  # fmt: skip
    close(grad(total)(qs), exact)
    leaf = qs.clone().requires_grad_()
    total(leaf).backward()
    close(leaf.grad, exact)
    pairs = torch.stack([qs, qs + 1])
    found = vmap(vmap(lambda q: attention(q, k, v)))(pairs)
    close(found, torch.stack([torch.stack([attention(q, k, v) for q in row]) for row in pairs]))


def test_vmap_of_weights_and_their_gradient(attention):
    q, k, _ = inputs()
    qs = torch.stack([q, 2 * q])

    def weights(q):
        return fastattn.attention_weights(q, k, causal=True, backend=attention.backend)

    close(vmap(weights)(qs), torch.stack([weights(q) for q in qs]))
    f = grad(lambda q: weights(q).square().sum())
    close(vmap(f)(qs), torch.stack([f(q) for q in qs]))


def test_vmap_with_a_drawn_seed_follows_the_randomness_flag(attention):
    q, k, v = inputs()
    qs = torch.stack([q, q])

    def drop(q):
        return attention(q, k, v, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="random"):
        vmap(drop)(qs)
    a, b = vmap(drop, randomness="same")(qs)
    assert a.equal(b)
    a, b = vmap(drop, randomness="different")(qs)
    assert not a.equal(b)
