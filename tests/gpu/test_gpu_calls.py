"""On a GPU: rates of dropout, weights, decoding with split keys."""

import pytest
import torch

import fastattn
from tests.semantics.test_weights import Averaged, ask, with_identity
from tests.support.cases import FEATURE, PLAIN, Dims, name_of, negative_logits, square
from tests.support.error_budget import Verdict
from tests.support.gpu import (
    DIM,
    DTYPES,
    EVERYTHING,
    attend,
    build,
    check,
    compiled,  # noqa: F401  a fixture
    judged,
    on_device,
    on_every_backend,
    on_gpu,
)

pytestmark = [*on_gpu, pytest.mark.usefixtures("compiled")]


# ----------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("p", [0.01, 0.5, 0.99, 1.0])
@judged
def test_dropout_rates(name, p):
    problem = build(square(2, 2, 97, 64), (FEATURE["dropout"], FEATURE["gqa"]), torch.bfloat16)
    problem.kwargs["dropout_p"] = p
    check(name, [problem])


# ----------------------------------------------------------------------------------------- weights

WEIGHED = ("causal", "window", "lengths", "alibi", "softcap", "bool_mask", "key_bias_grad")
WEIGHED += ("bias_grad", "sinks", "dropout", "gqa", "no_scale", "column_major", "many_queries")
WEIGHED = [PLAIN, *((FEATURE[x],) for x in WEIGHED)]
WEIGHED += [tuple(FEATURE[x] for x in ("bottom_right", "lengths", "softcap", "dropout", "sinks"))]


AVERAGED = (0, 3, 7, 10, len(WEIGHED) - 1)  # plain, lengths, a bias of keys, dropout, several


@pytest.mark.parametrize(
    "at, average",
    [*((at, False) for at in range(len(WEIGHED))), *((at, True) for at in AVERAGED)],
    ids=lambda x: name_of(WEIGHED[x]) if type(x) is int else ("mean" if x else "per_head"),
)
@judged
def test_weights(name, at, average):
    """Weights per head or averaged, with gradients; each feature in one of the dtypes."""
    dtype = list(DTYPES)[at % 3]
    dims = [square(2, 2, 97, DIM[dtype])]
    if not at:
        dims.append(Dims(2, 4, 2, 129, 203, DIM[dtype], DIM[dtype]))
    problems = [with_identity(build(x, WEIGHED[at], DTYPES[dtype]), average) for x in dims]
    check(
        name,
        problems,
        run=lambda problem, name: ask(problem, name, average),
        verdict=Averaged if average else Verdict,
    )


@on_every_backend
def test_a_given_lse_gives_the_same_weights(name):
    problem = on_device(build(square(2, 2, 97, 64), (FEATURE["causal"],), torch.bfloat16))
    q, k, v = problem.q, problem.k, problem.v
    _, lse = fastattn.attention(q, k, v, causal=True, return_lse=True, backend=name)
    given = fastattn.attention_weights(q, k, lse=lse, causal=True, backend=name)
    found = fastattn.attention_weights(q, k, causal=True, backend=name)
    torch.testing.assert_close(given, found)
    ones = torch.ones(2, 2, 97, device=q.device)
    torch.testing.assert_close(given.float().sum(-1), ones, rtol=0, atol=2e-2)


# ---------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("causal", [False, "bottom_right"])
@pytest.mark.parametrize("window", [None, (300, 0), (40, 40)], ids=str)
@judged
def test_decoding_up_to_each_length(name, causal, window):
    """Some splits have no key, one has a single key, and a window begins inside another."""
    lengths = torch.tensor([1500, 0, 1, 63, 64, 65, 700, 1499])
    problems = []
    for m in (1, 7):
        problem = build(Dims(8, 4, 1, m, 1500, 64, 64), (FEATURE["lse_loss"],), torch.bfloat16)
        problem.kwargs |= dict(key_lengths=lengths, causal=causal, window=window)
        for b, length in enumerate(lengths.tolist()):
            problem.k[b, :, length:] = torch.nan
            problem.v[b, :, length:] = torch.nan
        problems += [problem, negative_logits(problem)]
    check(name, problems)


@on_every_backend
def test_a_call_without_gradients_is_the_same(name):
    problem = on_device(build(Dims(2, 4, 2, 5, 1500, 64, 64), EVERYTHING, torch.bfloat16))
    trained = attend(problem, name)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = problem.run(fastattn.attention, backward=False, backend=name)
        assert torch.equal(found["out"], trained["out"]), mode.__name__
