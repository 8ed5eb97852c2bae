// The keys of a block of the backward pass, and the rows that see them.
#pragma once
#include "schedule.cuh"

namespace fa {
namespace sm90 {

// The blocks of a call: of a head's keys; the key heads of an item, and the query heads of each.
struct KeySchedule {
  unsigned blocks, heads, all_heads;
  int group;

  explicit KeySchedule(const FaParams& p)
      : blocks(static_cast<unsigned>((p.N + kBlockKeys - 1) / kBlockKeys)),
        heads(static_cast<unsigned>(p.Hk)),
        all_heads(static_cast<unsigned>(p.Hk * p.B)),
        group(static_cast<int>(p.H / p.Hk)) {}
};

// The keys of a block, by its ticket. Blocks take the last keys first, of some heads at a time, so
// that fewer begin behind one another.
struct KeyTask {
  int b, hk, first_key, past;

  FA_DEVICE KeyTask(const KeySchedule& schedule, unsigned ticket) {
    constexpr unsigned kTogether = 8;
    const unsigned before = ticket / (schedule.blocks * kTogether) * kTogether;  // heads
    const unsigned here = min(kTogether, schedule.all_heads - before);
    const unsigned own = ticket - before * schedule.blocks, of = before + own % here;
    b = warp_uniform(static_cast<int>(of / schedule.heads));
    hk = warp_uniform(static_cast<int>(of % schedule.heads));
    first_key = warp_uniform(static_cast<int>(schedule.blocks - 1 - own / here) * kBlockKeys);
    past = first_key + kBlockKeys;
  }
};

// Where the box is that begins with the first of these keys, and with column 64 part.
FA_DEVICE ptx::BoxAt key_box(const FaTensor& x, const FaParams& batch, const KeyTask& task,
                             int part) {
  int first = task.first_key;
  if (batch.cu_k) first += static_cast<int>(Span(batch.cu_k, task.b, batch.S, batch.N).first);
  const int item = batch.cu_k || !x.stride[0] ? 0 : task.b;  // maps have no dimensions of stride 0
  return {kBoxColumns * part, first, x.stride[1] ? task.hk : 0, item};
}

// The tiles of rows that see a block's keys: [begin, end). In [whole_begin, whole_end), which is empty
// at `begin` if there are none, the band hides none of these keys. Up to `begins_to` no rows see later keys, and this block is the first to add.
struct RowTiles {
  int begin, end, whole_begin, whole_end, begins_to;

  template <int rows>
  static FA_DEVICE RowTiles of(const Item& p, const KeyTask& task) {
    constexpr int kFar = 1 << 30;
    const KeyRange seen = row_range(p, task.b, task.first_key, least(task.past, p.N));
    const KeyRange later = row_range(p, task.b, task.past, p.N);
    const Visible visible(p, task.b);
    const int begin = static_cast<int>(seen.lo) / rows;
    const int end = (static_cast<int>(seen.hi) + rows - 1) / rows;
    const int last = min(task.past, visible.length) - 1;
    const int from = max(visible.rows_of(last, kFar).lo, 0);
    const int to = visible.rows_of(task.first_key, kFar).hi;
    const int whole_begin = max(begin, (min(from, kFar) + rows - 1) / rows);
    const int whole_end = min(end, to >= p.M ? end : max(to, 0) / rows);
    const bool any = whole_begin < whole_end;
    return {warp_uniform(begin), warp_uniform(end), warp_uniform(any ? whole_begin : begin),
            warp_uniform(any ? whole_end : begin),
            warp_uniform(later.empty() ? end : static_cast<int>(later.lo) / rows)};
  }
};

}  // namespace sm90
}  // namespace fa
