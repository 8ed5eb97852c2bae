"""A score_mod for each operator of programs, and the indices of programs' values."""

import torch

import fastattn
from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.tracing import trace_score_mod

# s is small, x takes extreme numbers by key; n, m are whole numbers, c and d are conditions.

ON_FLOATS = {
    "add": "s + x / 70", "sub": "s - x / 70", "mul": "s * (x / 70)", "neg": "-s", "abs": "s.abs()",
    "minimum": "torch.minimum(s, x)", "maximum": "torch.maximum(s, x / 70)",
    "where": "torch.where(s > 0, s, 0.5)", "floor_div": "(s * 9) // (x / 35 + 0.3)",
    "remainder": "(s * 9) % (x / 35 + 0.3)", "sign": "torch.sign(s) + torch.sign(x)",
    "div": "s / (x + 9.5)", "pow": "s.abs() ** (x / 70)", "exp": "torch.exp(x.clamp(max=2))",
    "exp of little": "torch.log(torch.exp(x - 15))", "exp2": "torch.exp2(s)",
    "log": "torch.log(s.abs() + 0.1)", "log2": "torch.log2(s.abs() + 0.1)",
    "log1p": "torch.log1p(s.abs() * x.abs())", "log1p of little": "torch.log1p(s * 1e-6) * 1e6",
    "tan": "torch.tan(s)", "softplus": "F.softplus(x * s)", "logsigmoid": "F.logsigmoid(x * s)",
    "softplus, steep": "F.softplus(s, beta=4, threshold=2)",
    "softplus of little": "torch.log(F.softplus(x - 15))",
    "sqrt": "torch.sqrt(s.abs())", "rsqrt": "torch.rsqrt(s.abs() + 0.1)", "sin": "torch.sin(s)",
    "cos": "torch.cos(s)", "tanh": "torch.tanh(x * s)", "sigmoid": "torch.sigmoid(x)",
    "floor": "torch.floor(s * 3)", "ceil": "torch.ceil(s * 3)", "trunc": "torch.trunc(s * 3)",
    "round": "torch.round(s * 3) + torch.round(x)", "erf": "torch.erf(s)", "ge": "(s >= x) * 1.0",
    "gt": "(s > x) * 1.0", "le": "(s <= x) * 1.0", "lt": "(s < x) * 1.0", "eq": "(x == 0) * 1.0",
    "ne": "(x != 0) * 1.0", "to_int": "(x / 9).to(torch.int64) * 0.5", "to_bool": "x.bool() * 1.0",
    "to_float": "(s > 0).float() + (i % 3) * 0.5",
}  # fmt: skip
ON_INTS = {
    "add": "n + m", "sub": "n - m", "mul": "n * m", "neg": "-n", "abs": "n.abs()",
    "minimum": "torch.minimum(n, m)", "maximum": "torch.maximum(n, m)",
    "where": "torch.where(c, n, m)", "floor_div": "n // m", "floor_div by 7": "n // 7",
    "floor_div by 8": "n // 8", "floor_div by -3": "n // -3", "remainder": "n % m",
    "remainder by 7": "n % 7", "remainder by 8": "n % 8", "remainder by -3": "n % -3",
    "remainder by a row's": "n % (i - 9)", "remainder by a key's": "n % (j - 9)",
    "sign": "torch.sign(n)", "shift_left": "(n & 3) << (m & 3)", "shift_right": "n >> (m & 7)",
    "bit_and": "n & m", "bit_or": "n | m", "bit_xor": "n ^ m", "bit_not": "~n",
    "and": "(c & d) * 1", "or": "(c | d) * 1", "xor": "(c ^ d) * 1", "not": "(~c) * 1",
    "ge": "(n >= m) * 1", "gt": "(n > m) * 1", "le": "(n <= m) * 1", "lt": "(n < m) * 1",
    "eq": "(n == m) * 1", "ne": "(n != m) * 1", "to_int": "c.long()", "to_bool": "n.bool() * 1",
    "load": "LIST[n % 50] - LIST[-(j % 50) - 1]",
}  # fmt: skip
LIST = torch.randint(-40, 40, (50,), generator=torch.Generator().manual_seed(11))
EXTREME = torch.tensor([0.0, -0.0, 3.5, -3.5, 1e-30, 70.0, -70.0, 0.5])
NAMES = {"torch": torch, "F": torch.nn.functional, "LIST": LIST}
GIVEN = NAMES | {"EXTREME": EXTREME}


def indices(*sizes, first=(0, 0, 0, 0)):
    """b, h, i and j of every pair of a call, of these numbers of items, heads, rows and keys."""
    return {
        name: (at + torch.arange(n)).view([n if x == dim else 1 for x in range(4)])
        for dim, (name, at, n) in enumerate(zip("bhij", first, sizes))
    }


def function_of(text, whole):
    if whole:
        where = "(lambda n, m, c, d: {0})((i - j) * 3 + h, j - 2 * i + b, (i + j) % 3 == 0, i > j)"
        return eval(f"lambda s, b, h, i, j: s + 0.01 * {where.format(text)}", NAMES)
    return eval(f"lambda s, b, h, i, j: (lambda x: {text})(EXTREME[j % 8].to(s.dtype))", GIVEN)


def share_of_wrong_scores(function, q, k, **how):
    """The share of scores of a call that are not those of the program on torch tensors, in the same
    precision. Products differ in their last bits: a number at the edge of a step may be on either
    side. Scores are found from probabilities: a subnormal one has too few digits."""
    lse = fastattn.attention(q, k, k, return_lse=True, score_mod=function, **how)[1]
    p = fastattn.attention_weights(q, k, lse=lse, score_mod=function, **how)
    found, products = p.log() + lse[..., None], q @ k.mT * q.shape[-1] ** -0.5
    traced = trace_score_mod(function, dtype=q.dtype)
    expected = evaluate(*traced, score=products, **indices(*p.shape)).expand(p.shape).to(q.dtype)
    seen = p > torch.finfo(q.dtype).tiny
    assert seen.any(-1).all()
    bound = 2e-4 if q.dtype == torch.float32 else 1e-8
    wrong = ~torch.isclose(found, expected, rtol=bound, atol=bound) & seen
    return wrong.float().mean()


CASES = [(False, x, y) for x, y in ON_FLOATS.items()] + [(True, x, y) for x, y in ON_INTS.items()]
IDS = [f"{y}, {'ints' if x else 'floats'}" for x, y, _ in CASES]

# Functions of one number for each operator, and for each function of torch that has its own rule at
# a kink. Their derivatives at POINTS are torch's.
POINTS = [torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.0, -2.0, 3.0, 1e-3]
AT_EDGES = {
    "add": "x + 1", "sub": "1 - x", "mul": "x * 0.25", "mul, by itself": "x * x", "neg": "-x",
    "abs": "x.abs()", "minimum": "torch.minimum(x, ONE)", "maximum": "torch.maximum(x, ONE)",
    "maximum, of -inf": "torch.maximum(x, -ONE / 0)", "where": "torch.where(x > 0, x, -torch.inf)",
    "floor_div": "torch.div(x, 1.5, rounding_mode='floor')", "remainder": "x % 1.5",
    "remainder, by it": "torch.remainder(3 * ONE, x)", "sign": "torch.sign(x)", "div": "x / 2",
    "div, by it": "1 / x", "div, by 0": "x / 0.0", "div, by itself": "x / x",
    "pow": "torch.pow(x, 2 * ONE)", "pow, 3": "torch.pow(x, 3 * ONE)", "pow, 0": "x**0",
    "pow, 1": "torch.pow(x, ONE)", "pow, 1/2": "torch.pow(x, ONE / 2)", "pow, -1": "x ** -ONE",
    "pow, -2": "torch.pow(x, -2 * ONE)", "pow, of 2": "2.0**x", "pow, of 1": "1.0**x",
    "pow, of inf": "torch.inf**x", "exp": "torch.exp(x)", "exp2": "torch.exp2(x)",
    "log": "torch.log(x)", "log2": "torch.log2(x)", "log1p": "torch.log1p(x)",
    "softplus": "F.softplus(x)", "softplus, steep": "F.softplus(x, 3.0, 4.0)",
    "softplus, far": "F.softplus(x, 1, 1e9)", "logsigmoid": "F.logsigmoid(x)",
    "tan": "torch.tan(x)", "sqrt": "torch.sqrt(x)",
    "rsqrt": "torch.rsqrt(x)", "sin": "torch.sin(x)", "cos": "torch.cos(x)",
    "tanh": "torch.tanh(x)", "sigmoid": "torch.sigmoid(x)", "erf": "torch.erf(x)",
    "floor": "torch.floor(x)", "ceil": "torch.ceil(x)", "trunc": "torch.trunc(x)",
    "round": "torch.round(x)", "relu": "torch.relu(x)", "clamp": "torch.clamp(x, -1, 2)",
    "clamp, from 0": "x.clamp(min=0)", "hardtanh": "F.hardtanh(x)", "silu": "F.silu(x)",
    "leaky_relu": "F.leaky_relu(x, 0.1)", "gelu": "F.gelu(x)",
    "gelu, by tanh": "F.gelu(x, approximate='tanh')", "fmod": "torch.fmod(x, 1.5)",
    "square": "torch.square(x)", "reciprocal": "torch.reciprocal(x)",
    # A branch that is not taken, below other functions.
    "rsqrt, of a branch": "torch.rsqrt(1 + torch.where(x > 0.7, x, -torch.inf) ** 2)",
    "tanh, of a branch": "torch.tanh(torch.where(x > 0.7, x, torch.inf) * 3)",
    "div, by a branch": "2 / torch.where(x > 0.7, x, 0.0)",
    "sqrt, of a branch": "torch.sqrt(torch.relu(x) + torch.relu(-1 - x))",
    "log, of a branch": "1 / torch.log(x.clamp(min=0) * 2)",
    "exp, of branches": "torch.exp(-torch.where(x > 1, torch.where(x < 3, x, torch.inf), 2 * x))",
    "pow, of a branch": "torch.pow(torch.maximum(x, ONE / 2) - 0.5, ONE / 2)",
}  # fmt: skip


def at_edges(name):
    given = {"torch": torch, "F": torch.nn.functional, "ONE": torch.ones((), dtype=torch.float64)}
    return eval(f"lambda x: {AT_EDGES[name]}", given)


def by_function(function, scores):
    """f, f_x and f_xx of a function of torch tensors, by torch's autograd."""
    given = scores.clone().requires_grad_()
    found = [function(given)]
    for _ in range(2):
        f, grad = found[-1], torch.zeros_like(scores)
        if f.requires_grad:
            (grad,) = torch.autograd.grad(f.sum(), given, create_graph=True, materialize_grads=True)
        found.append(grad)
    return [x.detach() + 0 for x in found]  # a zero of torch's own kind has no numbers
