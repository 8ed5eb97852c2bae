"""Slices: named groups of edge-case problems, at sizes that the generated cases do not have.

The CPU's kernels take 128 keys at a time, a block (kTileKeys); in decoding, a task has a chunk of
512 keys (kChunkKeys in decode.h). `negative_logits` puts every logit near -32: a hidden key that
counts, with a logit of zero, then takes the whole row.
"""

from dataclasses import replace

import torch

from tests.support.cases import FEATURE, Dims, build, negative_logits, square


def length_edges(dtype):
    """Key lengths at every edge of a block of keys, one below and one above."""
    # 64: a chunk of AMX tiles in bfloat16; 128: a block of keys; 256: a block of AMX tiles.
    edges = [n + e for n in (0, 64, 128, 256) for e in (-1, 0, 1) if n + e >= 0]
    # 259 keys are more than the largest length.
    for m, features in ((5, ()), (1, (FEATURE["gqa"],)), (40, (FEATURE["bottom_right"],))):
        problem = build(Dims(len(edges), 1, 1, m, 259, 8, 8), features, dtype)
        lengths = torch.tensor(edges)
        for b, length in enumerate(edges):  # a kernel that reads a key past the length gets NaN
            problem.k[b, :, length:] = problem.v[b, :, length:] = torch.nan
        yield replace(problem, kwargs=problem.kwargs | dict(key_lengths=lengths))


def far_bands(dtype):
    """Bands that begin and end far from the first key, inside a block or a group."""
    # The last row's own key is the last of 711, and every row's own key is in the sixth block of
    # keys. Windows of 130, 255 and 301 keys begin in earlier blocks.
    for rows, window in ((70, (5, 3)), (33, (130, 1)), (37, (255, 0)), (1, (66, 0)), (3, (301, 0))):
        problem = build(Dims(1, 2, 1, rows, 711, 8, 8), (), dtype)
        problem.kwargs |= dict(causal="bottom_right", window=window)
        problem.name += f":window{window}"
        yield negative_logits(problem)


def band_widths(dtype):
    """Bands of every width up to 70, each as wide as there are rows."""
    for width in range(1, 71):
        problem = build(Dims(1, 1, 1, width, 75, 8, 8), (), dtype)
        left = width * 7 % (width + 1)  # width - 6 from width 6 on
        problem.kwargs["window"] = (left, width - left)
        problem.name += f":window({left}, {width - left})"
        yield problem


def strips(dtype):
    """Bands that end at the edges of the CPU's vectors of rows, and one to three keys after them. A
    tile's keys are cut where a vector begins or ends to see them (`Strips` in visible_keys.h)."""
    # The last row's own key is the last one: the diagonal is 0, 1, 2, 5, 15 and 65 keys off.
    for m, n in ((37, 37), (40, 41), (33, 35), (40, 45), (33, 48), (66, 131)):
        for window in (None, (9, 0), (4, 7)):
            problem = build(Dims(1, 2, 1, m, n, 16, 23), (), dtype)
            problem.kwargs |= dict(causal="bottom_right", window=window)
            if window == (4, 7):
                problem.kwargs["causal"] = False
            problem.name += f":{m} rows, {n} keys, window {window}"
            yield negative_logits(problem)
    # The window of the last rows begins after the last key, in the middle of a group of four.
    problem = build(Dims(1, 2, 1, 70, 30, 16, 23), (), dtype)
    problem.kwargs |= dict(window=(9, 0))
    problem.name += ":rows after the last key"
    yield negative_logits(problem)


def weak_softcap(dtype):
    """A cap far above the scores: tanh is nearly the identity, and its derivative nearly 1."""
    # 37 rows run the kernels of many rows; one query runs those of decoding.
    for features in ((), (FEATURE["one_query"],)):
        problem = build(square(1, 2, 37, 16), features, dtype)
        yield replace(problem, kwargs=problem.kwargs | dict(softcap=1e4), name="softcap 1e4")


def triangles(dtype):
    """Triangular bool masks: the first row shows every key or nearly none, other rows differ."""
    # 150 keys are a block of 128 and a part of the next.
    for m, upper in ((37, False), (37, True), (13, True)):
        problem = build(Dims(1, 2, 1, m, 150, 8, 8), (), dtype)
        mask = torch.ones(m, 150, dtype=torch.bool)
        mask = mask.triu() if upper else mask.tril()
        yield replace(problem, kwargs=dict(mask=mask), name=f"{'triu' if upper else 'tril'} of {m}")


def far_draws(dtype):
    """Dropout where the index of a row, key, head or item is large: above 2^16 for rows and keys,
    above 2^8 for heads and items."""
    for dims in (Dims(1, 1, 1, 70_000, 4, 2, 2), Dims(1, 1, 1, 2, 70_000, 2, 2)):
        yield build(dims, (FEATURE["dropout"],), dtype)
    yield build(Dims(1, 300, 300, 3, 4, 2, 2), (FEATURE["dropout"],), dtype)
    yield build(Dims(300, 1, 1, 3, 4, 2, 2), (FEATURE["dropout"],), dtype)


def grouped_rows(dtype):
    """Few keys for many rows of grouped heads. The CPU's backward.h splits the rows into segments
    and adds their dK and dV (`segments` in gradient.h)."""
    yield build(Dims(1, 4, 1, 300, 40, 8, 8), (FEATURE["causal"],), dtype)


def shared_heads(dtype):
    """Few rows of many grouped heads. In the CPU's forward.h several heads make one task
    (`heads_per_task`); the last task of a key head has fewer."""
    # 5 heads share a key head, which tasks of 2 to 4 heads do not divide. 10 rows do not fill a
    # tile, and are more rows than few_rows.h takes.
    for names in (("causal", "alibi"), ("head_bias_grad", "dropout"), ("lengths", "sinks"), ()):
        features = tuple(FEATURE[name] for name in names)
        yield build(Dims(2, 10, 2, 10, 300, 16, 24), features, dtype)


def tile_edges(dtype, *names):
    """Rows and keys at the edges of steps and tiles of 16, 32 and 128; head dims around 32n."""
    features = tuple(FEATURE[name] for name in names)
    edges = (1, 16, 32), (15, 17, 31), (31, 33, 32), (33, 47, 64), (97, 65, 96), (129, 31, 65)
    for m, n, d in edges:
        problem = build(Dims(1, 2, 1, m, n, d, d), features, dtype)
        # A kernel that reads past the keys of a head gets NaN. Keys that are not contiguous have
        # the layout of a feature, which a copy would lose.
        if problem.k.is_contiguous():
            problem.k, problem.v = (inside_nan(x) for x in (problem.k, problem.v))
        yield problem
        yield negative_logits(problem)


def inside_nan(x):
    """The values of x, with NaN before and after the keys of each head."""
    wide = torch.full((*x.shape[:2], x.shape[2] + 80, x.shape[3]), torch.nan, dtype=x.dtype)
    wide[:, :, 40:-40] = x
    return wide[:, :, 40:-40]


def with_nan_behind(problem, lengths):
    """The problem with NaN for keys and values at and past these lengths, one for each item."""
    k, v = problem.k.clone(), problem.v.clone()
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:] = v[b, :, length:] = torch.nan
    return replace(problem, k=k, v=v)


def expanded(problem):
    """The problem with keys of one head, and values and queries of one item, by strides of 0."""
    return replace(
        problem,
        k=problem.k[:, :1].expand_as(problem.k),
        v=problem.v[:1].expand_as(problem.v),
        q=problem.q[:1].expand_as(problem.q),
    )


def rising(dtype):
    """Logits that climb by 100 along the keys in every other row and fall in the rows between, and
    a single logit at one of the last keys that is 160 more than the others."""
    # Logits are near 16 * 2 * climb / sqrt(16), and climb ends at 12.8.
    for m, heads in ((70, 2), (3, 4), (1, 6)):
        problem = build(Dims(1, heads, 1, m, 512, 16, 16), (), dtype)
        signs = 1.0 - 2 * ((torch.arange(heads)[:, None] + torch.arange(m)) % 2)
        problem.q[:] = (problem.q.double() * 0.1 + 2 * signs[..., None]).to(dtype)
        climb = torch.arange(512).div(40)[:, None]
        problem.k[:] = (problem.k.double() * 0.1 + climb).to(dtype)
        problem.name += ":rising"
        yield problem
    # Of 67 keys, the last 7: before and after the edge at 64. Its logit is 16 * 2 * 20 / sqrt(16).
    for key in range(60, 67):
        problem = build(Dims(1, 1, 1, 37, 67, 16, 16), (), dtype)
        problem.q[:] = (problem.q.double() * 0.1 + 2).to(dtype)
        problem.k[:] *= 0.1
        problem.k[:, :, key] = 20
        problem.name += f":largest at {key}"
        yield problem


# test_features.py runs these slices on every backend.
SLICES = {
    "length_edges": length_edges,
    "far_bands": far_bands,
    "band_widths": band_widths,
    "strips": strips,
    "weak_softcap": weak_softcap,
    "triangles": triangles,
    "far_draws": far_draws,
    "grouped_rows": grouped_rows,
    "shared_heads": shared_heads,
    "tile_edges": tile_edges,
    "rising": rising,
}
