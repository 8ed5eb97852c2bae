"""Small calls in float64, with every feature, for tests of torch's machinery around a call."""

import torch

from fastattn.call.spec import Options, Tensors
from fastattn.dispatch.operation import FORWARD
from fastattn.dispatch.run_pass import arguments


def rand(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator)


def inputs(B=2, H=4, Hk=2, M=5, N=7, D=3, Dv=4, dtype=torch.float64):
    return tuple(
        rand(*shape, dtype=dtype, seed=seed)
        for seed, shape in enumerate([(B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv)])
    )


def everything(H=4, M=5, N=7, B=2, dtype=torch.float64, dropout_p=0.3):
    """Every feature in one call."""
    return dict(
        mask=rand(H, M, N, dtype=dtype, seed=7),
        causal="bottom_right",
        window=(4, None),
        key_lengths=torch.tensor([N, N - 2] * (B // 2) + [N] * (B % 2)),
        alibi_slopes=rand(B, H, dtype=dtype).abs(),
        softcap=2.0,
        sinks=rand(H, dtype=dtype),
        dropout_p=dropout_p,
        seed=11 if dropout_p else None,
        scale=0.7,
    )


def op_arguments(grads=True, v=True, normaliser=False, average=False):
    q, k, value = inputs(dtype=torch.float32)
    mask, sinks = rand(4, 5, 7, dtype=torch.float32), rand(4, dtype=torch.float32)
    for x in (q, k, value, mask, sinks):
        x.requires_grad_(grads)
    given = rand(2, 2, 4, 5, dtype=torch.float32) if normaliser else None
    beside = dict(mask=mask, key_lengths=torch.tensor([7, 5]), sinks=sinks, seed=torch.tensor([3]))
    t = Tensors(q, k, value if v else None, **beside, normaliser=given)
    o = Options(scale=0.5, causal="top_left", left=4, softcap=2.0, dropout_p=0.25, grad=grads)
    return tuple(arguments(FORWARD, t, o._replace(average_heads=average)))


def close(a, b):
    torch.testing.assert_close(a, b)
