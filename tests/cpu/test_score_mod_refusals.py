"""Indices out of range, and texts that no program has, in score_mods of the CPU's kernels."""

import pytest
import torch

import fastattn
from fastattn import api
from fastattn.dispatch.operation import FORWARD
from fastattn.dispatch.run_pass import arguments
from fastattn.score_mods.lowering import Begin, lower
from fastattn.score_mods.mod_text import ModText
from fastattn.score_mods.recognition import Shape
from fastattn.score_mods.tracing import trace_score_mod
from tests.cpu.test_score_mods import DTYPES, EVERY, TABLE, B, H, M, N, tensors
from tests.support.backends import variant


@pytest.mark.parametrize("isa, dtype", EVERY)
def test_an_index_out_of_range_raises_where_it_is_seen(isa, dtype):
    q, k, v = tensors(DTYPES[dtype])
    small = TABLE[:, :M].clone()
    with variant(isa):
        with pytest.raises(IndexError, match="out of range"):
            fastattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + small[h, i - j + 30])
        hidden = lambda s, b, h, i, j: s + small[h, i - j]  # noqa: E731
        out = fastattn.attention(q, k, v, score_mod=hidden, causal=True)
        table = torch.cat([small, torch.zeros(H, N)], 1)
        same = lambda s, b, h, i, j: s + table[h, (i - j).clamp(min=0)]  # noqa: E731
        assert torch.equal(out, fastattn.attention(q, k, v, score_mod=same, causal=True))


def test_nothing_outside_of_a_table_is_read():
    """An operator that is called with another table than the one its program was made for."""
    q, k, v = (x.detach() for x in tensors(torch.float32))
    traced = trace_score_mod(lambda s, b, h, i, j: s + TABLE[h, i - j + N])
    shape = Shape(B, H, M, N)
    lowered = lower(traced.program, None, traced.tensors, shape, torch.float32, Begin())
    run = torch.ops.fastattn.attention
    room = torch.full((5,), 2.0)
    t, o = api.prepare(q, k, v, {})
    t, o = t._replace(captured_floats=room[1:2]), o._replace(score_mod=lowered.text)
    out, _ = run(*arguments(FORWARD, t, o))
    torch.testing.assert_close(out, fastattn.attention(q, k, v))  # 2 is added to each score


REFUSED = {
    "no programs": ("nothing", "programs"),
    "an unknown operator": ("captured float:1 int:1\nread float 0\n\n\n\n", "value 0"),
    "a mask that is no bool": ("\n\ncaptured float:1 int:1\ni int\n\n", "expected bool"),
    "other captured tensors": ("captured float:2 int:1\nscore float\n\n\n\n", "expected"),
    "a mask that reads the score": (
        "\n\ncaptured float:1 int:1\nscore float\nto_bool bool 0\n\n",
        "reads the score",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_operators_refuse_other_texts(case):
    text, said = REFUSED[case]
    q, k, v = tensors(torch.float32, grad=False)
    with pytest.raises(ValueError, match=said):
        t, o = api.prepare(q, k, v, {})
        torch.ops.fastattn.attention(*arguments(FORWARD, t, o._replace(score_mod=text)))


@pytest.mark.parametrize("table", ["float @0", "int @1"])
def test_operators_refuse_loads_of_no_table(table):
    """Kernels clamp indices to a table: there must be one."""
    kind = table.split()[0]
    cast = "\nto_float float 2" if kind == "int" else ""
    last = 3 if cast else 2
    text = "captured float:1 int:1\nscore float\ni int\n" + f"load {table} 1{cast}\n"
    q, k, v = tensors(torch.float32, grad=False)
    t, o = api.prepare(q, k, v, {})
    o = o._replace(score_mod=f"{text}add float 0 {last}\n\n\n\n")
    with pytest.raises(ValueError, match="captured"):
        torch.ops.fastattn.attention(*arguments(FORWARD, t, o))


def test_programs_of_a_call_as_text():
    traced = trace_score_mod(lambda s, b, h, i, j: s + TABLE[h, i - j + N])
    shape = Shape(B, H, M, N)
    text = lower(traced.program, None, traced.tensors, shape, torch.float32, Begin()).text
    assert ModText.parse(text).text() == text
