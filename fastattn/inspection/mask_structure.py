"""Find the structure of a dense mask, so that it need not be dense: causal, a window, padding or
documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

Band = tuple[int | None, int | None]  # keys to the left and to the right; None: no edge

MOST = 1 << 26  # elements that are examined: of larger masks, the first items


class MaskStructure(NamedTuple):
    what: str  # "causal + left padding"
    arguments: dict[str, Any] | None = None  # to pass to `attention` instead; None: unknown
    instead: str = ""  # the same as text
    taken: str = ""  # an assumption that the mask cannot confirm

    @property
    def call(self) -> str:
        """The text of the call that replaces the one with the mask."""
        if self.arguments is None:
            causal = ", causal=True" * self.what.startswith("causal")
            return f"fastattn.attention_packed(q, k, v, cu_q{causal})"
        given = f", {self.instead}" * bool(self.arguments)
        return f"fastattn.attention(q, k, v{given})"


def structure(mask: Tensor, M: int, N: int) -> MaskStructure:
    """The structure of a mask that broadcasts to (B,H,M,N), bool (True = may attend) or added to
    the scores.

    A row without keys, in the mask or in the structure, may differ between the two: it is padding,
    and its result is not used.
    """
    if mask.ndim > 4 or not mask.numel():
        return MaskStructure("of more than four dimensions" if mask.ndim > 4 else "of no elements")
    keep = kept(mask)
    if keep is None:
        values = "learned, added to the scores" if mask.requires_grad else "added to the scores"
        return MaskStructure(f"{values}: a bias")
    keep = keep[(None,) * (4 - keep.ndim)]
    if keep.shape[1] > 1 and (keep == keep[:, :1]).all():
        keep = keep[:, :1]
    items, heads = keep.shape[:2]
    if heads > 1 or heads * M * N > MOST:
        return MaskStructure(
            "other keys for each head" if heads > 1 else "too large to be looked at"
        )
    keep = keep[:, 0].expand(items, M, N)
    looked_at = max(1, MOST // max(1, M * N))
    known = _banded(keep[:looked_at]) or _documents(keep[:looked_at])
    if known is None:
        share = keep[:looked_at].float().mean().item()
        return MaskStructure(f"no structure that is known, {share:.0%} shown")
    rows = mask.shape[-2] if mask.ndim > 1 else 1
    if rows == 1 and list(known.arguments or ()) == ["mask"]:
        return MaskStructure(known.what)  # it is small already
    if looked_at < items:
        return known._replace(what=f"{known.what} (of the first {looked_at} items)", arguments=None)
    return known


def kept(mask: Tensor) -> Tensor | None:
    """The mask as a bool one; None if it is learned or adds other values than 0 and very negative
    ones."""
    if mask.dtype == torch.bool:
        return mask
    if mask.requires_grad:
        return None
    hidden = mask <= max(-1e9, torch.finfo(mask.dtype).min / 2)
    return ~hidden if bool((hidden | (mask == 0)).all()) else None


def _banded(keep: Tensor) -> MaskStructure | None:
    """A band around a diagonal, and keys that are hidden from every row. keep (B,M,N).

    Of the bands that fit, the one that leaves the fewest rows without a key. Rows that see every
    key are padding in some masks and may be left without keys; rows that see a part may not.
    """
    if not keep.numel():
        return None
    whole = keep.all(-1, keepdim=True)
    some = keep & ~whole
    keys = torch.where(some.any(-1).any(-1, keepdim=True), some.any(-2), keep.any(-2))
    keys |= keep[:, -1]
    rows, whole, best, fewest = keep.any(-1), whole[..., 0], None, keep.numel()
    for band, corner, inside in _bands(some):
        expected = inside & keys[:, None]
        sees = expected.any(-1)
        wrong = (expected != keep).any(-1) & rows & (sees | ~whole)
        emptied = int((rows & ~sees).sum())
        if emptied < fewest and not wrong.any():
            best, fewest = _argument_text(band, corner, keys), emptied
        if not fewest:
            break
    return best and best._replace(taken="rows that see every key are padding" * bool(fewest))


def _bands(some: Tensor) -> Iterator[tuple[Band, int, Tensor]]:
    """Candidate bands for some (B,M,N): their edges, the key at the first row's diagonal, and
    (M,N) bool, True inside the band. Bands without a row's own key are left out, because
    `attention` does not take them."""
    _, M, N = some.shape
    for corner in dict.fromkeys((0, N - M)):
        ahead = torch.arange(N, device=some.device) - torch.arange(M, device=some.device)[:, None]
        ahead = ahead - corner  # the distance from the row's own key
        seen = ahead.expand(some.shape)[some]
        left, right = (-int(seen.min()), int(seen.max())) if seen.numel() else (0, 0)
        bands: list[Band] = [(None, None), (None, 0), (left, 0)]
        if corner == 0:
            bands.append((left, right))
        for band in bands:
            if min(x or 0 for x in band) >= 0:
                inside = torch.ones_like(ahead, dtype=torch.bool)
                if band[0] is not None:
                    inside &= ahead >= -band[0]
                if band[1] is not None:
                    inside &= ahead <= band[1]
                yield band, corner, inside


def _argument_text(band: Band, corner: int, keys: Tensor) -> MaskStructure:
    what, instead = [], []
    arguments: dict[str, Any] = {}
    if band[1] == 0:
        arguments["causal"] = "bottom_right" if corner else True
        instead.append(f"causal={arguments['causal']!r}")
        what.append("causal" + " from the bottom right" * bool(corner))
    if band[0] is not None:
        arguments["window"] = band
        instead.append(f"window={band}")
        what.append(f"a window of {band}")
    name = _padding(keys)
    if name == "right padding" and not corner:
        arguments["key_lengths"] = keys.sum(-1)
        instead.append("key_lengths=lengths")
    elif name:
        arguments["mask"] = keys[:, None, None]
        instead.append("mask=keep[:, None, None, :]")
    what += [name] * bool(name)
    if not what:
        return MaskStructure("shows everything", {}, "no mask")
    return MaskStructure(" + ".join(what), arguments, ", ".join(instead))


def _padding(keys: Tensor) -> str:
    """The kind of padding, or "". keys (B,N): True for keys that some row sees."""
    if keys.all():
        return ""
    at, count = torch.arange(keys.shape[1], device=keys.device), keys.sum(-1, keepdim=True)
    if torch.equal(keys, at < count):
        return "right padding"
    if torch.equal(keys, at >= keys.shape[1] - count):
        return "left padding"
    return "hidden keys"


def _documents(keep: Tensor) -> MaskStructure | None:
    """Sequences one after the other that do not see each other; or a prefix that every row sees."""
    _, M, N = keep.shape
    if M != N:
        return None
    rows = keep.any(-1)
    first = keep.int().argmax(-1).masked_fill(~rows, N)  # N for padding, which comes last
    same = first[:, :, None] == first[:, None, :]
    before = torch.ones(M, N, dtype=torch.bool, device=keep.device).tril()
    in_turn = (first.diff(dim=1) >= 0).all()
    for name, expected in (("causal documents", same & before), ("documents", same)):
        if in_turn and torch.equal(keep, expected & rows[:, :, None]):
            count = int((first[:, 1:].lt(N) & first.diff(dim=1).ne(0)).sum(1).max()) + 1
            return MaskStructure(
                f"{name}, up to {count} in a row", None, "attention_packed, cu_seqlens"
            )
    prefix = keep[:, :1].sum(-1, keepdim=True)  # the number of keys that the first row sees
    if torch.equal(keep, before | (torch.arange(N, device=keep.device) < prefix)):
        return MaskStructure(f"causal after a prefix of up to {int(prefix.max())} keys")
    return None
