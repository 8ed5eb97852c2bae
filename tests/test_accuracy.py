"""What rounding leaves of float32: as much at a large head dim as at a small one, whose dot
products are as long as one chain of sums may be."""

import pytest
import torch
from cases import Dims, build
from runners import of_cpu_blocks, variant, variants

import fastattn

pytestmark = of_cpu_blocks
ROWS, KEYS = 64, 400


def errors(d):
    """name -> |x - oracle| / |oracle| of out and the gradients."""
    problem = build(Dims(1, 2, 2, ROWS, KEYS, d, d), (), torch.float32)
    exact = problem.to(torch.float64).run(fastattn.reference.attention)
    found = problem.run(fastattn.attention, backend="cpu")
    return {x: float((found[x] - exact[x]).norm() / exact[x].norm()) for x in exact}


@pytest.mark.parametrize("isa", variants("cpu", torch.float32))
def test_does_not_grow_with_the_head_dim(isa, one_thread):
    with variant(isa):
        least = errors(64)
        for d in (97, 128, 256, 511):
            for name, error in errors(d).items():
                assert error <= 1.25 * least[name], (d, name, least[name])
