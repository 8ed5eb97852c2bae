// Which rows each block of a persistent grid computes, and which boxes of tensors these are.
#pragma once
#include "../seqlen_info.cuh"
#include "ptx.cuh"
#include "tiles.h"

namespace fa {
namespace sm90 {

// The value of the warp's first lane, for all lanes: the compiler then knows that they agree.
FA_DEVICE int warp_uniform(int x) { return __shfl_sync(ptx::kWholeWarp, x, 0); }

// Known at compile time.
template <bool x>
struct Known {
  static constexpr bool value = x;
};

// Some rows of a head.
struct Task {
  int b, h, first_row;
};

// All tasks of a call. Heads are taken `together` at a time. The last heads' tasks go longest first
// (with a causal band, the last rows see most keys), those of the heads before shortest first, and so
// on, so that adjacent tasks are of about one length. A block takes every gridDim.x-th task, and of
// every second round the one that the last block would take, so that all have about as much to do.
// Were all heads' tasks longest first, some blocks could take the first tasks of all heads.
struct Schedule {
  int tasks, blocks, together, heads;  // blocks: of a head's rows; heads: those of all items
  int key_box;                         // rows of a box of keys: those of a tile, or fewer in pages

  FA_DEVICE int index(int turn) const {
    const int grid = static_cast<int>(gridDim.x), at = static_cast<int>(blockIdx.x);
    return turn * grid + (turn % 2 ? grid - 1 - at : at);
  }
  FA_DEVICE bool has(int turn) const { return index(turn) < tasks; }

  FA_DEVICE Task task(int turn, int rows, int64_t heads_of_item) const {
    const int at = index(turn), before = at / (blocks * together) * together;  // heads
    const int here = min(together, heads - before), own = at - before * blocks;
    const bool rises = (heads - 1 - before) / together % 2;
    const int head = before + own % here, block = rises ? own / here : blocks - 1 - own / here;
    const int H = static_cast<int>(heads_of_item);
    return {warp_uniform(head / H), warp_uniform(head % H), warp_uniform(block * rows)};
  }
};

// Where the box is that begins with this row of a task, and with column 64 part.
FA_DEVICE ptx::BoxAt row_box(const FaTensor& x, const Item& p, const Task& task, int part,
                             int below) {
  const int item = p.cu_q || !x.stride[0] ? 0 : task.b;  // maps have no dimensions of stride 0
  return {kBoxColumns * part, p.first_row + task.first_row + below, x.stride[1] ? task.h : 0, item};
}

// The boxes of an item's keys or values, of one head.
struct KeyBoxes {
  const int64_t* pages;  // of the item, or null
  int item, head, first_key, page, last_page, P, box;

  FA_DEVICE KeyBoxes(const FaParams& batch, const Item& p, int key_box, const Task& task)
      : pages(batch.page ? batch.pages + task.b * batch.blocks : nullptr),
        item(batch.cu_q ? 0 : task.b),
        head(static_cast<int>(key_head(batch, task.h))),
        first_key(0),
        page(static_cast<int>(batch.page)),
        last_page(0),
        P(static_cast<int>(batch.P)),
        box(key_box) {
    if (pages)
      last_page = (static_cast<int>(p.N) - 1) / page;
    else if (batch.cu_k)
      first_key = static_cast<int>(Span(batch.cu_k, task.b, batch.S, batch.N).first);
  }

  // Asks for a tile of `rows` rows, in `parts` of 64 columns.
  template <int rows, int parts>
  FA_DEVICE void load(ptx::Site site, uint32_t to, const TensorMap* map, const FaTensor& x,
                      int tile, uint32_t mbarrier) const {
#pragma unroll 1
    for (int below = 0; below < rows; below += box) {
      ptx::BoxAt at = {0, first_key + tile * rows + below, x.stride[1] ? head : 0,
                       x.stride[0] ? item : 0};
      if (pages) {
        const int number = min(at.row / page, last_page);
        at.item = static_cast<int>(most(0, least(pages[number], P - 1)));
        at.row %= page;
      }
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        at.column = kBoxColumns * part;
        ptx::load_box(site, to + (part * rows + below) * 128, map, at, mbarrier);
      }
    }
  }
};

}  // namespace sm90
}  // namespace fa
