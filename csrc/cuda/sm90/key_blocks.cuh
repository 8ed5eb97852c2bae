// The keys of a block of the backward pass, and the rows that see them.
#pragma once
#include "schedule.cuh"

namespace fa {
namespace sm90 {

// The blocks of a call: of a head's keys; the key heads of an item, and the query heads of each; and
// their order. Key heads are taken `together` at a time: as many as have rows and sums of dq that fit
// the L2 cache, because blocks that are not in step read these rows at different times.
//
// Blocks take a head's last keys first, and its rows from the first to the last. Then a block begins
// with rows that no other block adds to before it, and no block waits long for its turn. Without
// turns and with a causal band the reversed order is faster: first keys first, which most rows see,
// and rows from the last to the first.
struct KeySchedule {
  unsigned blocks, heads, all_heads, together;
  int group;
  bool in_turn, reversed;

  KeySchedule(const FaParams& p, int64_t width, bool banded, bool reversible)
      : blocks(static_cast<unsigned>((p.N + kBlockKeys - 1) / kBlockKeys)),
        heads(static_cast<unsigned>(p.Hk)),
        all_heads(static_cast<unsigned>(p.Hk * p.B)),
        group(static_cast<int>(p.H / p.Hk)),
        in_turn(p.deterministic),
        reversed(reversible && !p.deterministic) {
    // Bytes of q, dout and the sums of dq, of 50 MB of L2. Measured on an H200; where rows see all
    // keys, blocks in turn are far apart.
    const int64_t cache = int64_t{in_turn && !banded ? 16 : 32} << 20;
    const int64_t of_head = most(1, p.M) * (2 * (p.D + p.Dv) + 4 * width) * group;
    together = static_cast<unsigned>(most(1, least(8, cache / of_head)));
  }
};

// The keys of a block, by its ticket.
struct KeyTask {
  int b, hk, first_key;

  static FA_DEVICE KeyTask of(const KeySchedule& schedule, unsigned ticket) {
    const unsigned before = ticket / (schedule.blocks * schedule.together) * schedule.together;
    const unsigned here = min(schedule.together, schedule.all_heads - before);  // heads
    const unsigned own = ticket - before * schedule.blocks, of = before + own % here;
    const unsigned block = schedule.reversed ? own / here : schedule.blocks - 1 - own / here;
    return {static_cast<int>(of / schedule.heads), static_cast<int>(of % schedule.heads),
            static_cast<int>(block) * kBlockKeys};
  }
  FA_DEVICE int past() const { return first_key + kBlockKeys; }
};

// Where the box is that begins with the first of these keys, and with column 64 part.
FA_DEVICE ptx::BoxAt key_box(const FaTensor& x, const FaParams& batch, const KeyTask& task,
                             int part) {
  int first = task.first_key;
  if (batch.cu_k) first += static_cast<int>(Span(batch.cu_k, task.b, batch.S, batch.N).first);
  const int item = batch.cu_k || !x.stride[0] ? 0 : task.b;  // maps have no dimensions of stride 0
  return {kBoxColumns * part, first, x.stride[1] ? task.hk : 0, item};
}

// The tiles of rows that see a block's keys: [begin, end). The band hides none of these keys in
// [whole_begin, whole_end), which is empty at `begin` if there are no such tiles.
struct RowTiles {
  int begin, end, whole_begin, whole_end;

  FA_DEVICE int count() const { return end - begin; }
  // The tile that passes as the i-th.
  template <class B>
  FA_DEVICE int at(int i, bool reversed) const {
    return B::kReversible && reversed ? end - 1 - i : begin + i;
  }

  template <int rows, bool banded>
  static FA_DEVICE RowTiles of(const Item& p, const KeyTask& task) {
    constexpr int kFar = 1 << 30;
    const KeyRange seen = row_range(p, task.b, task.first_key, least(task.past(), p.N));
    const Visible visible(p, task.b);
    const int begin = banded ? warp_uniform(static_cast<int>(seen.lo) / rows) : 0;
    const int end = (static_cast<int>(seen.hi) + rows - 1) / rows;
    const int last = min(task.past(), visible.length) - 1;
    const int from = max(visible.rows_of(last, kFar).lo, 0);
    const int to = visible.rows_of(task.first_key, kFar).hi;
    const int whole_begin = max(begin, (min(from, kFar) + rows - 1) / rows);
    const int whole_end = min(end, to >= p.M ? end : max(to, 0) / rows);
    const bool any = whole_begin < whole_end;
    return {begin, warp_uniform(end), warp_uniform(any ? whole_begin : begin),
            warp_uniform(any ? whole_end : begin)};
  }
};

// The tiles of rows for which a block starts the sums of dq: [begin, end). None of these rows sees
// keys of blocks that are taken before it.
struct FirstTiles {
  int begin, end;

  template <int rows>
  static FA_DEVICE FirstTiles of(const Item& p, const KeyTask& task, const RowTiles& tiles,
                                 bool reversed) {
    const KeyRange taken =
        reversed ? row_range(p, task.b, 0, task.first_key) : row_range(p, task.b, task.past(), p.N);
    if (taken.empty()) return {tiles.begin, tiles.end};
    if (reversed) return {(static_cast<int>(taken.hi) + rows - 1) / rows, tiles.end};
    return {tiles.begin, static_cast<int>(taken.lo) / rows};
  }
  FA_DEVICE bool has(int tile) const { return tile >= begin && tile < end; }
};

}  // namespace sm90
}  // namespace fa
