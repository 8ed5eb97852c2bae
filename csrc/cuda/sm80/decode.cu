// Launches a decode call: chooses the number of splits of its keys, and its kernels.
#include "decode.cuh"

#include "../launch.h"
#include "instances.h"
#include "kernels.h"

namespace fa {
namespace sm80 {

// Tiles of rows in a block.
int64_t row_tiles(const FaParams& p) { return p.H / p.Hk * p.M <= 16 ? 1 : 4; }

int64_t blocks_of_a_split(const FaParams& p) {
  return ceil_div(p.H / p.Hk * p.M, 16 * row_tiles(p)) * p.Hk * p.B;
}

int64_t decode_splits(const FaParams& p, int64_t multiprocessors) {
  if (p.B * p.H * p.M == 0) return 1;
  return splits_of_keys(p, blocks_of_a_split(p), decode_keys(most(p.D, p.Dv)), multiprocessors);
}

template <class Type, bool general>
int combine_of(const FaParams& p, int64_t splits, void* stream) {
  const Parts parts = splits_of(p, splits);
  const size_t bytes = sizeof(float) * kCombineWarps * static_cast<size_t>(parts.width);
  return launch_blocks("combine_kernel", combine_kernel<Type, general>, parts.rows,
                       32 * kCombineWarps, bytes, stream, p, static_cast<int>(splits));
}

int combine(const FaParams& p, int64_t splits, void* stream) {
  return with_type(p,
                   [&](auto type) { return combine_of<decltype(type), false>(p, splits, stream); });
}

template <class F>
int start(const FaParams& p, int64_t splits, void* stream) {
  const int error =
      launch_blocks("decode_kernel", decode_kernel<F>, blocks_of_a_split(p) * splits, F::kThreads,
                    F::kSharedBytes, stream, p, static_cast<int>(splits));
  if (error || splits == 1) return error;
  return combine_of<typename F::Type, F::kGeneral>(p, splits, stream);
}

template <class Type, bool general>
int decode_of(const FaParams& p, int64_t splits, void* stream) {
  return with_dims(p, [&](auto dims) {
    using To = decltype(dims);
    return row_tiles(p) == 1 ? start<Decode<Type, To::kD, To::kDv, 1, general>>(p, splits, stream)
                             : start<Decode<Type, To::kD, To::kDv, 4, general>>(p, splits, stream);
  });
}

template <class Type>
int decode_of(const FaParams& p, int64_t splits, void* stream) {
  if (p.B * p.H * p.M == 0) return 0;
  return is_general(p) ? decode_of<Type, true>(p, splits, stream)
                       : decode_of<Type, false>(p, splits, stream);
}

int64_t decode_workspace(const FaParams& p, int64_t multiprocessors) {
  const int64_t splits = decode_splits(p, multiprocessors);
  return splits == 1 ? 0 : splits_bytes(p, splits);
}

int decode(const FaParams& p, int64_t multiprocessors, void* stream) {
  const int64_t splits = decode_splits(p, multiprocessors);
  return with_type(p, [&](auto type) { return decode_of<decltype(type)>(p, splits, stream); });
}

}  // namespace sm80
}  // namespace fa
