// Some sequences of a packed batch, as the arguments of a call of their own.
#pragma once
#include <initializer_list>

#include "../../common/item_size.h"
#include "../base/plan.h"
#include "score_mod_ops.h"

namespace fa {

FA_SHARED FaTensor moved(FaTensor t, int dimension, int64_t by) {
  if (t.data) t.data = static_cast<char*>(t.data) + by * t.stride[dimension] * item_size(t.dtype);
  return t;
}

// Drops the sequences before b.
FA_SHARED void begin_at(Params& p, int64_t b) {
  using P = Params;
  p.cu_q += b;
  if (p.cu_k) p.cu_k += b;
  if (p.pages) p.pages += b * p.blocks;
  if (p.lengths) p.lengths += b;
  for (FaTensor P::* items : {&P::mask, &P::slopes, &P::dmask, &P::dsinks, &P::mask_t})
    p.*items = moved(p.*items, 0, b);
  p.at_item += b;
  p.mod.classes = moved(p.mod.classes, 0, b);
  if (p.mod.dfloats)
    p.mod.dfloats =
        static_cast<char*>(p.mod.dfloats) + b * captured_floats(p.mod) * item_size(p.lse.dtype);
}

// Sequence b as a call of its own. One with pages keeps them; its N is the number of its keys.
FA_SHARED Params sequence(const Params& p, int64_t b) {
  using P = Params;
  Params one = p;
  begin_at(one, b);
  for (FaTensor P::* rows : {&P::q, &P::lse, &P::out, &P::dq, &P::dout, &P::dlse, &P::q_t,
                             &P::out_t, &P::lse_t, &P::dout_t, &P::dlse_t})
    one.*rows = moved(p.*rows, 2, p.cu_q[b]);
  if (p.page) {
    one.N = p.lengths[b];
    one.lengths = nullptr;
  } else {
    for (FaTensor P::* keys :
         {&P::k, &P::v, &P::k_scale, &P::v_scale, &P::dk, &P::dv, &P::k_t, &P::v_t})
      one.*keys = moved(p.*keys, 2, p.cu_k[b]);
    one.N = p.cu_k[b + 1] - p.cu_k[b];
  }
  one.cu_q = one.cu_k = nullptr;
  one.B = 1;
  one.M = p.cu_q[b + 1] - p.cu_q[b];
  return one;
}

}  // namespace fa
