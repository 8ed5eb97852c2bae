// A kernel of sm_90 that g++ compiles, and the tensor maps that its host encodes: products of boxes
// by two warpgroups, for which a third one loads. The result goes out as boxes, and is added to
// sums.
#include <cuda.h>

#include "cuda/launch.h"
#include "cuda/ptx.cuh"

namespace fa {

constexpr int kRows = 128, kColumns = 64, kDepth = 64, kThreads = 384, kRowBytes = 128;
constexpr uint32_t kBytesOfA = kRows * kRowBytes, kBytesOfB = kColumns * kRowBytes;
constexpr uint32_t kBytesOfHalf = kRows * kRowBytes;  // 32 columns of float32
constexpr uint32_t kSharedBytes = kBytesOfA + kBytesOfB + 2 * kBytesOfHalf + 8;

// Rows of 128 bytes, swizzled; groups of 8 rows are contiguous.
uint64_t descriptor(uint32_t at) {
  return uint64_t{at >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// D (64 x 64) = A B^T of this warpgroup, of all 64 of k.
void multiply(float (&d)[kColumns / 2], uint32_t a_at, uint32_t b_at) {
  uint32_t* registers[kColumns / 2];
  for (int i = 0; i < kColumns / 2; ++i) registers[i] = reinterpret_cast<uint32_t*>(&d[i]);
  emu::products_fence("products begin");
  for (uint32_t k = 0; k < kDepth / 16; ++k)
    emu::products_begin("a product", {emu::Element::kBfloat16, kColumns, registers, nullptr,
                                      descriptor(a_at + 32 * k), descriptor(b_at + 32 * k), k > 0,
                                      true, 1, 1, false, false});
  emu::products_commit("the products");
  emu::products_wait("products end", 0);
}

__global__ void product_of_boxes(const __grid_constant__ CUtensorMap of_a,
                                 const __grid_constant__ CUtensorMap of_b,
                                 const __grid_constant__ CUtensorMap of_out, float* sums) {
  FA_SHARED_MEMORY(memory);
  const uint32_t a_at = ptx::shared_address(memory), b_at = a_at + kBytesOfA;
  const uint32_t out_at = b_at + kBytesOfB, mbarrier = out_at + 2 * kBytesOfHalf;
  const int thread = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.x) * kRows;
  if (thread == 0) emu::mbarrier_init("the mbarrier", mbarrier, 1);
  ptx::block_sync("initialised");
  if (thread < 128) {
    emu::set_registers("fewer", 24, false);
    if (thread > 0) return;
    emu::mbarrier_expect("bytes", mbarrier, kBytesOfA + kBytesOfB);
    emu::mbarrier_arrive("asked", mbarrier, 1);
    const int32_t at_a[] = {0, row}, at_b[] = {0, 0};
    emu::load_box("A", a_at, &of_a, 2, at_a, mbarrier);
    emu::load_box("B", b_at, &of_b, 2, at_b, mbarrier);
    return;
  }
  emu::set_registers("more", 240, true);
  while (!emu::mbarrier_test("loaded", mbarrier, 0, true)) {
  }
  const int mine = thread / 128 - 1, warp = thread / 32 % 4, lane = thread % 32;
  float d[kColumns / 2];
  multiply(d, a_at + static_cast<uint32_t>(mine) * 64 * kRowBytes, b_at);
  for (int i = 0; i < kColumns / 2; ++i) {
    const int of = 64 * mine + 16 * warp + lane / 4 + 8 * (i / 2 % 2);
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    auto* half = reinterpret_cast<float*>(memory + (out_at - a_at) + column / 32 * kBytesOfHalf);
    half[of * 32 + column % 32] = d[i];
  }
  emu::async_proxy_fence("stored", true);
  ptx::barrier_sync("all stored", 1, 256);
  if (thread > 128) return;
  for (int i = 0; i < 2; ++i) {
    const uint32_t half = out_at + static_cast<uint32_t>(i) * kBytesOfHalf;
    const int32_t at[] = {32 * i, row};
    emu::bulk_box("out", &of_out, 2, at, half);
    emu::bulk_bytes("sums", sums + i * kRows * 32, half, kBytesOfHalf, true);
  }
  emu::bulk_commit("all out");
  emu::bulk_wait("read", 0, true);
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// Null if the driver does not have it.
Encode encoder() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status;
  const cudaError_t failed = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                              12000, cudaEnableDefault, &status);
  const bool there = !failed && status == cudaDriverEntryPointSuccess;
  return there ? reinterpret_cast<Encode>(found) : nullptr;
}

CUresult map_of(CUtensorMap* map, const void* at, bool is_float, uint64_t rows, uint32_t box_rows) {
  const cuuint64_t dims[] = {64, rows}, strides[] = {64 * uint64_t{is_float ? 4u : 2u}};
  const cuuint32_t box[] = {is_float ? 32u : 64u, box_rows}, ones[] = {1, 1};
  const auto type =
      is_float ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto swizzle = is_float ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B;
  return encoder()(map, type, 2, const_cast<void*>(at), dims, strides, box, ones,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace fa

// out (rows x 64) = A (rows x 64) B (64 x 64)^T, and sums, as shared memory has them, += all blocks'.
extern "C" int product_of_boxes(const void* a, const void* b, float* out, float* sums, int rows) {
  CUtensorMap maps[3];
  if (fa::map_of(&maps[0], a, false, rows, fa::kRows) || fa::map_of(&maps[1], b, false, 64, 64) ||
      fa::map_of(&maps[2], out, true, rows, fa::kRows))
    return -1;
  const unsigned blocks = static_cast<unsigned>(rows + fa::kRows - 1) / fa::kRows;
  return fa::launch("product_of_boxes", fa::product_of_boxes, dim3(blocks), dim3(fa::kThreads),
                    fa::kSharedBytes, nullptr, maps[0], maps[1], maps[2], sums);
}

// What cudaGetDriverEntryPointByVersion says of a function: its status, and whether it is found.
extern "C" int entry_point(const char* name, int version, int* status, int* found) {
  void* at = &at;
  cudaDriverEntryPointQueryResult said;
  const int code = cudaGetDriverEntryPointByVersion(name, &at, static_cast<unsigned>(version),
                                                    cudaEnableDefault, &said);
  *status = said;
  *found = at != nullptr;
  return code;
}

// Arguments as of cuTensorMapEncodeTiled; -1 if there is no such function.
extern "C" int encode_map(void* map, int type, int rank, void* address, const cuuint64_t* dims,
                          const cuuint64_t* strides, const cuuint32_t* box,
                          const cuuint32_t* element_strides, int interleave, int swizzle,
                          int promotion, int fill) {
  const fa::Encode encode = fa::encoder();
  if (!encode) return -1;
  return encode(static_cast<CUtensorMap*>(map), static_cast<CUtensorMapDataType>(type),
                static_cast<cuuint32_t>(rank), address, dims, strides, box, element_strides,
                static_cast<CUtensorMapInterleave>(interleave),
                static_cast<CUtensorMapSwizzle>(swizzle),
                static_cast<CUtensorMapL2promotion>(promotion),
                static_cast<CUtensorMapFloatOOBfill>(fill));
}
