// The tiles of the kernels in this folder, by head dims. `python -m bench.static_gpu.ptxas`
// lists the registers that ptxas needs for them, and the instructions of their loops.
#pragma once

namespace fa {
namespace sm90 {

constexpr int kWarpgroup = 128;         // threads
constexpr int kGroupRows = 64;          // rows of a product of a warpgroup
constexpr int kMostShared = 227 << 10;  // bytes of a block

// Forward: `groups` warpgroups with 64 rows each, and tiles of `keys` keys in two stages. The
// registers of a lane hold keys / 2 scores, keys / 4 weights and Dv / 2 sums, of at most 240 (160
// with three groups); with masks also keys / 4 pairs of their elements.
struct ForwardTile {
  int groups, keys;
};
constexpr ForwardTile forward_tile(int d, int dv, bool general, bool masked) {
  //                        sums + scores + weights; bytes of Q, and of two stages of K and V
  if (masked) {
    if (d <= 64) return {2, 128};   // 32 + 64 + 32;  16 + 64 KB
    if (d <= 96) return {2, 96};    // 48 + 48 + 24;  32 + 96 KB
    if (d <= 128) return {2, 112};  // 64 + 56 + 28;  32 + 112 KB
    if (d <= 192) return {2, 64};   // 96 + 32 + 16;  48 + 96 KB
    return {2, 64};                 // 128 + 32 + 16; 64 + 128 KB
  }
  if (general && d <= 64) return {2, 176};     // 32 + 88 + 44;  16 + 88 KB
  if (general && d <= 128) return {2, 160};    // 64 + 80 + 40;  32 + 160 KB
  if (d <= 64) return {3, 128};                // 32 + 64 + 32;  24 + 64 KB
  if (d <= 96) return {2, 160};                // 48 + 80 + 40;  32 + 160 KB
  if (d <= 128) return {2, 176};               // 64 + 88 + 44;  32 + 176 KB
  if (d <= 192 && dv <= 128) return {2, 128};  // 64 + 64 + 32; 48 + 160 KB
  if (d <= 192) return {2, 112};               // 96 + 56 + 28;  48 + 168 KB
  return {2, 80};                              // 128 + 40 + 20; 64 + 160 KB
}

// Decode: one warpgroup has the rows, as in Forward, and tiles have so many keys.
constexpr int decode_tile(int d, int dv) {
  // sums + scores + weights, as above; bytes of Q, and of two stages of K and V
  if (d <= 128) return 128;               // 64 + 64 + 32;  16 + 128 KB, and for 64 8 + 64 KB
  if (d <= 192 && dv <= 128) return 128;  // 64 + 64 + 32;  24 + 160 KB
  if (d <= 192) return 96;                // 96 + 48 + 24;  24 + 144 KB
  return 80;                              // 128 + 40 + 20; 32 + 160 KB
}

// Backward: two warpgroups with 64 keys each, and tiles of so many rows in two stages. The
// registers of a lane hold (D + Dv) / 2 sums of keys, and of a tile rows / 2 scores and as many dp.
constexpr int kBlockKeys = 128;
constexpr int backward_rows(int d, bool banded, bool general) {
  if (general) return d <= 64 ? 64 : 48;
  if (d <= 64) return 128;
  return banded ? 64 : 80;
}

}  // namespace sm90
}  // namespace fa
