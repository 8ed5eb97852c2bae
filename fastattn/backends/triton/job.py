"""The passes over one call: which kernels run, on which tiles and grids, and what they write."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.spec import AttentionSpec, Tensors
from ..native.launcher import prepared
from ..native.marshalling import specialization_key
from ..shared.gathered_pages import sink_shares
from ..shared.gpu import architecture, processors
from ..shared.value_checks import check_values
from . import autotune, captured_sums, launch_cache, tile_configs
from .arguments import (
    bits,
    blocks,
    columns,
    describable,
    extras,
    flags,
    is_latent,
    longest,
    operand,
    padded,
    precision,
    reads,
    scalars,
)
from .launch_cache import Launch
from .program_source import is_sum
from .runtime import fits, kernels, run, shared_memory

OWNS = dict(forward="rows", dq="rows", dq_captured="rows", dkv="keys", dk="keys", dv="keys")
LONGEST_FIRST_BYTES = 32 << 20  # keys and values that programs share in the L2 cache


Programs = Callable[[tile_configs.Config], int]  # of a launch, by its tile


class Alike(NamedTuple):
    """What is derived from a call, and cached for calls of the same kind."""

    arch: int
    flags: Any
    tiled: tuple[Any, ...]  # the arguments by which `tile_configs.config` chooses its tiles
    launches: dict[tuple[Any, ...], Any]  # a Launch by kernel, tile and constants; chosen tiles
    room: int  # bytes of shared memory that a block may have; 0 in the interpreter
    lacks_room: bool  # as tile_configs.lacks_room says


class Job:
    """One call's arguments in the form that kernels take, and the passes over them. Its device must
    be the current one."""

    spec: AttentionSpec
    t: Tensors
    device: torch.device
    extras: Any
    inputs: tuple[Any, ...]
    key: tuple[Any, ...] | None
    arch: int
    flags: Any
    tiled: tuple[Any, ...]
    launches: dict[tuple[Any, ...], Any]
    room: int
    lacks_room: bool
    normaliser: Tensor
    of_rows: Tensor

    of_mask = "dmask"  # the pass that makes the mask's gradient

    def __init__(self, spec: AttentionSpec, t: Tensors, dout: Tensor | None = None):
        check_values(spec, t)
        self.spec, self.t = spec, t
        self.M, self.N = longest(spec)
        self.device = t.q.device
        self.extras = extras(spec, t)
        k, v = (x if spec.storage is None else bits(x) for x in (t.k, t.v))
        self.inputs = operand(t.q), operand(k), operand(v), operand(dout)
        given = (*self.inputs, *self.extras) if spec.given or t.seed is not None else self.inputs
        arch = architecture(self.device)
        multiply = "ieee"
        if spec.dtype.itemsize == 4:
            multiply = tile_configs.precision(arch, precision())
        latent = dout is None and is_latent(spec, t)
        self.key = launch_cache.alike(given, arch, multiply, latent)
        kept = spec.launcher_cache.setdefault("launches", {})
        derived = kept.get(self.key) if self.key else None
        if derived is None:
            derived = self.derive(arch, multiply, latent, (t.q, t.k, t.v, dout))
            if self.key:
                launch_cache.keep(kept, self.key, derived)
        self.arch, self.flags, self.tiled, self.launches, self.room, self.lacks_room = derived
        self.block_masks: dict[tuple[Any, ...], Any] = {}
        self.sees: Tensor | None = None  # which rows see a score far above finfo.min
        self.measured = arch and not spec.row_invariant and autotune.active(self.device)

    def derive(self, arch: int, precision: str, latent: bool, inputs: tuple[Any, ...]) -> Alike:
        spec = self.spec
        if spec.storage is not None:  # judge k and v by their head dims, as 16-bit rows
            inputs = inputs[:1] if spec.D % 8 == spec.Dv % 8 == 0 else ()
        wide = bool(inputs) and all(describable(x) for x in inputs if x is not None)
        # sm_120 has descriptors, but no wgmma to feed from them: there they spill registers. A
        # descriptor cannot gather rows of pages.
        tma = (
            90 <= arch < 120 and self.t.v is not None and wide and not (spec.paged or spec.storage)
        )
        f = flags(spec, precision, tma, latent)
        busy = [x for x in tile_configs.FEATURES if getattr(f, x)] + ["given"] * spec.weights
        # A sum needs registers as a mask does, another program for several values of every score.
        if f.score_mod is not None:
            busy += ["mask"] if is_sum(spec.score_mod) else ["score_mod"] * 2
        busy += ["mask_mod"] * (f.mask_mod is not None)
        if spec.dtype.itemsize == 2:
            wide_mask = spec.mask_dtype in (torch.float32, torch.float64)
            # row_invariant: in another call the same rows may be narrow, and need the same tile.
            busy += ["narrow"] * (not wide or spec.row_invariant) + ["wide mask"] * wide_mask
        tiled = arch, spec.dtype.itemsize, max(spec.D, spec.Dv), tuple(busy), precision
        room = shared_memory()
        return Alike(arch, f, tiled, {}, room, room > 0 and tile_configs.lacks_room(arch, room))

    # ------------------------------------------------------------------------------------ forward

    def attend(self, out: Tensor, normaliser: Tensor) -> None:
        """The forward pass: by parts of the keys for few queries, else by rows."""

        def attempt(parts: int) -> None:
            if parts:
                self.decode(out, normaliser, parts)
            else:
                self.forward(out, normaliser)

        parts, tiles = self.splits()
        if parts and self.measured:
            key = autotune.key("splits", self.spec)
            others = tile_configs.other_splits(parts, tiles)
            parts = autotune.best(key, self.device, parts, others, attempt)
        attempt(parts)

    def splits(self) -> tuple[int, int]:
        """Into how many parts to split the keys of few queries, and how many tiles they have; 0
        parts for the forward kernel."""
        spec = self.spec
        if self.M > tile_configs.DECODE_ROWS or spec.row_invariant:
            return 0, 0
        seen = min(self.N, self.M + spec.left + spec.right)
        tile = self.config("decode")
        of_keys = blocks(seen, tile.BN)
        if of_keys <= tile_configs.FEW_TILES:
            return 0, of_keys
        programs = spec.B * spec.Hk * blocks(self.grouped, tile.BM)
        places = processors(self.device) * tile_configs.decoding(self.arch)
        return tile_configs.splits(programs, of_keys, places), of_keys

    @property
    def grouped(self) -> int:
        """Rows of a tile in decoding: the queries of every head that shares a key head."""
        return self.spec.H // self.spec.Hk * self.M

    def forward(self, out: Tensor, normaliser: Tensor) -> None:
        spec = self.spec
        self.launch(
            kernels().forward.forward_kernel,
            "forward",
            lambda c: blocks(self.M, c.BM) * spec.B * spec.H,
            self.inputs[:3],
            (operand(out), normaliser),
        )

    def decode(self, out: Tensor, normaliser: Tensor, splits: int) -> None:
        spec, decode = self.spec, kernels().decode
        items, M, _ = spec.memory_sizes
        rows = (splits, items, spec.H, M)
        partial = out.new_empty((*rows, spec.Dv), dtype=torch.float32)
        partial_m, partial_l = normaliser.new_empty(rows), normaliser.new_empty(rows)
        parts = partial, partial_m, partial_l
        self.launch(
            decode.split_kernel,
            "decode",
            lambda c: blocks(self.grouped, c.BM) * spec.B * spec.Hk * splits,
            self.inputs[:3],
            parts,
        )
        self.launch(
            decode.combine_kernel,
            "combine",
            lambda c: items * spec.H * M,
            (),
            (*parts, operand(out), normaliser, splits),
        )

    def weights(self, weights: Tensor) -> None:
        spec = self.spec
        heads = 1 if spec.average_heads else spec.H
        self.launch(
            kernels().weights.weights_kernel,
            "weights",
            lambda c: blocks(spec.M, c.BM) * blocks(spec.N, c.BN) * spec.B * heads,
            self.inputs[:2],
            (self.t.given("normaliser").contiguous(), operand(weights)),
            AVERAGE=spec.average_heads,
        )

    # ----------------------------------------------------------------------------------- backward

    def find_delta(self, out: Tensor | None, normaliser: Tensor, dlse: Tensor | None) -> None:
        """Compute self.normaliser, and self.of_rows, which backward reads for each row: two numbers
        to subtract from its scores, and delta, to subtract from dP."""
        spec = self.spec
        self.normaliser = normaliser.contiguous()
        items, M, _ = spec.memory_sizes
        PITCH = kernels().score.PITCH.value
        pitch = (blocks(M, PITCH) + spec.packed) * PITCH
        self.of_rows = normaliser.new_empty((3, items, spec.H, pitch))
        if not self.of_rows.numel():
            return
        self.launch(
            kernels().backward.delta_kernel,
            "delta",
            lambda c: blocks(pitch, c.BM) * items * spec.H,
            (),
            (operand(out), self.inputs[3], operand(dlse), self.normaliser, self.of_rows),
            F=kernels().score.Flags(scaled=self.flags.scaled, packed=self.flags.packed),
        )
        if spec.weights and not spec.constant_lse:
            self.walk_keys(None, sums=True)

    def walk_keys(self, dq: Tensor | None, sums: bool = False) -> None:
        spec = self.spec
        self.launch(
            kernels().backward.dq_kernel,
            "dq",
            lambda c: blocks(self.M, c.BM) * spec.B * spec.H,
            self.inputs,
            (self.of_rows, operand(dq), None),
            GIVEN=spec.weights,
            SUMS=sums,
            SHIFT=0,
        )

    def walk_rows(self, dk: Tensor | None, dv: Tensor | None) -> None:
        spec = self.spec
        if dk is not None and dv is not None and tile_configs.apart(*self.tiled):
            self.walk_rows(dk, None)
            self.walk_rows(None, dv)
            return
        self.launch(
            kernels().backward.dkv_kernel,
            "dkv" if dk is not None and dv is not None else "dv" if dk is None else "dk",
            lambda c: blocks(self.N, c.BN) * spec.B * spec.Hk,
            self.inputs,
            (self.of_rows, operand(dk), operand(dv)),
            GIVEN=spec.weights,
        )

    def gradients(self, needs_grad: Sequence[str]) -> dict[str, Tensor]:
        t, spec = self.t, self.spec
        wanted = {name: x for name in needs_grad if (x := getattr(t, name)) is not None}
        like = prepared(spec)
        laid = [(name, layout) for name, layout in like.gradients if name in wanted and layout]
        grads = {name: t.q.new_empty_strided(*layout, **like.stored) for name, layout in laid}
        if not spec.B * spec.H * self.M * self.N:
            grads = {name: x.zero_() for name, x in grads.items()}
            if "mask" in wanted:
                mask = wanted["mask"]
                grads["mask"] = torch.zeros_like(mask, dtype=spec.stored(mask.dtype))
            if "captured_floats" in wanted:
                grads["captured_floats"] = torch.zeros_like(wanted["captured_floats"])
        else:
            if "captured_floats" in wanted:
                floats = wanted["captured_floats"]
                grads["captured_floats"] = captured_sums.gradient(self, floats, grads.get("q"))
            elif "q" in grads:
                self.walk_keys(grads["q"])
            if "k" in grads or "v" in grads:
                self.walk_rows(grads.get("k"), grads.get("v"))
            if "mask" in wanted:
                grads["mask"] = self.mask_gradient(wanted["mask"])
        if "sinks" in wanted:
            grads["sinks"] = self.sink_gradient(wanted["sinks"])
        return grads

    def mask_gradient(self, mask: Tensor) -> Tensor:
        spec = self.spec
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        c = self.config(self.of_mask)
        summed = tuple(n == 1 for n in shape)

        def count(c: tile_configs.Config, over: bool) -> int:
            """The tiles of all heads, or of all that share an element, if `over`."""
            whole = (spec.B, spec.H, blocks(spec.M, c.BM), blocks(spec.N, c.BN))
            return math.prod(n for n, s in zip(whole, summed) if s == over)

        splits = min(count(c, True), max(1, 2 * processors(self.device) // count(c, False)))
        partial = mask.new_empty((splits, *shape), dtype=torch.float32)
        self.walk_mask(partial, lambda c: count(c, False) * splits, summed)
        dmask = partial[0] if splits == 1 else partial.sum(0)
        return dmask.to(spec.stored(mask.dtype)).view(mask.shape)

    def walk_mask(self, partial: Tensor, programs: Programs, summed: tuple[bool, ...]) -> None:
        self.launch(
            kernels().backward.dmask_kernel,
            self.of_mask,
            programs,
            self.inputs,
            (self.of_rows, partial),
            # One tile from each tensor is not worth a descriptor. The mask is read in any case.
            F=self.flags._replace(tma=False, block_mask=False),
            GIVEN=self.spec.weights,
            SUMMED=summed,
        )

    def sink_gradient(self, sinks: Tensor) -> Tensor:
        """dsinks = -sum p_sink delta: a sink is a key with a probability and no value."""
        p, delta = self.sink_shares(sinks)
        return -(p * delta).sum((0, 2)).to(self.spec.stored(sinks.dtype))

    def sink_shares(self, sinks: Tensor) -> tuple[Tensor, Tensor]:
        """The probabilities of sinks (B,H,M), and delta."""
        delta = self.of_rows[2, ..., : self.spec.memory_sizes[1]]
        return sink_shares(sinks, self.normaliser), delta

    # ----------------------------------------------------------------------------------- launching

    @property
    def together(self) -> int:
        """How many heads' keys and values the cache holds, for longest-first scheduling."""
        spec = self.spec
        if spec.right >= self.M + self.N:
            return 1
        size = max(1, self.N * (spec.D + spec.Dv) * spec.dtype.itemsize)
        heads = max(1, LONGEST_FIRST_BYTES // size) * (spec.H // spec.Hk)
        return min(heads, spec.B * spec.H)

    def block_mask(self, side: str, c: tile_configs.Config) -> Any:
        """The BlockMask of a pass with tiles of these sizes that own "rows" or "keys"."""
        if block_mask := self.block_masks.get((side, c.BM, c.BN)):
            return block_mask
        spec, (mask, lengths, *_), of_keys = self.spec, self.extras, side == "keys"
        _, of_items, of_heads = reads(spec.score_mod)
        of_items = of_items or lengths is not None or (mask is not None and mask.sb)
        of_heads = of_heads or (mask is not None and mask.sh)
        items, heads = spec.B if of_items else 1, spec.H if of_heads else 1
        in_numbers = self.flags.mask == "add"
        if in_numbers and of_keys and self.sees is None:
            self.block_mask("rows", c)
        elif in_numbers and not of_keys:
            self.sees = self.t.q.new_empty((items * heads, spec.M), dtype=torch.int8)
        tiles, steps = blocks(spec.M, c.BM), blocks(spec.N, c.BN)
        if of_keys:
            tiles, steps = steps, tiles
        lists = 2 if in_numbers and not of_keys else 1
        kernel = kernels().block_mask
        size, programs = kernel.HEADER.value + lists * steps, items * heads * tiles
        to = self.t.q.new_empty((programs, size), dtype=torch.int32)
        planes = heads, heads if items > 1 else 0, 1 if heads > 1 else 0
        block_mask = kernel.BlockMask(to, size, self.sees, *planes)
        self.launch(
            kernel.block_mask_kernel,
            "block_mask",
            lambda c: programs,
            (),
            (block_mask,),
            tile_configs.reading(c),
            KEYS=of_keys,
        )
        self.block_masks[side, c.BM, c.BN] = block_mask
        return block_mask

    def config(self, which: str) -> tile_configs.Config:
        tile = _tile(tile_configs.config, which, *self.tiled)
        # row_invariant: what another layout of the same rows needs must not change the tile.
        fixed = self.lacks_room and self.spec.row_invariant
        return tile_configs.smallest(which, tile) if fixed else tile

    def launch(
        self,
        kernel: Any,
        which: str,
        programs: Programs,
        own: tuple[Any, ...],
        others: tuple[Any, ...],
        config: tile_configs.Config | None = None,
        **constexprs: Any,
    ) -> None:
        """Run a kernel on a grid of `programs(config)`, with this tile, else with that of its table
        or of the autotuner; with a smaller one where the chip has no room for it.

        own: its first arguments, which are tensors of the call.
        """
        spec, args = self.spec, own + others
        F = constexprs.setdefault("F", self.flags)
        if F.precision != "ieee":
            products = _tile(tile_configs.products, which, *self.tiled)
            constexprs["F"] = F._replace(precision=products)

        def attempt(c: tile_configs.Config, exact: bool = False) -> None:
            """Launch this tile, or a smaller one unless `exact`."""
            keeps, again = self.key and not kernel.pre_run_hooks, None
            if keeps:
                key = (kernel.fn, c, *constexprs.values(), specialization_key(others))
                again = self.launches.get(key)
                if isinstance(again, tile_configs.Config):
                    if exact:
                        raise RuntimeError(no_room(kernel.__name__, self.room, c))
                    return attempt(again)
            extras = self.extras
            if side := self.flags.block_mask and OWNS.get(which):
                extras = extras._replace(block_mask=self.block_mask(side, c))
            if again:
                return again(args, extras)
            options = dict(num_warps=c.warps, num_stages=c.stages, enable_fp_fusion=True)
            BD, BX = columns(spec.D) if which in ("forward", "decode") else (padded(spec.D), 0)
            D = min(spec.D, BD)
            tile = kernels().score.Tile(c.BM, c.BN, D, spec.Dv, BD, padded(spec.Dv), spec.D - D, BX)
            constants, sizes = constexprs | dict(T=tile), scalars(spec, self.together)
            grid = (programs(c),)
            given = (*args, *sizes, extras)
            # Without kept launches each would be compiled twice, if only to find it in a cache.
            looks = self.lacks_room or (keeps and self.room)
            if looks and not fits(self.room, kernel, grid, *given, **constants, **options):
                if exact or not (below := tile_configs.smaller(which, c)):
                    raise RuntimeError(no_room(kernel.__name__, self.room, c))
                if keeps:
                    launch_cache.keep(self.launches, key, below)
                return attempt(below)
            made = run(kernel, grid, *given, **constants, **options)
            if keeps and made is not None:
                named = tuple(constants[x] for x in kernel.arg_names if x in constants)
                launch_cache.keep(self.launches, key, Launch(made, *grid, sizes, named))

        # A mask's lists are of the tiles that the caller named.
        exact, config = config is not None, config or self.config(which)
        if self.measured:
            only = functools.partial(attempt, exact=True)
            config = self._measured(which, config, args, constexprs, only)
        attempt(config, exact)

    def _measured(
        self,
        which: str,
        default: tile_configs.Config,
        args: tuple[Any, ...],
        constexprs: dict[str, Any],
        attempt: Callable[[tile_configs.Config], None],
    ) -> tile_configs.Config:
        """The tile of a file or a search; kept for calls of the kind, but for those of a search."""
        given = tuple(x is not None for x in args)  # with None for some, it is another kernel
        about = "tile", which, default, given, *constexprs.values()
        search = autotune.searches()
        if (tile := None if search else self.launches.get(about)) is None:
            key = autotune.key(which, self.spec, **constexprs, given=given)
            alternatives = tile_configs.candidates(which, default)
            tile = autotune.best(key, self.device, default, alternatives, attempt)
            if not search:
                launch_cache.keep(self.launches, about, tile)
        return tile


@functools.lru_cache(maxsize=4096)
def _tile(table: Callable[..., Any], *about: Any) -> Any:
    return table(*about)


def no_room(name: str, room: int, c: tile_configs.Config) -> str:
    return (
        f"{name}: got a GPU with {room} bytes of shared memory for a block, fewer than a tile of "
        f"{c.BM} x {c.BN} in {c.stages} stages needs: expected more, a smaller head dim, or "
        'backend="reference"'
    )
