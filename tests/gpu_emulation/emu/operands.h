// Operands of tensor cores in shared memory, and the sums of their products: of wgmma and tcgen05.
#pragma once
#include <vector>

#include "hopper.h"

namespace emu {

// A matrix in shared memory as its descriptor gives it: chunks of 16 bytes in groups of 8 rows. A
// chunk has elements along k, or along the other dimension if `across`; a swizzle has `span` of
// them in a row: the canonical layouts of CUTLASS's GmmaDescriptor, and of its UMMA's.
struct Matrix {
  uint32_t start, leading, stride, span;  // span: a swizzle's, 1 for none
  bool across;

  uint32_t at(uint32_t row, uint32_t chunk) const;  // the address of a chunk
};

// The start and the strides of a descriptor. Fails if a bit beside `fields`, or of a base offset, is
// set: both instructions have their own bits for the swizzle.
Matrix matrix_of(const char* site, uint64_t descriptor, uint64_t fields, uint32_t span, bool across);

inline int bytes_of(Element element) { return element == Element::kTf32 ? 4 : 2; }
inline int depth_of(Element element) { return 32 / bytes_of(element); }  // k
float value_of(const unsigned char* at, Element element);

// Visits chunks of A's rows or B's columns from `first` on: visit(address, its first of these, its
// k).
template <class Visit>
void each_chunk(const Matrix& matrix, Element element, int first, int count, Visit visit) {
  const int per_chunk = 16 / bytes_of(element), depth = depth_of(element);
  if (matrix.across) {
    for (int k = 0; k < depth; ++k)
      for (int i = first; i < first + count; i += per_chunk)
        visit(matrix.at(static_cast<uint32_t>(k), static_cast<uint32_t>(i / per_chunk)), i - first, k);
  } else {
    for (int i = first; i < first + count; ++i)
      for (int k = 0; k < depth; k += per_chunk)
        visit(matrix.at(static_cast<uint32_t>(i), static_cast<uint32_t>(k / per_chunk)), i - first, k);
  }
}

// Reads them as rows of k: element (i, k) at k * count + i.
std::vector<float> read(const Matrix& matrix, Element element, int first, int count);

// Adds to a row of D the products of a row of A with the columns of B. Elements of A are `apart`.
void add_products(std::vector<float>& row, const float* a, int apart, int depth, int sign,
                  const float* b);

}  // namespace emu
