// Tensor maps, by which the asynchronous proxy copies boxes between tensors and shared memory. The
// driver encodes them on the host; kernels take them as __grid_constant__ parameters.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "../../abi.h"

namespace fa {

using TensorMap = CUtensorMap;

constexpr int kBoxColumns = 64;  // 128 bytes, the span of the swizzle

// Sizes of a tensor (items, heads, rows, columns).
struct Sizes {
  int64_t size[4];
};

inline bool is_empty(const Sizes& of) {
  return !of.size[0] || !of.size[1] || !of.size[2] || !of.size[3];
}

// True if the asynchronous proxy can read the tensor: its elements of 16 bits are adjacent, and
// rows, heads and items are at multiples of 16 bytes. Rows are in several places, as boxes have many
// of them.
inline bool has_tensor_map(const FaTensor& x, const Sizes& of) {
  bool fits = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride[3] == 1;
  fits &= of.size[2] == 1 || x.stride[2];
  for (int at = 0; at < 3; ++at) fits &= of.size[at] == 1 || x.stride[at] % 8 == 0;
  return fits;
}

// cuTensorMapEncodeTiled, or null if the driver lacks it. It comes from the runtime, so that the
// library does not link to the driver.
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
inline EncodeTiled encode_tiled() {
  static thread_local void* entry = nullptr;  // a lookup takes time
  constexpr unsigned kSince = 12000;
  cudaDriverEntryPointQueryResult status;
  if (!entry && (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kSince,
                                                  cudaEnableDefault, &status) ||
                 status != cudaDriverEntryPointSuccess))
    entry = nullptr;
  return reinterpret_cast<EncodeTiled>(entry);
}

// Encodes a map of x with boxes of kBoxColumns columns by `box_rows` rows of `box_heads` heads,
// swizzled by 128 bytes.
// Elements past an edge read as 0. The driver refuses strides of 0: such a dimension has size 1 in
// the map, as has one that is never stepped along. Returns CUDA's error code, 0 for none.
inline int encode(TensorMap& map, const FaTensor& x, const Sizes& of, int64_t box_rows,
                  int64_t box_heads = 1) {
  const EncodeTiled entry = encode_tiled();
  if (!entry) return cudaErrorNotSupported;
  cuuint64_t sizes[4], strides[3];  // columns first
  for (int at = 0; at < 4; ++at) {
    const bool stepped = of.size[at] > 1 && x.stride[at];
    sizes[3 - at] = stepped ? static_cast<cuuint64_t>(of.size[at]) : 1;
    if (at < 3) strides[2 - at] = stepped ? static_cast<cuuint64_t>(x.stride[at]) * 2 : 16;
  }
  const cuuint32_t box[] = {kBoxColumns, static_cast<cuuint32_t>(box_rows),
                            static_cast<cuuint32_t>(box_heads), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const auto type =
      x.dtype == FA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult failed =
      entry(&map, type, 4, x.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return static_cast<int>(failed);
}

}  // namespace fa
