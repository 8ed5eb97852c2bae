// The gradient of a float mask, in the mask's own shape: dS summed over the dimensions along which
// the mask is broadcast. If there are none, the main phase of the backward pass writes dS directly; if
// the batch or heads share the mask, it may add up dS (shared_mask.h). Else each task here owns some
// elements of the gradient and visits all dS that add to them, in one order; it computes dS anew, so
// that no M x N buffer exists unless the mask itself is one.
#pragma once
#include "gradient.h"

namespace fa {
namespace FA_ISA {

// G: the class that computes dS; backward_jvp.h passes its own.
template <class Mul, class G = Gradient<Mul>>
struct MaskGradient {
  using R = typename Mul::Real;
  using Buffers = typename G::Buffers;
  static constexpr int64_t kLanesKept = G::kRows;

  // True if every element of dS is an element of the mask's gradient.
  static bool is_ds(const Params& p) {
    const int64_t sizes[4] = {p.B, p.H, p.M, p.N};
    for (int dim = 0; dim < 4; ++dim)
      if (sizes[dim] != 1 && p.dmask.stride[dim] == 0) return false;  // size 0: empty sums
    return p.dmask.data;
  }
  // Writes 0 where no tile does: left and right of the keys that these rows see, in all and, with a
  // mask, of each block.
  static void clear_unseen(const Params& p, const Rows& rows, const R* lse) {
    const KeyRange seen = key_range(p, rows.b, rows.i0, rows.end());
    const Plane to = plane(p.dmask, rows.b, rows.h);
    const auto clear = [&](int64_t l, int64_t j, int64_t end) {
      const R zeros[64] = {};
      for (; j < end; j += 64)
        write_row(p.dmask.data, to.dtype, to.at(rows.i0 + l, j), to.step,
                  std::min<int64_t>(64, end - j), zeros);
    };
    for (int64_t l = 0; l < rows.count; ++l) {
      clear(l, 0, seen.empty() ? p.N : seen.lo / 4 * 4);
      if (!seen.empty()) clear(l, seen.hi, p.N);
    }
    for (int64_t J0 = seen.lo / kTileKeys * kTileKeys; J0 < seen.hi; J0 += kTileKeys) {
      const Keys keys = visible_keys<Mul>(p, rows, J0), left = G::seen_keys(p, rows, J0, lse);
      for (int64_t l = 0; l < rows.count && left.count < keys.count; ++l) {
        clear(l, keys.j0, left.j0);
        clear(l, left.end(), keys.end());
      }
    }
  }
  static void write_ds(const Params& p, const Rows& rows, const Keys& keys, int64_t lanes,
                       const R* ds) {
    R one[kLanesKept];
    std::fill(one, one + kLanesKept, R(1));
    write_transposed(ds, lanes, one, plane(p.dmask, rows.b, rows.h), rows.i0, rows.count, keys.j0,
                     keys.count);
  }

  // A dimension of stride 0 is summed over: it has one part instead of `whole`.
  static int64_t parts(const Params& p, int dim, int64_t whole) {
    return p.dmask.stride[dim] == 0 ? 1 : whole;
  }
  static int64_t tasks(const Params& p) {
    return parts(p, 0, p.B) * parts(p, 1, p.H) * parts(p, 2, G::tiles(p)) *
           parts(p, 3, G::chunks(p));
  }

  static void run(const Params& p, int64_t task, char* scratch) {
    [[maybe_unused]] const typename Mul::Registers registers;
    Buffers buf;
    G::carve(p, scratch, buf);
    const bool sum_b = p.dmask.stride[0] == 0, sum_h = p.dmask.stride[1] == 0;
    const bool sum_rows = p.dmask.stride[2] == 0, sum_keys = p.dmask.stride[3] == 0;
    int64_t rest = task;
    const auto take = [&](int dim, int64_t whole) {
      const int64_t n = parts(p, dim, whole), at = rest % n;
      rest /= n;
      return at;
    };
    const int64_t chunk = take(3, G::chunks(p)), tile = take(2, G::tiles(p));
    const int64_t head = take(1, p.H), item = take(0, p.B);
    const KeyRange within =
        sum_keys ? KeyRange{0, p.N} : clip(chunk * kTileKeys, (chunk + 1) * kTileKeys, p.N);
    std::fill(buf.sum, buf.sum + (sum_keys ? 1 : kTileKeys) * kLanesKept, R(0));
    for (int64_t b = sum_b ? 0 : item; b < (sum_b ? p.B : item + 1); ++b)
      for (int64_t h = sum_h ? 0 : head; h < (sum_h ? p.H : head + 1); ++h)
        for (int64_t t = sum_rows ? 0 : tile; t < (sum_rows ? G::tiles(p) : tile + 1); ++t)
          add(p, G::tile_rows(p, b, h, t), t, within, sum_keys, buf);
    write(p, item, head, tile, within, buf);
  }

  // buf.sum[key - within.lo][lane] += dS, or buf.sum[0][lane] when keys are summed over.
  static void add(const Params& p, const Rows& rows, int64_t t, KeyRange within, bool sum_keys,
                  const Buffers& buf) {
    const auto w = G::workspace(p);
    const int64_t at = G::tile_index(p, rows.b, rows.h, t) * G::kRows;
    each_part<Mul>(rows, [&](auto nv, const Rows& part, int64_t lane) {
      constexpr int NV = decltype(nv)::value;
      using T = Tile<R, NV>;
      G::stage_rows(p, part, T::lanes, buf);
      const R* lse = w.normaliser.lse + at + lane;
      G::each_block(p, part, lse, within, buf, [&](const Keys& keys, const auto& block) {
        G::template scores<NV>(p, part, keys, block, w, at + lane, buf);
        for (int64_t j = 0; j < keys.count; ++j) {
          const int64_t key = sum_keys ? 0 : keys.j0 + j - within.lo;
          R* sum = buf.sum + key * kLanesKept + lane;
          for (int v = 0; v < NV; ++v) {
            const Vec<R> ds = load(buf.ds + j * T::lanes + v * T::W);
            store(sum + v * T::W, load(sum + v * T::W) + ds);
          }
        }
      });
    });
  }

  static void write(const Params& p, int64_t item, int64_t head, int64_t tile, KeyRange within,
                    const Buffers& buf) {
    const Plane to = plane(p.dmask, item, head);
    const int64_t count = to.step == 0 ? 1 : within.hi - within.lo;
    const int64_t j0 = to.step == 0 ? 0 : within.lo;
    if (to.row != 0) {
      const Rows rows = G::tile_rows(p, item, head, tile);
      R one[kLanesKept];
      std::fill(one, one + kLanesKept, R(1));
      write_transposed(buf.sum, kLanesKept, one, to, rows.i0, rows.count, j0, count);
      return;
    }
    for (int64_t j = 0; j < count; ++j) {
      R total = R(0);
      for (int64_t l = 0; l < kLanesKept; ++l) total += buf.sum[j * kLanesKept + l];
      write_row(p.dmask.data, to.dtype, to.at(0, j0 + j), to.step, 1, &total);
    }
  }
};

}  // namespace FA_ISA
}  // namespace fa
