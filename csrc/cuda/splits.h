// Into how many parts the keys of a decode call are split. Triton's kernels have the same rule, in
// Python: fastattn/backends/triton/tile_configs.py.
#pragma once
#include <stdint.h>

namespace fa {

constexpr int64_t kDecodeRows = 16;  // up to here, M is few enough to split the keys

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// For `blocks` blocks with `tiles` tiles of keys each: the fewest parts with which the
// multiprocessors are nearly as busy as with the best number, as at the end of a call some wait for
// others. One if the blocks alone keep them busy.
inline int64_t splits(int64_t blocks, int64_t tiles, int64_t multiprocessors) {
  constexpr double kBusy = 0.8, kNearly = 0.85;
  if (static_cast<double>(blocks) >= kBusy * static_cast<double>(multiprocessors)) return 1;
  const auto busy = [&](int64_t parts) {
    const int64_t waves = ceil_div(blocks * parts, multiprocessors);
    const int64_t time = waves * ceil_div(tiles, parts);
    return static_cast<double>(blocks * tiles) / static_cast<double>(time * multiprocessors);
  };
  double best = 0;
  for (int64_t parts = 1; parts <= tiles && parts <= multiprocessors; ++parts)
    if (busy(parts) > best) best = busy(parts);
  int64_t fewest = 1;
  while (busy(fewest) < kNearly * best) ++fewest;
  return fewest;
}

}  // namespace fa
