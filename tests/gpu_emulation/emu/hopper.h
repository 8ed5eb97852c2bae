// Primitives of sm_90: what runs beside the threads of a block, through the asynchronous proxy.
// Addresses are in the window of shared memory; `site` names the place in the kernel, for reports
// and to switch it off. Semantics: the PTX ISA, sections on mbarrier, cp.async.bulk and
// cp.reduce.async.bulk, tensormap.replace, wgmma and setmaxnreg.
#pragma once
#include <cstdint>

namespace emu {

// The address of a byte under a swizzle of so many chunks of 16 bytes, 1 for none: chunks are
// permuted by their row of 128 bytes.
inline uint32_t swizzled(uint32_t address, uint32_t chunks) {
  return address ^ (address >> 7 & (chunks - 1)) << 4;
}

// -- mbarriers -------------------------------------------------------------------------------------

void mbarrier_init(const char* site, uint32_t address, uint32_t count);
void mbarrier_inval(const char* site, uint32_t address);
void mbarrier_expect(const char* site, uint32_t address, uint32_t bytes);
void mbarrier_arrive(const char* site, uint32_t address, uint32_t count);
// Is the phase of this parity over? `patient`: it waits for that, though not for ever.
bool mbarrier_test(const char* site, uint32_t address, uint32_t parity, bool patient);

// -- time: %globaltimer. A microsecond passes from one reading to the next -------------------------

uint64_t nanoseconds();

// -- tensors in global memory, by maps of 128 bytes that the kernel or the host makes --------------

enum class MapField {
  kAddress, kRank, kBox, kDims, kStride, kElementStride, kType, kInterleave, kSwizzle, kFill
};
void map_replace(const char* site, uint32_t map, MapField field, uint32_t ordinal, uint64_t value);
void map_publish(const char* site, void* to, uint32_t from);  // tensormap.cp_fenceproxy, by a warp
void map_acquire(const char* site, const void* map);          // fence.proxy.tensormap

// cp.async.bulk.tensor: a box of a tensor to shared memory, which arrives at an mbarrier.
void load_box(const char* site, uint32_t to, const void* map, int rank, const int32_t* at,
              uint32_t mbarrier);
// cp.async.bulk: the same of contiguous bytes.
void load_bytes(const char* site, uint32_t to, const void* from, uint32_t bytes, uint32_t mbarrier);

// -- copies from shared memory, in groups of a thread ----------------------------------------------

// cp.async.bulk.tensor: a box of a tensor.
void bulk_box(const char* site, const void* map, int rank, const int32_t* at, uint32_t from);
// cp.async.bulk: contiguous bytes; cp.reduce.async.bulk, if they are float32 that it adds.
void bulk_bytes(const char* site, void* to, uint32_t from, uint32_t bytes, bool adds);
void bulk_commit(const char* site);
// Until at most so many groups of this thread are pending. The others have read shared memory, and
// unless reads are enough, they have written, too.
void bulk_wait(const char* site, int pending, bool reads_only);

// -- products of warpgroups ------------------------------------------------------------------------

void async_proxy_fence(const char* site, bool of_shared_alone);  // fence.proxy.async

enum class Element { kBfloat16, kFloat16, kTf32 };
// D (64 x columns) (+)= A (64 x k) B (k x columns), k of 32 bytes; this thread's part.
struct Product {
  Element element;
  int columns;
  uint32_t* const* d;        // columns / 2 registers
  const uint32_t* const* a;  // four registers; else null
  uint64_t a_at, b_at;       // descriptors
  bool add, ordered;         // D +=; its registers are fenced
  int a_sign, b_sign;
  bool a_across, b_across;  // it is not contiguous along k
};
void products_begin(const char* site, const Product& product);  // wgmma.mma_async
bool products_fence(const char* site);                          // false: switched off
void products_commit(const char* site);
void products_wait(const char* site, int pending);

// setmaxnreg: a warp's threads have so many registers from here on. More come from the block's
// pool, and are waited for.
void set_registers(const char* site, int count, bool more);

// -- lanes -----------------------------------------------------------------------------------------

int elected(const char* site, uint32_t mask);  // one lane of them, the same one for the same mask
void store_matrices(const uint32_t* registers, int count, bool transposed, uint32_t address,
                    const char* site);

}  // namespace emu
