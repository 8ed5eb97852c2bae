#include "operands.h"

#include "block.h"

namespace emu {

uint32_t Matrix::at(uint32_t row, uint32_t chunk) const {
  uint32_t offset;
  if (span == 1)
    offset = across ? chunk * stride + row % 8 * 16 + row / 8 * leading
                    : row % 8 * 16 + row / 8 * stride + chunk * leading;
  else
    offset = row % 8 * 16 * span + row / 8 * stride + chunk % span * 16 + chunk / span * leading;
  return swizzled(start + offset, span);
}

Matrix matrix_of(const char* site, uint64_t descriptor, uint64_t fields, uint32_t span, bool across) {
  constexpr uint64_t kStrides = 0x3FFFull << 32 | 0x3FFFull << 16 | 0x3FFF;
  if (descriptor & ~(fields | kStrides))
    fail("%s: descriptor 0x%llx, expected a base offset of 0 and no bit beside its fields", site,
         static_cast<unsigned long long>(descriptor));
  const auto field = [&](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3FFF) << 4; };
  const Matrix found{field(0), field(16), field(32), span, across};
  if (found.start >> 7 & (found.span - 1))
    fail("%s: descriptor 0x%llx begins inside the pattern of its swizzle, expected a multiple of %u "
         "and part of a row: without a base offset, it is not said what that means", site,
         static_cast<unsigned long long>(descriptor), 128 * found.span);
  return found;
}

float value_of(const unsigned char* at, Element element) {
  if (element == Element::kTf32) {
    uint32_t bits;
    std::memcpy(&bits, at, 4);
    return __uint_as_float(bits & ~0x1FFFu);  // the fraction has ten bits
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return widened(bits, element == Element::kBfloat16);
}

std::vector<float> read(const Matrix& matrix, Element element, int first, int count) {
  std::vector<float> values(static_cast<size_t>(count * depth_of(element)));
  const int bytes = bytes_of(element);
  each_chunk(matrix, element, first, count, [&](uint32_t address, int i, int k) {
    const unsigned char* const chunk = shared_pointer(address, 16);
    for (int e = 0; e < 16 / bytes; ++e) {
      const int row = matrix.across ? i + e : i, column = matrix.across ? k : k + e;
      values[static_cast<size_t>(column * count + row)] = value_of(chunk + e * bytes, element);
    }
  });
  return values;
}

static float signed_by(int sign, float x) { return sign < 0 ? -x : x; }

void add_products(std::vector<float>& row, const float* a, int apart, int depth, int sign,
                  const float* b) {
  const size_t columns = row.size();
  const auto a_at = [&](int k) { return signed_by(sign, a[k * apart]); };
  for (int first = 0; first < depth; first += 8) {
    if (options.pessimistic) {
      for (size_t j = 0; j < columns; ++j) {
        double terms[9] = {row[j]};
        for (int k = 0; k < 8; ++k) terms[k + 1] = double{a_at(first + k)} * b[size_t(first + k) * columns + j];
        row[j] = truncated_sum(terms);
      }
      continue;
    }
    for (int k = first; k < first + 8; ++k) {
      const float x = a_at(k);
      for (size_t j = 0; j < columns; ++j) row[j] += x * b[size_t(k) * columns + j];
    }
  }
}

}  // namespace emu
