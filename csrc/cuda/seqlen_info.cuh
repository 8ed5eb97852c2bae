// The sizes and addresses of one sequence of a packed batch. A block computes with the sizes of its
// sequence, and with tensors that begin where the sequence does. So a sequence has the bits that it
// has alone, and the loops are those of other calls.
#pragma once
#include "../common/band.h"
#include "../common/item_size.h"
#include "ptx.cuh"

namespace fa {

// Where the rows, or the keys, of a sequence begin, and how many it has. Clamped to the total: on a
// GPU the offsets have not been checked.
struct Span {
  int64_t first, count;

  FA_DEVICE Span(const int64_t* cu, int64_t b, int64_t total, int64_t longest)
      : first(most(0, least(cu[b], total))),
        count(least(most(first, least(cu[b + 1], total)) - first, longest)) {}
};

// The call that an item of a batch is: in a packed batch its sequence, else the batch itself.
// Packed tensors have no items; their addresses are shifted as if they had.
struct Item : FaParams {
  int first_row;  // of the sequence in a packed batch

  FA_DEVICE Item(const FaParams& batch, int64_t b) : FaParams(batch), first_row(0) {
    if (!cu_q) return;
    const Span rows(cu_q, b, T, M);
    const auto move = [b](FaTensor& x, int64_t first) {
      const int64_t by = first * x.stride[2] - b * x.stride[0];
      if (x.data) x.data = static_cast<char*>(x.data) + by * item_size(x.dtype);
    };
    for (FaTensor* x : {&q, &lse, &out, &dq, &dout, &dlse}) move(*x, rows.first);
    if (page) {  // pages belong to no single item
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
