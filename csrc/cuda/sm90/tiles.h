// The tiles of the kernels in this folder, by head dims. bench/results/cuda-ptxas-sm90.txt has the
// registers that ptxas needs for them, bench/results/ledger-sm_90.txt the instructions.
#pragma once

namespace fa {
namespace sm90 {

constexpr int kWarpgroup = 128;         // threads
constexpr int kGroupRows = 64;          // rows of a product of a warpgroup
constexpr int kMostShared = 227 << 10;  // bytes of a block

// Forward: `groups` warpgroups with 64 rows each, and tiles of `keys` keys in two stages. The
// registers of a lane hold keys / 2 scores, keys / 4 weights and Dv / 2 sums, of at most 240 (160
// with three groups).
struct ForwardTile {
  int groups, keys;
};
constexpr ForwardTile forward_tile(int d, int dv, bool general) {
  //                        sums + scores + weights; bytes of Q, and of two stages of K and V
  if (general) {
    if (d <= 64) return {2, 128};  // 32 + 64 + 32;  16 + 64 KB
    if (d <= 96) return {2, 96};   // 48 + 48 + 24;  32 + 96 KB
    if (d <= 128) return {2, 96};  // 64 + 48 + 24;  32 + 96 KB
    if (d <= 192) return {2, 64};  // 96 + 32 + 16;  48 + 96 KB
    return {2, 64};                // 128 + 32 + 16; 64 + 128 KB
  }
  if (d <= 64) return {2, 192};                // 32 + 96 + 48;  16 + 96 KB
  if (d <= 96) return {2, 160};                // 48 + 80 + 40;  32 + 160 KB
  if (d <= 128) return {2, 176};               // 64 + 88 + 44;  32 + 176 KB
  if (d <= 192 && dv <= 128) return {2, 128};  // 64 + 64 + 32; 48 + 160 KB
  if (d <= 192) return {2, 112};               // 96 + 56 + 28;  48 + 168 KB
  return {2, 80};                              // 128 + 40 + 20; 64 + 160 KB
}

}  // namespace sm90
}  // namespace fa
