// Compares the sizes of the tensors that a pass writes with the sizes in FaParams. Kernels compute
// addresses from FaParams: a smaller tensor would be written past its end.
#pragma once
#include "../abi.h"

namespace fa {

// FA_OK, or FA_BAD_EXTENT plus the first FaWritten that has other sizes.
inline int64_t bad_extent(const FaCall& call, int64_t pass) {
  const FaParams& p = call.params;
  const int64_t B = p.cu_q ? 1 : p.B, M = p.cu_q ? p.T : p.M, N = p.cu_q ? p.S : p.N;
  int64_t status = FA_OK;
  // summed: size 1 stands for the sum over a dimension; not over the sequences of a packed batch,
  // each of which writes its own part.
  const auto check = [&](FaWritten which, const FaTensor& x, const int64_t (&whole)[4],
                         bool summed = false) {
    const int64_t* size = call.size[which];
    const bool absent = !x.data && !(size[0] | size[1] | size[2] | size[3]);
    for (int at = 0; at < 4 && !absent && !status; ++at) {
      const bool one = summed && size[at] == 1 && !(at == 0 && p.cu_q);
      if (size[at] != whole[at] && !one) status = int64_t{FA_BAD_EXTENT} + which;
    }
  };
  if (pass == FA_FORWARD || pass == FA_FORWARD_JVP) {
    check(FA_WRITES_OUT, p.out, {B, p.H, M, p.Dv});
    check(FA_WRITES_LSE, p.lse, {B, p.H, M, 2});
  }
  if (pass == FA_JVP || pass == FA_FORWARD_JVP) {
    check(FA_WRITES_OUT_T, p.out_t, {B, p.H, M, p.Dv});
    check(FA_WRITES_LSE_T, p.lse_t, {B, p.H, M, 1});
  }
  if (pass == FA_WEIGHTS)
    check(FA_WRITES_WEIGHTS, p.weights, {p.B, p.average_heads ? 1 : p.H, p.M, p.N});
  if (pass == FA_BACKWARD || pass == FA_WEIGHTS_BACKWARD || pass == FA_SECOND) {
    check(FA_WRITES_DQ, p.dq, {B, p.H, M, p.D});
    const int64_t items = p.page ? p.P : B, keys = p.page ? p.page : N;
    check(FA_WRITES_DK, p.dk, {items, p.Hk, keys, p.D});
    check(FA_WRITES_DV, p.dv, {items, p.Hk, keys, p.Dv});
    check(FA_WRITES_DMASK, p.dmask, {p.B, p.H, p.M, p.N}, true);
    check(FA_WRITES_DSINKS, p.dsinks, {p.cu_q ? p.B : 1, p.H, 1, 1});
  }
  return status;
}

}  // namespace fa
