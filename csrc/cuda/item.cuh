// A packed batch as calls of its sequences: a block computes with the sizes of its own one, and
// with tensors that begin where that does. So it has the bits that it has alone, and no loop knows.
#pragma once
#include "../band.h"
#include "../item_size.h"
#include "ptx.cuh"

namespace fa {

// Where the rows, or the keys, of a sequence begin, and how many it has. Cut to what there is: on
// a GPU nobody has looked at the offsets.
struct Span {
  int64_t first, count;

  FA_DEVICE Span(const int64_t* cu, int64_t b, int64_t total, int64_t longest)
      : first(most(0, least(cu[b], total))),
        count(least(most(first, least(cu[b + 1], total)) - first, longest)) {}
};

// The call that an item of a batch is: of a packed one its sequence, else the batch itself. What is
// packed has no items, and begins as if it had.
struct Item : FaParams {
  int first_row;  // of it in a packed batch

  FA_DEVICE Item(const FaParams& batch, int64_t b) : FaParams(batch), first_row(0) {
    if (!cu_q) return;
    const Span rows(cu_q, b, T, M);
    const auto move = [b](FaTensor& x, int64_t first) {
      const int64_t by = first * x.stride[2] - b * x.stride[0];
      if (x.data) x.data = static_cast<char*>(x.data) + by * item_size(x.dtype);
    };
    for (FaTensor* x : {&q, &lse, &out, &dq, &dout, &dlse}) move(*x, rows.first);
    if (page) {  // which no item has to itself
      move(k, 0), move(v, 0);
      N = P ? most(0, least(lengths[b], N)) : 0;
    } else {
      const Span keys(cu_k, b, S, N);
      for (FaTensor* x : {&k, &v, &dk, &dv}) move(*x, keys.first);
      N = keys.count;
    }
    M = rows.count;
    first_row = static_cast<int>(rows.first);
  }
};

}  // namespace fa
