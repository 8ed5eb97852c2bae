// Classes of a mask's numbers, by their bits, for kernels that skip parts. CPU and GPU share this.
#pragma once
#include "../abi.h"
#include "host_device.h"

namespace fa {

// A set of these is a class. `kLeast` is finfo.min, of bfloat16 or wider: it leaves no weight if
// the row has another score, and equal weights if it has not. (That of float16 is among possible
// scores.)
enum Holds : uint8_t { kVisible = 1, kHidden = 2, kLeast = 4, kOther = 8 };
// True if further numbers cannot change what the kernel does.
FA_SHARED bool mixed(uint8_t classes) {
  return classes & kOther || (classes & kVisible && classes != kVisible);
}

// By their bits, as many at a time as a vector has: true and 0 are visible, false and -inf hidden.
struct OfBool {
  using Bits = uint8_t;
  static FA_SHARED Bits classes_in(Bits x) { return x ? kVisible : kHidden; }
};
template <class B, B hidden, B least>
struct OfFloat {
  using Bits = B;
  static FA_SHARED Bits classes_in(Bits x) {
    const Bits below = x == hidden ? Bits(kHidden) : Bits(kOther);
    const Bits other = x >= least && x < hidden ? Bits(kLeast) : below;
    return Bits(x << 1) == 0 ? Bits(kVisible) : other;
  }
};
struct OfBF16 : OfFloat<uint16_t, 0xFF80, 0xFF7F> {};
struct OfF16 : OfFloat<uint16_t, 0xFC00, 0xFC00> {};
struct OfF32 : OfFloat<uint32_t, 0xFF800000, 0xFF7F0000> {};
struct OfF64 : OfFloat<uint64_t, 0xFFF0000000000000, 0xC7EFE00000000000> {};

}  // namespace fa
