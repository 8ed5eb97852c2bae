"""Helpers for the tests of fastattn.MultiheadAttention: compare torch's module with ours."""

import itertools
import random
import warnings

import torch
from torch import nn

import fastattn

L, S, N, E, H = 5, 7, 3, 12, 4


def twins(seed=0, **options):
    """torch's module and ours from the same seed; biases are random too, so that none is 0."""
    modules = []
    for kind in (nn.MultiheadAttention, fastattn.MultiheadAttention):
        torch.manual_seed(seed)
        module = kind(E, H, **options)
        for bias in (module.in_proj_bias, module.out_proj.bias):
            if bias is not None:
                nn.init.normal_(bias)
        modules.append(module)
    return modules


def causal_mask(rows, keys):
    return torch.ones(rows, keys, dtype=torch.bool).triu(1)


# -- a grid of options, drawn so that every pair of choices occurs ------------------------------

CHOICES = {
    "batch_first": (True, False),
    "bias": (True, False),
    "kdim": (False, True),
    "add_bias_kv": (False, True),
    "add_zero_attn": (False, True),
    "train": (True, False),
    "batched": (True, False),
    "inputs": ("self", "encoder-decoder", "three"),
    "attn_mask": ("none", "bool 2-D", "bool 3-D", "float 2-D", "float 3-D", "causal hint"),
    "padding": ("none", "bool", "float"),
    "weights": ("none", "average", "per head"),
}


def sample_grid(count):
    rows = random.Random(0).sample(list(itertools.product(*CHOICES.values())), count)
    names = list(CHOICES)
    for (a, x), (b, y) in itertools.combinations(enumerate(names), 2):
        missing = set(itertools.product(CHOICES[x], CHOICES[y])) - {(r[a], r[b]) for r in rows}
        assert not missing, f"no case has {x}, {y} = {missing}: draw more"
    return [dict(zip(names, row, strict=True)) for row in rows]


GRID = sample_grid(500)


def mask_for(kind, shape, generator, dtype):
    """A mask under which every row sees key 0: torch gives NaN for a row that sees nothing."""
    if kind.startswith("float"):
        mask = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        mask[torch.rand(shape, generator=generator) < 0.2] = -torch.inf
        mask[..., 0] = 0.5
        return mask.requires_grad_()
    mask = torch.rand(shape, generator=generator) < 0.4
    mask[..., 0] = False
    return mask


def build(case, dtype):
    """(torch's module, ours, positional inputs, keyword inputs) of one case."""
    options = {x: case[x] for x in ("batch_first", "bias", "add_bias_kv", "add_zero_attn")}
    self_attention = case["inputs"] == "self"
    kdim, vdim = (E if self_attention else 8, 10 if case["inputs"] == "three" else 8)
    if case["kdim"] and not self_attention:
        options |= {"kdim": kdim, "vdim": vdim}
    else:
        kdim = vdim = E
    modules = [m.to(dtype).train(case["train"]) for m in twins(**options)]
    g = torch.Generator().manual_seed(1)

    def sequence(length, width):
        shape = (length, width) if not case["batched"] else (length, N, width)
        x = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
        if case["batched"] and case["batch_first"]:
            x = x.transpose(0, 1).contiguous()
        return x.requires_grad_()

    query = sequence(L, E)
    keys = L if self_attention else S
    key = query if self_attention else sequence(keys, kdim)
    value = sequence(keys, vdim) if case["inputs"] == "three" else key
    kwargs = {
        "need_weights": case["weights"] != "none",
        "average_attn_weights": case["weights"] == "average",
    }
    kind = case["attn_mask"]
    if kind == "causal hint":
        kwargs |= {"attn_mask": causal_mask(L, keys), "is_causal": True}
    elif kind != "none":
        copies = N * H if case["batched"] else H
        shape = (L, keys) if kind.endswith("2-D") else (copies, L, keys)
        kwargs["attn_mask"] = mask_for(kind, shape, g, dtype)
    if case["padding"] != "none":
        shape = (N, keys) if case["batched"] else (keys,)
        kwargs["key_padding_mask"] = mask_for(case["padding"], shape, g, dtype)
    return *modules, (query, key, value), kwargs


def run(module, inputs, kwargs, backward=True):
    """All results of a call, by name: outputs, and the gradient of every leaf."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # masks of two kinds are deprecated, and in the grid
        out, weights = module(*inputs, **kwargs)
    results = {"out": out} if weights is None else {"out": out, "weights": weights}
    if not backward:
        return results
    g = torch.Generator().manual_seed(2)
    loss = sum(
        (x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x)).sum()
        for x in results.values()
    )
    leaves = dict(module.named_parameters())
    leaves |= dict(zip(("query", "key", "value"), inputs, strict=True))
    leaves |= {x: y for x, y in kwargs.items() if getattr(y, "requires_grad", False)}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return results | {f"d{x}": y for x, y in zip(leaves, grads, strict=True)}


def assert_same(got, expected, tolerance):
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        if want is None:
            assert got[name] is None, name
            continue
        assert got[name].dtype == want.dtype and got[name].shape == want.shape, name
        size = want.abs().max().item() if want.numel() else 0.0
        torch.testing.assert_close(
            got[name], want, rtol=0, atol=tolerance * (1 + size), msg=lambda m, n=name: f"{n}: {m}"
        )


def spy_on_attention(monkeypatch):
    """A list that receives the keyword arguments of every fused call that modules make. All take
    the general path, to be seen."""
    calls, real = [], fastattn.dropin.multihead.api.attend
    monkeypatch.setattr(fastattn.dispatch.fast_path, "attend", lambda *args: None)

    def spy(q, k, v, **kwargs):
        calls.append(kwargs | {"q": q, "k": k, "v": v})
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(fastattn.dropin.multihead.api, "attend", spy)
    return calls
