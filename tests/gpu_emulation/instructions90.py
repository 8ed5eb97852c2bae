"""The probes of csrc/cuda/sm90/probe.cu: kernels that run one instruction of sm_90a alone each; the
inputs of each, and what must come out."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.backends.native import libraries

NANOSECONDS = 200_000_000  # that a kernel waits for an mbarrier
SHORT = 1_000_000  # the same, where it waits in vain

# What probe.cu runs, and what its reports name.
PRODUCTS, F16, IN_REGISTERS, A_ACROSS, B_ACROSS = 0, 16, 8, 2, 1
LOAD_BOX, STORE_BOX, LOAD_BYTES, ADD_BYTES, PHASES, REGISTERS = range(32, 38)
STORE_MATRICES, STORE_MATRICES_TRANSPOSED, TURNS, NOTHING_ARRIVES = range(38, 42)
BEGUN, BYTES_ARRIVE, PHASE_ENDS, COPIED_OUT, PRODUCTS_END, EXCHANGED, TURN, DONE = range(1, 9)
NEVER = {
    0: "the kernel never began",
    BEGUN: "it did not reach its first wait",
    BYTES_ARRIVE: "the bytes never arrived",
    PHASE_ENDS: "the mbarrier's phase never ended",
    COPIED_OUT: "the copy to global memory never ended",
    PRODUCTS_END: "the products never ended",
    EXCHANGED: "setmaxnreg never got its registers",
    TURN: "a warpgroup's turn never came",
}
PROBE = struct.Struct("=2q4QQ4qq4q4q")  # FaProbe
BOX_ROWS, BOX_WORDS = 16, 512  # rows of 128 bytes
FILL = 0x5A5A5A5A  # what memory has before


class Tile(NamedTuple):
    """A tensor that copies by a map read or write, and where their box begins."""

    memory: Tensor  # int16, the whole of it
    strides: tuple[int, int, int, int]
    sizes: tuple[int, int, int, int]
    at: tuple[int, int, int, int]


class Case(NamedTuple):
    """The inputs of a probe, and what must be in `out` or in the tile's memory after it."""

    name: str
    what: int
    expected: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    out: Tensor | None = None  # what is there before
    tile: Tile | None = None


# --- the cases -----------------------------------------------------------------------------------


def _whole(seed: int, rows: int, columns: int) -> Tensor:
    """Integers from -3 to 3. Their products have exact sums in every format."""
    i = torch.arange(rows * columns, dtype=torch.int64) + 1000003 * seed
    return (i * 2654435761 % 4294967296 // 65536 % 7 - 3).reshape(rows, columns)


def _words(seed: int, count: int) -> Tensor:
    """Different integers of 32 bits."""
    return (torch.arange(count, dtype=torch.int64) * 40503 + 977 * seed).to(torch.int32)


def _products() -> Iterator[Case]:
    for what in range(32):
        in_registers, a_across, b_across = (bool(what & x) for x in (8, 2, 1))
        if what & 4 or (in_registers and a_across):
            continue
        dtype, name = (torch.float16, "fp16") if what & F16 else (torch.bfloat16, "bf16")
        a, b = _whole(what, 64, 64), _whole(100 + what, 64, 128)  # rows and k; k and columns
        # Tiles as they lie in memory: rows of 64 elements, for B in parts of 64 columns if across.
        of_a = a.T if a_across else a
        of_b = torch.cat([b[:, :64], b[:, 64:]]) if b_across else b.T
        where = "A in registers" if in_registers else f"A {'mn' if a_across else 'k'}-major"
        yield Case(
            f"wgmma {name}, {where}, B {'mn' if b_across else 'k'}-major",
            what,
            (a @ b).to(torch.float32),
            of_a.contiguous().to(dtype),
            of_b.contiguous().to(dtype),
            torch.full((64, 128), -1.0),
        )


def _swizzled(rows: Tensor) -> Tensor:
    """Rows of 64 elements as a box in shared memory: chunks of 16 bytes are permuted by row."""
    row, chunk = torch.arange(BOX_ROWS)[:, None], torch.arange(8)
    found = torch.empty(BOX_ROWS, 8, 8, dtype=torch.int16)
    found[row, chunk ^ row % 8] = rows.reshape(BOX_ROWS, 8, 8)
    return found.reshape(-1)


def _part(x: Tensor, at: tuple[int, int, int, int]) -> Tensor:
    """The box of x (items, heads, rows, columns) that begins there; zeros outside of x."""
    rows = torch.zeros(BOX_ROWS, 64, dtype=torch.int16)
    inside = x[at[0], at[1], at[2] :, at[3] :][:BOX_ROWS, :64]
    rows[: len(inside), : inside.shape[1]] = inside
    return rows


# By name: sizes, the memory's layout from the outermost dimension, where the box begins.
_TENSORS = {
    "heads inside rows": ((2, 3, 40, 72), "BMHD", (1, 2, 8, 0)),
    "fewer rows and columns than the box": ((2, 3, 40, 72), "BHMD", (0, 1, 32, 64)),
    "one item": ((1, 3, 40, 64), "BMHD", (0, 1, 16, 0)),
    "one row": ((2, 2, 1, 64), "BHMD", (1, 1, 0, 0)),
}


def _boxes() -> Iterator[Case]:
    for seed, (name, (sizes, layout, at)) in enumerate(_TENSORS.items()):
        order = ["BHMD".index(x) for x in layout]
        inner = [sizes[x] for x in order]
        memory = _words(seed, sizes[0] * sizes[1] * sizes[2] * sizes[3]).to(torch.int16)
        back = [order.index(x) for x in range(4)]
        x = memory.reshape(inner).permute(back)
        B, H, M, D = x.stride()
        tile = Tile(memory, (B, H, M, D), sizes, at)
        before = torch.full((BOX_WORDS,), FILL, dtype=torch.int32)
        rows = _part(x, at)
        yield Case(f"TMA load, {name}", LOAD_BOX, _swizzled(rows), a=before, out=before, tile=tile)
        # Out of shared memory: into the box, and nowhere else.
        stored = _words(50 + seed, BOX_ROWS * 64).to(torch.int16).reshape(BOX_ROWS, 64)
        expected = memory.clone()
        inside = expected.reshape(inner).permute(back)[at[0], at[1], at[2] :, at[3] :]
        inside = inside[:BOX_ROWS, :64]
        inside.copy_(stored[: len(inside), : inside.shape[1]])
        yield Case(f"TMA store, {name}", STORE_BOX, expected, a=_swizzled(stored), tile=tile)
    # One head for all: a dimension that is never stepped along.
    memory = _words(9, 2 * 40 * 64).to(torch.int16)
    x = memory.reshape(2, 1, 40, 64)
    tile = Tile(memory, (x.stride(0), 0, 64, 1), (2, 5, 40, 64), (1, 0, 24, 0))
    before = torch.full((BOX_WORDS,), FILL, dtype=torch.int32)
    expected = _swizzled(_part(x, (1, 0, 24, 0)))
    yield Case("TMA load, a stride of 0", LOAD_BOX, expected, a=before, out=before, tile=tile)


def _others() -> Iterator[Case]:
    before = torch.full((BOX_WORDS,), FILL, dtype=torch.int32)
    words = _words(20, BOX_WORDS)
    yield Case("bulk load", LOAD_BYTES, words, a=before, b=words, out=before)
    numbers, there = (_whole(x, 1, BOX_WORDS).float().ravel() for x in (21, 22))
    yield Case("bulk add", ADD_BYTES, numbers + there, a=numbers, out=there)
    words = _words(23, 128)
    turned = torch.cat([words.flip(0), words.flip(0), torch.zeros(1, dtype=torch.int32)])
    yield Case("mbarrier", PHASES, turned, a=words, out=torch.full_like(turned, FILL))
    threads = torch.arange(384, dtype=torch.int32)
    yield Case("setmaxnreg", REGISTERS, threads, out=torch.full_like(threads, FILL))
    yield from _matrices()
    turns = torch.tensor([0, 1] * 4, dtype=torch.int32)
    yield Case("named barriers", TURNS, turns, out=torch.full_like(turns, FILL))


def _matrices() -> Iterator[Case]:
    """Lane l has elements 2 (l % 4) and + 1 of row l / 4 of each matrix; transposed, of column."""
    elements = torch.arange(256, dtype=torch.int32).reshape(4, 8, 8)  # matrix, row, column
    words = elements[:, :, ::2] | elements[:, :, 1::2] << 16  # of a lane: matrix, l / 4, l % 4
    held = words.reshape(4, 32).T.contiguous().to(torch.int32)
    places = torch.arange(32, dtype=torch.int32) * 5 % 32  # of rows in memory
    for transposed in (False, True):
        rows = elements.transpose(1, 2) if transposed else elements
        expected = torch.empty(32, 8, dtype=torch.int16)
        expected[places.long()] = rows.reshape(32, 8).to(torch.int16)
        yield Case(
            f"stmatrix{' transposed' * transposed}",
            STORE_MATRICES_TRANSPOSED if transposed else STORE_MATRICES,
            expected,
            a=held,
            b=16 * places,
            out=torch.full((128,), FILL, dtype=torch.int32),
        )


def cases() -> list[Case]:
    """All of them; first the one that shows that a wait has a limit."""
    vain = Case("a wait with a limit", NOTHING_ARRIVES, torch.empty(0))
    return [vain, *_others(), *_boxes(), *_products()]


# --- running them --------------------------------------------------------------------------------


class Ran(NamedTuple):
    """A case that was launched: memory that its kernel uses."""

    code: int  # of the launch
    result: Tensor
    kept: tuple[Tensor, ...]


def launch(
    start: Callable[[bytes, int], int],
    case: Case,
    device: torch.device,
    report: Tensor,
    stream: int = 0,
    limit: int = 0,
) -> Ran:
    """Start a probe by `start`, the entry `fa_cuda_probe_sm90`. `report` has two words that the
    device can write and the host can read."""
    limit = limit or (SHORT if case.what == NOTHING_ARRIVES else NANOSECONDS)
    a, b, out = (None if x is None else x.clone().to(device) for x in (case.a, case.b, case.out))
    tile = case.tile
    memory = None if tile is None else tile.memory.clone().to(device)
    tensor: tuple[int, ...] = (0,) * 14
    if tile is not None and memory is not None:
        dtype = libraries.DTYPE[torch.bfloat16]
        tensor = (memory.data_ptr(), *tile.strides, dtype, *tile.sizes, *tile.at)
    pointers = (x.data_ptr() if x is not None else 0 for x in (a, b, out, report))
    given = PROBE.pack(case.what, limit, *pointers, *tensor)
    code = start(given, stream)
    result = out if case.what != STORE_BOX else memory
    return Ran(
        code, report if result is None else result, tuple(x for x in (a, b) if x is not None)
    )


def complaint(library: Any, case: Case, ran: Ran, report: Tensor) -> str:
    """What a probe that has ended did wrong; "" if nothing."""
    step, late = report.tolist()
    if ran.code:
        where, what = library.failed_kernel().decode(), library.error(ran.code).decode()
        return f"{case.name}: {where} failed with {what} (error {ran.code})"
    if case.what == NOTHING_ARRIVES:
        ended = (step, late) == (PHASE_ENDS, PHASE_ENDS)
        return (
            "" if ended else f"{case.name}: it was not reported, {NEVER.get(step, 'got its end')}"
        )
    if late or step != DONE:
        return f"{case.name}: {NEVER.get(late or step, 'its report makes no sense')}"
    found = ran.result.cpu().view(case.expected.dtype).reshape(case.expected.shape)
    if torch.equal(found, case.expected):
        return ""
    wrong = (found != case.expected).reshape(-1).nonzero().ravel().tolist()
    first = wrong[0]
    got, expected = (x.reshape(-1)[first].item() for x in (found, case.expected))
    return (
        f"{case.name}: {len(wrong)} of {found.numel()} values are wrong, the first at {first}: "
        f"got {got}, expected {expected}"
    )
