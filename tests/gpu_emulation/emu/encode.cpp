// The driver's cuTensorMapEncodeTiled, and the runtime's way to it. What the driver refuses by its
// documentation is refused here.
#include <algorithm>

#include "block.h"
#include "cuda.h"
#include "runtime.h"

namespace emu {

namespace {

constexpr int kKnownSince = 12000;  // the driver's version that has the function

struct Tensor {
  CUtensorMapDataType type;
  cuuint32_t rank;
  const void* address;
  const cuuint64_t *dims, *strides;
  const cuuint32_t *box, *element_strides;
  CUtensorMapInterleave interleave;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion promotion;
  CUtensorMapFloatOOBfill fill;
};

// A map has the numbers of tensormap.replace; those of the driver differ for some types.
uint8_t number_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ: return 8;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 9;
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 10;
    default: return static_cast<uint8_t>(type);
  }
}

bool is_float(CUtensorMapDataType type) { return type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16; }

// Types of less than a byte and swizzles of larger atoms came with sm_100.
bool options_allowed(const Tensor& of) {
  const bool known = of.type >= 0 && of.type <= CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ &&
                     of.interleave >= 0 && of.interleave <= CU_TENSOR_MAP_INTERLEAVE_32B &&
                     of.swizzle >= 0 && of.swizzle <= CU_TENSOR_MAP_SWIZZLE_128B &&
                     of.promotion >= 0 && of.promotion <= CU_TENSOR_MAP_L2_PROMOTION_L2_256B &&
                     of.fill >= 0 && of.fill <= CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
  if (!known || of.rank < 1 || of.rank > 5) return false;
  if (of.fill && !is_float(of.type)) return false;
  if (of.interleave && of.rank < 3) return false;
  return of.interleave != CU_TENSOR_MAP_INTERLEAVE_32B || of.swizzle == CU_TENSOR_MAP_SWIZZLE_32B;
}

bool sizes_allowed(const Tensor& of, uint64_t bytes) {
  const uint64_t align = of.interleave == CU_TENSOR_MAP_INTERLEAVE_32B ? 32 : 16;
  const auto address = reinterpret_cast<uintptr_t>(of.address);
  if (!of.address || !of.dims || !of.box || !of.element_strides) return false;
  if (address % align || (of.rank > 1 && !of.strides)) return false;
  for (cuuint32_t i = 0; i < of.rank; ++i) {
    if (!of.dims[i] || of.dims[i] > uint64_t{1} << 32) return false;
    if (!of.box[i] || of.box[i] > 256) return false;
    if (!of.element_strides[i] || of.element_strides[i] > 8) return false;
    // 0 is a multiple, too, but the documentation's formula gives no stride of 0.
    if (i && (!of.strides[i - 1] || of.strides[i - 1] % align || of.strides[i - 1] >> 40))
      return false;
  }
  const uint64_t row = of.box[0] * bytes;
  if (of.interleave) return true;
  return row % 16 == 0 && (!of.swizzle || row <= uint64_t{16} << of.swizzle);
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                CUtensorMapFloatOOBfill fill) {
  if (fails("encode a tensor map")) return static_cast<CUresult>(failure());
  const Tensor of{type, rank, address, dims, strides, box, element_strides, interleave, swizzle,
                  promotion, fill};
  if (!map || reinterpret_cast<uintptr_t>(map) % kMapAlign || !options_allowed(of))
    return CUDA_ERROR_INVALID_VALUE;
  TensorMap made = {};
  made.type = number_of(type);
  if (!sizes_allowed(of, static_cast<uint64_t>(bytes_of(made)))) return CUDA_ERROR_INVALID_VALUE;
  made.address = reinterpret_cast<uintptr_t>(address);
  made.rank = static_cast<uint8_t>(rank - 1);
  made.interleave = static_cast<uint8_t>(interleave);
  made.swizzle = static_cast<uint8_t>(swizzle);
  made.fill = static_cast<uint8_t>(fill);
  made.origin = kOfHost;
  for (cuuint32_t i = 0; i < rank; ++i) {
    // Coordinates are below 2^31: one row less than 2^32 makes no difference.
    made.dims[i] = static_cast<uint32_t>(std::min<uint64_t>(dims[i], UINT32_MAX));
    made.box[i] = box[i];
    made.element_strides[i] = i || interleave ? element_strides[i] : 1;  // that one is not read
    if (i) made.strides[i - 1] = strides[i - 1];
  }
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

}  // namespace

}  // namespace emu

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** funcPtr,
                                             unsigned cudaVersion, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* driverStatus) {
  if (emu::fails(std::string("entry point ") + (symbol ? symbol : "?"))) return emu::failure();
  if (!symbol || !funcPtr || flags > cudaEnablePerThreadDefaultStream) return cudaErrorInvalidValue;
  const bool there = emu::driver_version() >= emu::kKnownSince &&
                     std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  const auto status = !there                           ? cudaDriverEntryPointSymbolNotFound
                      : cudaVersion < emu::kKnownSince ? cudaDriverEntryPointVersionNotSufficent
                                                       : cudaDriverEntryPointSuccess;
  if (driverStatus) *driverStatus = status;
  *funcPtr = status ? nullptr : reinterpret_cast<void*>(emu::encode);
  return cudaSuccess;
}
