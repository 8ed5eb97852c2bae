// Bytes of one number of an FaDtype.
#pragma once
#include "../abi.h"
#include "host_device.h"

namespace fa {

FA_SHARED constexpr int64_t item_size(int64_t dtype) {
  return dtype == FA_F64 ? 8 : dtype == FA_F32 ? 4 : dtype >= FA_BOOL ? 1 : 2;
}

}  // namespace fa
