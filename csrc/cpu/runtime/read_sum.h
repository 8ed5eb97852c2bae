// The loop that reads memory as fast as one thread can, to compare kernels with: it only adds.
// Several streams of addresses at equal distances are read side by side. A chip prefetches each, so
// more lines are on their way than for one stream.
#pragma once
#include <cstdint>
#include <cstring>

namespace fa {

template <int STREAMS>
float read_sum_of(const float* x, int64_t n) {
  typedef float Four __attribute__((vector_size(16)));
  constexpr int64_t kLine = 16;
  const int64_t each = n / STREAMS / kLine * kLine;
  Four sum[STREAMS][4] = {};
  for (int64_t at = 0; at < each; at += kLine)
#pragma GCC unroll 4
    for (int s = 0; s < STREAMS; ++s)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Four four;
        std::memcpy(&four, x + s * each + at + 4 * i, sizeof four);
        sum[s][i] += four;
      }
  float total = 0;
  for (const auto& of_stream : sum)
    for (const Four& four : of_stream) total += four[0] + four[1] + four[2] + four[3];
  return total;
}
// The sum of n numbers, without the last few that do not fill a line of each stream.
inline float read_sum(const float* x, int64_t n, int64_t streams) {
  return streams == 4   ? read_sum_of<4>(x, n)
         : streams == 2 ? read_sum_of<2>(x, n)
                        : read_sum_of<1>(x, n);
}

}  // namespace fa
