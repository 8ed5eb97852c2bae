"""The factors of a call and their levels, for each form of call. The first level is the default.

Levels that hide everything else (sizes of 0, dropout of 1) are in hand-written tests: a row that
has one of them tests no other.
"""

import functools
import itertools

from tests.features.covering import array

# Around every edge of a tile: vectors of 4, 8 and 16 lanes, tiles of 16, 32, 64 and 128 rows or
# keys, chunks of 512 keys; 8 and 4 rows are the most that the kernels for few rows take.
ROWS = (17, 1, 2, 4, 5, 8, 9, 16, 33, 64, 65, 129)
KEYS = (33, 1, 15, 16, 17, 63, 65, 127, 128, 129, 513, 650)
WIDTHS = (16, 1, 3, 8, 17, 32, 33, 64, 80, 128)
LAYOUTS = ("contiguous", "permuted", "offset", "columns", "expanded", "shifted", "apart", "negated")
MODS = ("no", "table", "mask_mod", "of heads", "some rows", "near", "band", "blocks", "softcap")
MODS += ("alibi",)
MASKS = ("no", "bool", "float", "float32", "empty rows", "-inf in rows", "blocks", "-inf in blocks")
MASKS += ("stairs", "-inf in stairs")
SHAPES = ("BHMN", "B11N", "HMN", "MN", "N", "1HM1", "1H1N", "B1MN", "BHM1", "11MN", "B1M1", "BH1N")
SHAPES += ("11M1", "1111")
SCORES = {
    "causal": ("no", "top_left", "bottom_right", "aligned"),
    "window": ("no", (5, 3), (4, None), (None, 2), (0, 0), (70, 0)),
    "lengths": ("no", "int64", "int32"),
    "alibi": ("no", "H", "BH"),
    "softcap": ("no", 4.0),
    "sinks": ("no", "normal", "-inf", "200"),
    "dropout": ("no", "seed", "tensor", "matrix"),  # forms of seed
    "scale": ("no", 0.0, -0.3, 0.5),
    "mask": (*MASKS, "finfo.min"),
    "mask_shape": SHAPES,
    "mod": MODS,
    "place": ("no", "somewhere"),
    "qv": ("no", "apart", "adjacent", "overlapping"),
}
COMMON = {
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "heads": ((2, 2), (4, 2), (3, 1), (17, 1), (10, 5)),
    "small_layout": ("contiguous", "strided", "shifted", "columns", "padded"),
    "small_dtype": ("wide", "own", "float64"),  # of slopes and sinks
    "grad": ("all", "no", "q", "kv", "others", "k", "v"),
    "lse": ("no", "loss"),
    "values": ("normal", "leaks", "large"),
    "threads": (1, 2, 3),
}
IN_MEMORY = {f"{name}_layout": LAYOUTS for name in "qkv"}
DENSE = {
    "B": (2, 1, 4),
    "M": ROWS,
    "N": KEYS,
    "D": WIDTHS,
    "Dv": WIDTHS,
    **COMMON,
    **SCORES,
    **IN_MEMORY,
    "dout_layout": LAYOUTS,
    "row_invariant": (False, True),
    "deterministic": (False, True),
    # A call without a gradient, an LSE or any argument of score takes a way of its own.
    "way": ("any", "short"),
}
PACKED = {
    "M": (17, 1, 2, 4, 9, 33, 65, 129),
    "N": (33, 1, 16, 17, 65, 128, 129, 530),
    "counts": ("falling", "equal", "some empty"),
    "index": ("int64", "int32"),
    "used": ("all", "fewer"),  # rows of a sequence
    "longest": ("exact", "spare", "unsaid"),  # max_q and max_k
    # Both at once: kernels of few bits ask for multiples of 32 or 64 in both.
    "widths": tuple(zip(WIDTHS, (16, 8, 1, 33, 3, 80, 17, 64, 128, 32), strict=True)),
    **COMMON,
    **SCORES,
    "qv": ("no", "apart", "adjacent"),
    **IN_MEMORY,
    "row_invariant": (False, True),
    "deterministic": (False, True),
}
PAGED = {
    **{name: levels for name, levels in PACKED.items() if name not in ("lengths",)},
    "M": (1, 2, 4, 17, 65),
    "widths": ((32, 32), (64, 64), (16, 3), (128, 64), (96, 160), (3, 17), (64, 128), (576, 512)),
    "stored": ("own", "int8", "float8_e4m3fn", "float8_e5m2", "int4"),
    "page": (16, 1, 5, 64, 256),
    "pages": ("shuffled", "ascending", "shared", "none"),
    "scale_layout": ("contiguous", "strided", "of heads", "one"),
}
SELECTED = {
    "B": (2, 1),
    "M": (5, 1, 17),
    "N": (37, 1, 65, 129, 260),
    "D": WIDTHS,
    "Dv": WIDTHS,
    **COMMON,
    **{name: SCORES[name] for name in ("lengths", "softcap", "sinks", "dropout", "scale")},
    "causal": ("no", "top_left", "bottom_right"),
    "heads": ((4, 2), (3, 3), (5, 1)),
    "lists": ("one", "by key head", "by head"),
    "block": (1, 4, 16, 32, 64, 128),
    "named": ("unsorted, repeated", "ascending", "ascending, repeated", "every"),
    "index": ("int64", "int32"),
    **IN_MEMORY,
}
CACHE = {
    "B": (2, 1, 3),
    "M": (1, 2, 4, 17, 33),
    "N": (33, 1, 17, 64, 130),
    "rows": ("of each item", "of any number"),
    "history": ("once", "by one", "truncated", "evicted", "forked", "freed", "grown"),
    "page": (16, None, 5, 64),
    **{name: PAGED[name] for name in ("widths", "stored")},
    "latent": (False, True),
    "offset": (False, True),  # the keys have a channel that is far from 0
    **COMMON,
    **{name: levels for name, levels in SCORES.items() if name not in ("lengths", "qv")},
    "q_layout": LAYOUTS,
    "grad": ("all", "no", "q"),
    "causal": ("bottom_right", "no", "top_left", "aligned"),
    "row_invariant": (False, True),
}
# A call over ranks, beside its strategy. Each rank has a part with a place of its own:
# tests/distributed.
NOT_OF_RANKS = ("place", "qv", "mod", "grad", "way", "row_invariant", "deterministic")
NOT_OF_RANKS += ("dout_layout", "threads")
RANKS = {name: levels for name, levels in DENSE.items() if name not in NOT_OF_RANKS} | {
    "M": (63, 1, 5, 130),
    "N": (63, 1, 9, 130),
    "D": (16, 3, 33),
    "Dv": (16, 5, 33),
    "B": (2, 1),
    "heads": ((12, 12), (12, 4), (12, 1)),
    "causal": ("no", "top_left", "bottom_right"),
    "small_dtype": ("wide",),
    "mask": tuple(x for x in SCORES["mask"] if x != "float32"),  # each rank rounds its gradient
    "cut": ("contiguous", "zigzag"),
}
# Levels of dense calls that are one `Problem`; and of those with scores near 0, for passes with
# tangents: backends take plain memory there, and torch's forward mode refuses views that are
# negated when they are read.
ONE_PROBLEM = dict(mod=("no",), qv=("no",))
NEAR = ONE_PROBLEM | {
    "mask": ("no", "bool", "float", "float32", "empty rows", "-inf in rows"),
    "values": ("normal",),
    **{f"{name}_layout": LAYOUTS[:-1] for name in ("q", "k", "v", "dout")},
}
# The gradient of a float32 mask would be rounded in a call of float64.
IN_FLOAT64 = NEAR | dict(dtype=("float64",), mask=tuple(x for x in NEAR["mask"] if x != "float32"))
FORMS = {"dense": DENSE, "packed": PACKED, "paged": PAGED, "selected": SELECTED, "cache": CACHE}
SHORT = ("M", "N", "B", "D", "Dv", "dtype", "heads", "q_layout", "k_layout", "v_layout", "causal")
SHORT += ("scale", "values", "way", "dout_layout", "small_layout", "small_dtype", "mask_shape")
SHORT += ("threads",)
# The factor that tests an argument of `attention`, `attention_packed` or `attention_selected`, or a
# tensor of `spec.Tensors`.
FACTOR_OF = {
    **{name: name for name in ("mask", "causal", "window", "softcap", "sinks", "scale", "place")},
    **{name: name for name in ("row_invariant", "deterministic", "qv", "block")},
    **dict(q="q_layout", k="k_layout", v="v_layout", key_lengths="lengths", alibi_slopes="alibi"),
    **dict(dropout_p="dropout", seed="dropout", score_mod="mod", mask_mod="mod", cu_q="index"),
    **dict(cu_k="index", block_table="pages", max_q="longest", max_k="longest", indices="named"),
    **dict(
        row_lengths="used", k_scale="stored", v_scale="stored", return_lse="lse", normaliser="lse"
    ),
    **dict(captured_floats="mod", captured_ints="mod", mask_blocks="mod", backend="way"),
}


def forbidden(f, a, g, b):
    """Does level a of factor f exclude level b of factor g?"""
    if (f, a) == ("way", "short"):
        return b != "no" if g == "grad" else g not in SHORT and b not in ("no", False)
    if (f, g) == ("strategy", "heads"):  # ranks divide key heads
        return a[0] in ("ulysses", "usp") and b[1] % (2 if a[0] == "usp" else a[1]) > 0
    if f == "qv" and a in ("adjacent", "overlapping"):  # k and v are views of one tensor
        shared = b in ("all", "kv", "k", "v") if g == "grad" else g == "lengths" and b != "no"
        return shared or (g in ("k_layout", "v_layout") and b != "contiguous")
    if f == "mod" and a != "no":
        bias = a in ("table", "alibi")
        sums = bias and g == "mask" and b in ("float", "float32", "finfo.min", *MASKS[5::2])
        return sums or (g in ("softcap", "qv") and b != "no")
    if f == "stored" and a != "own":
        if g == "widths":
            return a == "int4" and any(x % 32 for x in b)
        lost = g in ("k_layout", "v_layout") and b not in ("contiguous", "permuted")
        return lost or (g in ("grad", "qv") and b != "no")
    if f == "widths" and sum(a) > 1024:  # with qv, a head has all of these columns
        return g == "qv" and b != "no"
    if f == "offset" and a:
        return g == "stored" and b == "own"
    if (f, a) == ("used", "fewer"):  # draws are those of other items: tests/semantics
        return g == "dropout" and b != "no"
    if (f, a) == ("pages", "none"):
        return (g == "page" and b != 16) or (g, b) == ("stored", "own")
    if f == "latent" and a:  # values are the first columns of keys
        return g == "widths" and b[1] > b[0]
    if (f, a) in (("history", "grown"), ("history", "forked")):
        return g == "page" and b is None
    return (f, g) == ("mask", "mask_shape") and a == "no" and b != "BHMN"


def of_form(form, levels):
    """The levels of the factors that a form has."""
    return {name: some for name, some in levels.items() if name in FORMS[form]}


@functools.cache
def rows(form, strength=2, seed=0, most=None, **fixed):
    """The calls of a form, each as a dict. fixed: the levels of some factors, if not all."""
    return array(FORMS[form] | fixed, forbidden, strength, seed, most=most)


# Kernels have ways for one argument of score without others, and tell special cases from a call as
# a whole. Pairs in rows full of others miss these: here all else is at its default.
ALONE = {
    "causal": ("top_left", "bottom_right", "aligned"),
    "window": ((5, 3), (0, 0), (70, 0)),
    "lengths": ("int64",),
    "alibi": ("BH",),
    "softcap": (4.0,),
    "sinks": ("normal", "-inf"),
    "dropout": ("seed",),
    "scale": (-0.3,),
    "mask": ("bool", "float", "-inf in rows", "-inf in blocks"),
    "mod": MODS[1:],
    "place": ("somewhere",),
    "qv": ("apart", "overlapping"),
    "grad": ("no",),
    "row_invariant": (True,),
}


def sparse():
    """Dense calls with two arguments of score, or one; sizes and dtypes in turn."""
    levels = [(name, level) for name, some in ALONE.items() for level in some]
    sizes = itertools.cycle(((33, 70), (65, 130), (1, 65), (129, 40), (4, 513)))
    dtypes = itertools.cycle(DENSE["dtype"][:3])
    default = {name: some[0] for name, some in DENSE.items()}
    found = []
    for (f, a), (g, b) in itertools.combinations_with_replacement(levels, 2):
        if (f == g and a != b) or forbidden(f, a, g, b) or forbidden(g, b, f, a):
            continue
        row = default | {f: a, g: b, "dtype": next(dtypes), "B": 1}
        # Functions have classes of blocks from 2^15 pairs on.
        row["M"], row["N"] = (129, 300) if "mod" in (f, g) else next(sizes)
        if allowed(row):
            found.append(row)
    return found


# Kernels take rows and keys in parts, and an argument may begin or end at any edge of these.
LISTED = {
    "every": tuple(range(146)),
    "edges": (0, 1, 15, 16, 17, 33, 63, 64, 65, 113, 127, 128, 129, 145),
    "around": (191, 193, 255, 256, 257, 511, 512, 513, 529, 640, 641),  # blocks, a chunk of 512
}


def edges():
    """Calls of one kind with sizes and bands at every such edge, and (nearly) all else plain: each
    as (form, row). Values are those by which one key that leaks takes the row."""
    found, dtypes = [], itertools.cycle(DENSE["dtype"])

    def add(form="dense", **levels):
        default = {name: some[0] for name, some in FORMS[form].items()}
        plain = dict(values="leaks", dtype=next(dtypes), B=1) if form == "dense" else {}
        found.append((form, default | plain | levels))

    # Each number of keys of a sequence. In the oracle a padded batch is one call, a packed is many.
    every = dict(sinks="200", softcap=4.0, mask="-inf in rows", alibi="BH")
    for M, ns, given in itertools.product((1, 3, 20), ("every", "around"), ({}, every)):
        common = dict(M=M, heads=(4, 2), lse="loss", N=LISTED[ns][-1])
        fewer = "edges" if ns == "every" and (M > 1 or given) else ns
        for form in ("packed", "paged"):
            add(form, counts=fewer, widths=(24, 16), **common | given)
        ns = "edges" if fewer == "edges" and M == 20 else ns
        common |= dict(lengths=ns, B=len(LISTED[ns]), D=24, Dv=16)
        add(**common | given)
        if M < 20:
            more = dict(sinks="200", block=16, lists="by head") if given else dict(block=4)
            add("selected", named="every", **common | more)
    for width in range(1, 71):  # as wide as there are rows
        left = width * 7 % (width + 1)
        add(M=width, N=75, window=(left, width - left))
    # Diagonals at the edges of vectors of rows, and one to three keys after them.
    for m, n in ((37, 37), (40, 41), (33, 35), (40, 45), (33, 48), (66, 131)):
        add(M=m, N=n, Dv=23, causal="bottom_right")
        add(M=m, N=n, Dv=23, causal="bottom_right", window=(9, 0))
        add(M=m, N=n, Dv=23, window=(4, 7))
    add(M=70, N=30, window=(9, 0))  # rows after the last key
    for m, window in ((70, (5, 3)), (33, (130, 1)), (37, (255, 0)), (1, (66, 0)), (3, (301, 0))):
        add(M=m, N=711, window=window, causal="bottom_right", heads=(2, 1))
    for m, window in itertools.product((1, 4), ((3, 0), (0, 600), (None, 0))):  # chunks of no key
        more = dict(causal="bottom_right", window=window, lengths="int64", heads=(2, 1), D=32)
        add(M=m, N=1300, B=4, **more)
    for m, heads in ((70, 2), (3, 4), (1, 6)):  # a maximum that grows from block to block
        add(M=m, N=512, heads=(heads, heads), values="rising")
    for n in range(61, 68):
        add(M=37, N=n, values="rising")
    # Few keys for many rows of grouped heads; heads that tasks of 2 to 4 heads do not divide.
    add(M=300, N=40, heads=(4, 1), causal="top_left")
    for given in (dict(causal="top_left", alibi="H"), dict(lengths="int64", sinks="normal"), {}):
        add(M=10, N=300, B=2, heads=(10, 2), Dv=24, **given)
    add(M=10, N=300, B=2, heads=(10, 2), mask="float32", mask_shape="HMN", dropout="seed")
    for heads in (64, 65):  # as many rows as one task takes, and more
        add(M=2, N=130, heads=(heads, 1))
    for m in (1, 37):  # tanh is nearly the identity
        add(M=m, N=37, softcap=1e4, values="normal")
    for n, shape, dtype in ((150, "MN", "float32"), (513, "BHMN", "bfloat16")):
        for m in (9, 37, 129):  # a row sees no key of whole blocks, and its neighbours do
            add(M=m, N=n, B=2, mask="stairs", mask_shape=shape, dtype=dtype, lse="loss")
    # Draws of rows, keys, heads and items of a large index.
    for sizes in (dict(M=70_000, N=4), dict(M=2, N=70_000), dict(B=300), dict(heads=(300, 300))):
        add(**dict(M=3, N=4, D=2, Dv=2) | sizes, dropout="seed", values="normal", dtype="float32")
    # Threads take the heads of results in an order of their own, which 2 or 3 heads do not show.
    for form, m, threads in itertools.product(FORMS, (1, 4, 37), (2, 3)):
        add(form, M=m, N=600, heads=(10, 5), threads=threads)
    return found


def allowed(row):
    return not any(forbidden(f, a, g, b) for f, a in row.items() for g, b in row.items() if f != g)


def changed(row, factors):
    """The levels of a row that are not the defaults."""
    return {name: row[name] for name, levels in factors.items() if row[name] != levels[0]}
