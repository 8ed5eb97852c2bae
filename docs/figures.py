"""The drawings of the pages. What they show is computed, by the package or as its kernels do it."""

import math

import torch
from svg import WIDTH, Drawing

import fastattn


def tiles():
    """The scores of a causal call in tiles of 4 rows and blocks of 4 keys."""
    cell, rows, at = 40, 6, 3
    picture = Drawing()
    left, top = 64, 34
    picture.text(left, 14, "keys, in blocks: K and V are loaded a block at a time")
    picture.text(8, top + 40, "rows,")
    picture.text(8, top + 54, "in tiles")
    for i in range(rows):
        for j in range(rows):
            kind = "whole" if j < i else "edge" if j == i else "hidden"
            x, y = left + j * cell, top + i * cell
            picture.rect(x + 1, y + 1, cell - 2, cell - 2, kind)
            if i == at and j <= i:
                picture.text(x + cell / 2, y + cell / 2 + 4, str(j + 1), "middle")
    picture.rect(left, top + at * cell, rows * cell, cell, "outline")
    picture.text(left + (rows - 1) * cell - 8, top + at * cell + cell / 2 + 4, "a task", "middle")
    y = top + rows * cell + 12
    for n, (kind, words) in enumerate(
        [("whole", "all seen"), ("edge", "tested"), ("hidden", "skipped")]
    ):
        picture.rect(left + 88 * n, y, 14, 14, kind)
        picture.text(left + 20 + 88 * n, y + 11, words)
    return picture


SCORES = (1.2, 0.3, 2.1, -0.4, 0.9, 3.4, 1.1, 2.6, 0.2, 1.8, -0.8, 2.9)


def online_softmax(scores=SCORES, block=4):
    """One row of scores in blocks, as the kernels go through it. The bars are scores."""
    picture, m, total = Drawing(), -math.inf, 0.0
    width = (WIDTH - 12) / 3
    base, unit = 118, 26
    for n in range(0, len(scores), block):
        part, x0 = scores[n : n + block], 6 + n // block * width
        old, m = m, max(m, *part)
        alpha = math.exp(old - m)
        total = total * alpha + sum(math.exp(s - m) for s in part)
        for j, s in enumerate(part):
            x, tall = x0 + 8 + j * 24, abs(s) * unit
            picture.rect(x, base - tall if s > 0 else base, 18, tall, "whole")
        picture.line(x0 + 2, base - m * unit, x0 + width - 8, base - m * unit, "dashed")
        picture.line(x0 + 2, base, x0 + width - 8, base)
        words = [
            f"block {n // block + 1}",
            f"m = {m:.1f}",
            f"rescale {alpha:.3f}",
            f"l = {total:.3f}",
        ]
        for k, text in enumerate(words):
            picture.text(x0 + 4, base + 40 + 16 * k, text, kind="strong" if k == 0 else "")
    exact = sum(math.exp(s - max(scores)) for s in scores)
    assert math.isclose(total, exact, rel_tol=1e-12)
    picture.text(6, base + 116, f"The sum of all twelve at once, exp(s - 3.4): {exact:.3f}")
    return picture


def _grid(picture, x, y, title, seen, cell=13.0):
    picture.text(x, y - 6, title)
    for i, row in enumerate(seen.tolist()):
        for j, visible in enumerate(row):
            kind = "whole" if visible else "hidden"
            picture.rect(x + j * cell, y + i * cell, cell - 1.5, cell - 1.5, kind, 1.5)


def masks():
    """Which of eight keys (columns) each of six rows sees, by `fastattn.attention_weights`."""
    q, k = torch.zeros(1, 1, 6, 4), torch.zeros(1, 1, 8, 4)
    lengths = torch.tensor([5])
    calls = [
        ("causal=True", dict(causal=True)),
        ('causal="bottom_right"', dict(causal="bottom_right")),
        ("window=(2, 1)", dict(window=(2, 1))),
        ("key_lengths=[5]", dict(key_lengths=lengths)),
        ("causal, window=(2, 0)", dict(causal=True, window=(2, 0))),
        ("bottom_right, lengths [5]", dict(causal="bottom_right", key_lengths=lengths)),
    ]
    picture = Drawing()
    for n, (title, arguments) in enumerate(calls):
        seen = fastattn.attention_weights(q, k, **arguments)[0, 0] > 0
        _grid(picture, 14 + n % 2 * 182, 26 + n // 2 * 118, title, seen)
    return picture


STAGES = (
    ("q · k", "one product of tiles"),
    ("scale", "1 / sqrt(D) by default"),
    ("score_mod", "a function of the score"),
    ("softcap", "c tanh(s / c)"),
    ("alibi_slopes", "minus slope times distance"),
    ("mask", "a number is added, False hides"),
    ("mask_mod, causal, window, key_lengths", "hide, and skip whole blocks"),
    ("softmax", "online; sinks join the sum"),
    ("dropout_p", "drawn by seed and position"),
    ("times v", "added to the output, float32"),
)


def stages():
    """The stages of a score, in the order in which every backend applies them."""
    picture = Drawing()
    for n, (name, words) in enumerate(STAGES):
        y = 4 + n * 44
        if n:
            picture.arrow(WIDTH / 2, y - 14, WIDTH / 2, y - 1)
        product = n in (0, len(STAGES) - 1)
        picture.box(30, y, WIDTH - 60, 30, [], "edge" if product else "box")
        picture.text(WIDTH / 2, y + 13, name, "middle", "strong")
        picture.text(WIDTH / 2, y + 26, words, "middle", "small")
    return picture


def padding(lengths=(7, 3, 5, 2)):
    """Sequences as a padded batch and as a packed one."""
    picture, cell, widest = Drawing(), 17, max(lengths)
    picture.text(6, 14, f"padded: {len(lengths)} x {widest} = {len(lengths) * widest} tokens")
    kinds = ("whole", "edge", "third", "fourth")
    for i, length in enumerate(lengths):
        for j in range(widest):
            kind = kinds[i] if j < length else "hidden"
            picture.rect(6 + j * cell, 22 + i * cell, cell - 2, cell - 2, kind)
    y = 22 + len(lengths) * cell + 26
    picture.text(6, y - 8, f"packed: {sum(lengths)} tokens")
    starts = [0]
    for i, length in enumerate(lengths):
        for j in range(length):
            picture.rect(6 + (starts[-1] + j) * cell, y, cell - 2, cell - 2, kinds[i])
        starts.append(starts[-1] + length)
    for start in starts:
        picture.line(5 + start * cell, y - 2, 5 + start * cell, y + cell + 4)
        picture.text(5 + start * cell, y + cell + 16, str(start), "middle")
    picture.text(6, y + cell + 34, f"cu_seqlens = {starts}")
    return picture


def pages():
    """The pages of a cache and of its fork, by their block tables."""
    cache = fastattn.KVCache(1, 1, 4, capacity=20, page_size=4, dtype=torch.float32)
    cache.append(*torch.zeros(2, 1, 1, 10, 4))
    fork = cache.fork()
    cache.append(*torch.zeros(2, 1, 1, 1, 4))  # to the page that was its own before the fork
    fork.append(*torch.zeros(2, 1, 1, 1, 4))
    tables = [c.block_table[0, : -(-int(c.lengths[0]) // 4)].tolist() for c in (cache, fork)]
    shared = set(tables[0]) & set(tables[1])
    picture = Drawing()
    for n, (words, table) in enumerate(zip(("cache", "fork"), tables)):
        y = 8 + n * 62
        picture.text(6, y + 20, words, kind="strong")
        for m, page in enumerate(table):
            x = 62 + m * 98
            for slot in range(4):
                kind = "hidden" if m * 4 + slot >= 11 else "whole" if page in shared else "edge"
                picture.rect(x + slot * 19, y, 17, 30, kind)
            picture.text(x, y + 44, f"page {page}", kind="small")
    return picture


def decoding(parts=4):
    """One row of queries on many keys, divided among tasks."""
    picture = Drawing()
    width = (WIDTH - 12) / parts
    picture.text(6, 14, "one row of q, and all keys")
    for n in range(parts):
        x = 6 + n * width
        picture.box(x, 24, width - 6, 34, [f"keys {n + 1} / {parts}"], "whole")
        picture.arrow(x + width / 2 - 3, 60, x + width / 2 - 3, 80)
        picture.box(x, 82, width - 6, 34, ["out, lse"])
        picture.arrow(x + width / 2 - 3, 118, x + width / 2 - 3, 138)
    picture.box(6, 140, WIDTH - 18, 38, ["merge: sum of out · exp(lse - lse of all)"], "edge")
    return picture


def proof():
    """Where each form of a GPU kernel runs on a machine without a GPU."""
    picture = Drawing()
    for n, (source, runs) in enumerate((("Triton", "interpreter"), ("CUDA C++", "emulator"))):
        x = 4 + n * 178
        picture.box(x, 4, 172, 30, [f"{source}: the source"], "whole")
        picture.arrow(x + 46, 36, x + 46, 56)
        picture.arrow(x + 134, 36, x + 134, 56)
        picture.box(x, 58, 92, 44, [runs, "runs it"])
        picture.box(x + 98, 58, 74, 44, ["compiled", "to PTX"], "edge")
        picture.arrow(x + 134, 104, x + 134, 124)
    steps = [
        (["PTX runs on an emulator: races, bounds,", "alignment, order of barriers"], "box"),
        (["machine code is counted: registers, spills,", "instructions of each loop"], "box"),
        (["a GPU runs it: make gpu"], "hidden"),
    ]
    for n, (lines, kind) in enumerate(steps):
        picture.box(4, 126 + n * 70, WIDTH - 10, 48, lines, kind)
        if n:
            picture.arrow(WIDTH / 2, 106 + n * 70, WIDTH / 2, 124 + n * 70)
    return picture


ALL = (tiles, online_softmax, masks, stages, padding, pages, decoding, proof)
FIGURES = {function.__name__: function for function in ALL}
