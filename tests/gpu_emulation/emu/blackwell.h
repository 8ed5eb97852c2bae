// Primitives of sm_100: tensor memory, and the products that accumulate there. `site` names the
// place in the kernel, for reports and to switch off what orders or allocates. Semantics: the PTX
// ISA, section on instructions of the fifth generation of tensor cores (tcgen05), for one block.
//
// An address of tensor memory has the column in its low half, the lane in its high half.
#pragma once
#include "hopper.h"

namespace emu {

// By a warp. The address of as many new columns is stored in shared memory.
void tensor_allocate(const char* site, uint32_t to, uint32_t columns);
void tensor_deallocate(const char* site, uint32_t at, uint32_t columns);
void tensor_relinquish(const char* site);  // this block allocates no more

// Registers of a warp from and to tensor memory, `count` of each thread: 32 lanes; or 16 lanes, of
// which the second half of the threads has the columns `apart` from those of the first.
enum class TensorShape { k32x32, kTwice16x32 };
void tensor_load(const char* site, uint32_t* to, int count, TensorShape shape, uint32_t at,
                 uint32_t apart);
void tensor_store(const char* site, const uint32_t* from, int count, TensorShape shape, uint32_t at,
                  uint32_t apart);
void tensor_wait(const char* site, bool for_loads);  // else for stores
void tensor_fence(const char* site, bool before);    // a synchronisation of threads, else after one

// D (+)= A B, issued by one thread. D is in tensor memory, B in shared memory, A in either.
struct TensorProduct {
  bool tf32;  // else of 16 bits
  uint32_t d;
  bool a_in_tensor_memory;
  uint64_t a, b;         // descriptors; or A's address
  uint32_t instruction;  // its descriptor: types, shape, signs, which way operands lie
  bool add;
};
void tensor_multiply(const char* site, const TensorProduct& product);
// Once this thread's products so far are done, they arrive at an mbarrier.
void tensor_commit(const char* site, uint32_t mbarrier);

}  // namespace emu
