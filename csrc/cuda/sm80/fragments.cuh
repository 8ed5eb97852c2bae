// What a warp's lanes hold of its 16 rows while tensor cores work on them.
#pragma once
#include "../ptx.cuh"

namespace fa {
namespace sm80 {

// Lane 4 g + t: of rows g and g + 8 the columns 2 t and 2 t + 1 of every 8.
template <int columns>
using Accumulator = float[columns / 8][4];

// Two neighbouring 16 x 8 parts of an accumulator are what the left side of a product takes.
template <class Type>
FA_DEVICE void pack_left(Type type, uint32_t (&a)[4], const float (&low)[4],
                         const float (&high)[4]) {
  a[0] = ptx::pack(type, low[0], low[1]);
  a[1] = ptx::pack(type, low[2], low[3]);
  a[2] = ptx::pack(type, high[0], high[1]);
  a[3] = ptx::pack(type, high[2], high[3]);
}

}  // namespace sm80
}  // namespace fa
