"""Which positions of a sequence each rank has, and in what order it holds them."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

Layout = Literal["contiguous", "zigzag"]
CONTIGUOUS: Final = "contiguous"
ZIGZAG: Final = "zigzag"
LAYOUTS = (CONTIGUOUS, ZIGZAG)


class Span(NamedTuple):
    """Consecutive positions: from `first` up to `end`, which is not included."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first


Spans = tuple[tuple[Span, ...], ...]  # of every rank, in the order in which it holds them


def spans(layout: str, total: int, ranks: int) -> Spans:
    """The spans of each rank as `shard` cuts a sequence. contiguous: chunks as torch.chunk cuts.
    zigzag: of twice as many chunks rank r has the r-th and the r-th from the end, so that each rank
    has the same work in causal attention."""
    need_layout(layout)
    pieces = ranks if layout == CONTIGUOUS else 2 * ranks
    size = -(-total // pieces)
    chunks = [Span(min(c * size, total), min(c * size + size, total)) for c in range(pieces)]
    if layout == CONTIGUOUS:
        return tuple(_joined(chunks[r : r + 1]) for r in range(ranks))
    return tuple(_joined([chunks[r], chunks[-1 - r]]) for r in range(ranks))


def spans_of(layout: str, sizes: Sequence[int], name: str) -> Spans:
    """The spans of parts with these sizes. Contiguous ones may have any sizes. Raises ValueError
    for zigzag sizes that `shard` does not give."""
    need_layout(layout)
    if layout == CONTIGUOUS:
        ends = [sum(sizes[: r + 1]) for r in range(len(sizes))]
        return tuple(_joined([Span(end - size, end)]) for size, end in zip(sizes, ends))
    zigzag = spans(layout, sum(sizes), len(sizes))
    expected = [size_of(x) for x in zigzag]
    if list(sizes) != expected:
        raise ValueError(
            f"{name}: got {list(sizes)} on the ranks, expected {expected}: layout={layout!r} has "
            f"parts as fastattn.distributed.shard(..., layout={layout!r}) cuts them"
        )
    return zigzag


def merged(of: Spans) -> tuple[Span, ...]:
    """The spans of all these ranks together, in the order of the sequence."""
    return _joined(sorted(a for own in of for a in own))


def size_of(part: Sequence[Span]) -> int:
    return sum(x.size for x in part)


def held(part: Sequence[Span]) -> Iterator[tuple[Span, slice]]:
    """Each span of a rank, and its slice of what the rank holds."""
    done = 0
    for x in part:
        yield x, slice(done, done + x.size)
        done += x.size


def meet(rows: Span, keys: Span, lo: int, hi: int) -> bool:
    """True if one of the rows sees one of the keys, if a row i sees those from i + lo to i + hi."""
    return keys.first <= rows.end - 1 + hi and keys.end - 1 >= rows.first + lo


def hops(rows: Spans, keys: Spans, lo: int, hi: int) -> int:
    """The number of hops if keys go from rank to rank: after them no rank meets keys that it may
    see. The first hop, which sends nothing, counts."""
    ranks, last = len(rows), 0
    of = sorted((x, owner) for owner, own in enumerate(keys) for x in own)
    ends = [x.end for x, _ in of]
    for rank in reversed(range(ranks)):
        for x in rows[rank]:
            for at in range(bisect.bisect_right(ends, x.first + lo), len(of)):
                y, owner = of[at]
                if not meet(x, y, lo, hi):
                    break
                last = max(last, (rank - owner) % ranks)
                if last == ranks - 1:
                    return ranks
    return last + 1


def need_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        expected = " or ".join(map(repr, LAYOUTS))
        raise ValueError(f"layout: got {layout!r}, expected {expected}")


def _joined(chunks: Sequence[Span]) -> tuple[Span, ...]:
    """The spans with neighbours joined, and without empty ones."""
    joined: list[Span] = []
    for x in chunks:
        if joined and joined[-1].end == x.first:
            joined[-1] = Span(joined[-1].first, x.end)
        elif x.size:
            joined.append(x)
    return tuple(joined)


def part(x: Tensor, own: Sequence[Span], dim: int) -> Tensor:
    """The part of x that a rank with these spans has; a view if there is one span."""
    pieces = [x.narrow(dim, a.first, a.size) for a in own]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0)


def parts(x: Tensor, of: Spans, dim: int) -> list[Tensor]:
    """The part of x of each of these ranks. x has all their spans in the order of the sequence."""
    spans = sorted(a for own in of for a in own)
    cut = dict(zip(spans, x.split([a.size for a in spans], dim) if spans else ()))
    none = x.narrow(dim, 0, 0)
    return [torch.cat([cut[a] for a in own], dim) if own else none for own in of]


def whole(parts: Sequence[Tensor], of: Spans, dim: int) -> Tensor:
    """All ranks' parts in the order of the sequence."""
    pieces = []
    for x, own in zip(parts, of):
        cut = x.split([a.size for a in own], dim) if own else ()
        pieces += [(a.first, piece) for a, piece in zip(own, cut)]
    if not pieces:
        return parts[0]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda x: x[0])], dim)
