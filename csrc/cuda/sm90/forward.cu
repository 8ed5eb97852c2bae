// Chooses the kernel of a forward pass, of few rows or many, or says why there is none.
#include "forward_launch.cuh"
#include "kernels.h"

#include "../decode_parts.cuh"
#include "../mask_tiling.h"

namespace fa {
namespace sm90 {

// A box of keys has at least the 8 rows that the swizzle permutes.
const char* declines_forward(const FaParams& p) {
  const Sizes q = rows_of(p, p.D), k = keys_of(p, p.D), v = keys_of(p, p.Dv);
  if (p.D % 8 || p.Dv % 8 || !p.Dv) return "its head dims are not multiples of 8";
  if (p.D > kWidest || p.Dv > kWidest) return "its head dim is over 256";
  if (is_general(p) && most(p.D, p.Dv) > kWidestGeneral)
    return "with a mask, ALiBi, softcap or dropout its head dim is over 192";
  if (is_empty(q) || is_empty(k)) return "it has no queries or no keys";
  if (p.M <= kDecodeRows && is_general(p))
    return "few rows with a mask, ALiBi, softcap or dropout have no kernel of sm_90";
  if (p.M <= kDecodeRows && p.H > 1 && !p.q.stride[1])
    return "few rows of heads that are one in memory have no kernel of sm_90";
  if (p.page % 8) return "its pages are not of a multiple of 8 keys";
  if (MaskTiling::suits(p)) return "other kernels skip tiles of its mask";
  if (!has_tensor_map(p.q, q) || !has_tensor_map(p.k, k) || !has_tensor_map(p.v, v) ||
      !has_tensor_map(p.out, rows_of(p, p.Dv)))
    return "rows of its tensors are in one place, or not at multiples of 16 bytes";
  return nullptr;
}

const char* declines(const FaParams& p, int64_t pass) {
  if (!encode_tiled()) return "the driver cannot encode tensor maps";
  return pass == FA_FORWARD ? declines_forward(p) : declines_backward(p);
}

template <class Type, bool general, bool masked>
int forward_of(const FaParams& p, int64_t multiprocessors, void* stream) {
  const auto start = [&](auto dims) {
    using To = decltype(dims);
    if constexpr (FA_CUDA_HAS_DIM(To::kD) && (!general || To::kD <= kWidestGeneral))
      return start_forward < Type, To::kD, To::kDv, general,
             masked || (general && !To::kUnmasked) > (p, multiprocessors, stream);
    else
      return static_cast<int>(cudaErrorInvalidValue);
  };
  return with_dims(p, start);
}

int64_t forward_splits(const FaParams& p, int64_t multiprocessors) {
  if (p.M > kDecodeRows) return 1;
  int64_t splits = 1;
  with_dims(p, [&](auto dims) {
    constexpr int tile = decode_tile(dims.kD, dims.kDv);
    splits = splits_of_keys(p, DecodeRows(p).blocks(p), tile, multiprocessors);
    return 0;
  });
  return splits;
}

int forward(const FaParams& p, int64_t multiprocessors, void* stream) {
  if (p.M <= kDecodeRows) return decode(p, forward_splits(p, multiprocessors), stream);
  return with_type(p, [&](auto type) {
    using Type = decltype(type);
    if (!is_general(p)) return forward_of<Type, false, false>(p, multiprocessors, stream);
    return p.mask.data ? forward_of<Type, true, true>(p, multiprocessors, stream)
                       : forward_of<Type, true, false>(p, multiprocessors, stream);
  });
}

int64_t forward_workspace(const FaParams& p, int64_t multiprocessors) {
  const int64_t splits = forward_splits(p, multiprocessors);
  return splits == 1 ? 0 : splits_bytes(p, splits);
}

}  // namespace sm90
}  // namespace fa
