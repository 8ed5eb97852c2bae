// Runs a score_mod and a mask_mod on tiles of scores: an interpreter of the code that
// fastattn/backends/native/score_mod_code.py writes.
//
// A value is one number (uniform), one for each row or for each key of a tile, or one for each
// score. Values of the same for all keys are computed once for a tile; the others for 16 keys at a
// time, so that they stay in the first cache. Each is in a slot; slots are of these kinds:
//
//   0, 1, 2                 the tile of scores, and tiles of derivatives: [keys][lanes]
//   3 to constant_slots     [lanes], for a whole tile of scores
//   constant_slots to end   [kStepKeys][lanes], or [kStepKeys], for 16 keys
//
// Floats have the kernel's precision R, whole numbers as many bits as R. A bool is a whole number, 0
// or -1, as comparisons of vectors give it.
#pragma once
#include "../base/exp_tanh.h"
#include "../mask/visible_keys.h"
#include "score_mod_ops.h"

namespace fa {
namespace FA_ISA {

// The element at each of these indices of a table.
template <class R>
FA_INLINE Vec<R> gather(const R* table, Vec<Int<R>> at) {
  Vec<R> values;
  for (int l = 0; l < kLanes<R>; ++l) values[l] = table[at[l]];
  return values;
}
#if defined(__AVX512F__)
FA_INLINE Vec<float> gather(const float* table, Vec<int32_t> at) {
  return _mm512_i32gather_ps((__m512i)at, table, 4);
}
FA_INLINE Vec<double> gather(const double* table, Vec<int64_t> at) {
  return _mm512_i64gather_pd((__m512i)at, table, 8);
}
#elif defined(__AVX2__)
FA_INLINE Vec<float> gather(const float* table, Vec<int32_t> at) {
  return _mm256_i32gather_ps(table, (__m256i)at, 4);
}
FA_INLINE Vec<double> gather(const double* table, Vec<int64_t> at) {
  return _mm256_i64gather_pd(table, (__m256i)at, 8);
}
#endif

// The operators that are an expression: of one vector, of two, and of each number alone, with the types
// of operands and result.
// clang-format off
#define FA_OPERATORS(ONE, TWO, EACH) \
  TWO(add_f, R, R, a + b) \
  TWO(sub_f, R, R, a - b) \
  TWO(mul_f, R, R, a * b) \
  TWO(div_f, R, R, a / b) \
  ONE(neg_f, R, R, -a) \
  ONE(abs_f, R, R, absolute<R>(a)) \
  TWO(minimum_f, R, R, ((a < b) | (a != a)) ? a : b) \
  TWO(maximum_f, R, R, ((a > b) | (a != a)) ? a : b) \
  ONE(sign_f, R, R, (a > V{} ? splat(R(1)) : a < V{} ? splat(R(-1)) : V{})) \
  ONE(exp_f, R, R, exponential(a)) \
  ONE(tanh_f, R, R, tanh<R>(a)) \
  ONE(sigmoid_f, R, R, R(1) / (R(1) + exponential(V(-a)))) \
  EACH(exp2_f, std::exp2(a)) \
  EACH(log_f, std::log(a)) \
  EACH(log2_f, std::log2(a)) \
  EACH(log1p_f, std::log1p(a)) \
  EACH(sqrt_f, std::sqrt(a)) \
  EACH(rsqrt_f, R(1) / std::sqrt(a)) \
  EACH(sin_f, std::sin(a)) \
  EACH(cos_f, std::cos(a)) \
  EACH(floor_f, std::floor(a)) \
  EACH(ceil_f, std::ceil(a)) \
  EACH(trunc_f, std::trunc(a)) \
  EACH(round_f, std::nearbyint(a)) \
  EACH(erf_f, std::erf(a)) \
  TWO(add_i, I, I, a + b) \
  TWO(sub_i, I, I, a - b) \
  TWO(mul_i, I, I, a * b) \
  ONE(neg_i, I, I, -a) \
  ONE(abs_i, I, I, a < VI{} ? -a : a) \
  TWO(minimum_i, I, I, a < b ? a : b) \
  TWO(maximum_i, I, I, a > b ? a : b) \
  ONE(sign_i, I, I, VI(a < VI{}) - VI(a > VI{})) \
  TWO(bit_and_i, I, I, a & b) \
  TWO(bit_or_i, I, I, a | b) \
  TWO(bit_xor_i, I, I, a ^ b) \
  ONE(bit_not_i, I, I, ~a) \
  TWO(and_b, I, I, a & b) \
  TWO(or_b, I, I, a | b) \
  TWO(xor_b, I, I, a ^ b) \
  ONE(not_b, I, I, ~a) \
  TWO(ge_f, R, I, a >= b) \
  TWO(gt_f, R, I, a > b) \
  TWO(le_f, R, I, a <= b) \
  TWO(lt_f, R, I, a < b) \
  TWO(eq_f, R, I, a == b) \
  TWO(ne_f, R, I, a != b) \
  TWO(ge_i, I, I, a >= b) \
  TWO(gt_i, I, I, a > b) \
  TWO(le_i, I, I, a <= b) \
  TWO(lt_i, I, I, a < b) \
  TWO(eq_i, I, I, a == b) \
  TWO(ne_i, I, I, a != b) \
  ONE(to_float_i, I, R, __builtin_convertvector(a, V)) \
  ONE(to_float_b, I, R, __builtin_convertvector(VI(-a), V)) \
  ONE(to_int_b, I, I, -a) \
  ONE(to_bool_f, R, I, a != V{}) \
  ONE(to_bool_i, I, I, a != VI{})
// clang-format on

template <class R>
struct ScoreMod {
  using I = Int<R>;
  using V = Vec<R>;
  using VI = Vec<I>;
  static constexpr int W = kLanes<R>;
  static constexpr int64_t kStepKeys = 16, kMostLanes = 4 * W;

  static size_t scratch_numbers(const Params& p) {
    if (!p.mod.code) return 0;
    const ScoreModCode& code = code_of(p.mod);
    return steps_at(code) + int64_t(code.gradients.end * sizeof(Step) / sizeof(R));
  }
  // Forgets the constant values of other tasks.
  static void begin(const Params& p, R* scratch) {
    if (p.mod.code) std::fill_n(reinterpret_cast<Made*>(scratch), kLists, Made{});
  }

  // One tile of scores. `scores`, `derivative` and `second` are the slots 0, 1 and 2.
  struct Call {
    const Params& p;
    const Rows& rows;
    const Keys& keys;
    int64_t lanes;
    R* tiles[3];
    R* scratch;
    R* gradient = nullptr;  // where `scatter` adds
  };

  // Does the mask_mod show all of these pairs?
  static FA_INLINE bool shows_all(const Params& p, const Rows& rows, const Keys& keys) {
    return empty(code_of(p.mod).mask) ||
           (p.mod.classes.data && block_class(p, rows, keys.j0, keys.end()) == FA_ALL_PAIRS);
  }
  // True if scores stay as they are.
  static bool plain(const Params& p, const Rows& rows, const Keys& keys) {
    const ScoreModCode& code = code_of(p.mod);
    return empty(code.score) && empty(code.outside) && shows_all(p, rows, keys);
  }

  static void score(const Call& call) {
    const ScoreModCode& code = code_of(call.p.mod);
    run(call, call.tiles[2] ? code.with_second : call.tiles[1] ? code.with_derivative : code.score);
  }
  static void mask(const Call& call) {
    if (!shows_all(call.p, call.rows, call.keys)) run(call, code_of(call.p.mod).mask);
  }
  // True if some index may be out of range: then `check` looks at each pair.
  static FA_INLINE bool has_check(const Params& p) { return !empty(code_of(p.mod).outside); }
  // Room for what `check` reads in place of the scores.
  static R* seen(const Params& p, R* scratch) { return scratch + seen_at(code_of(p.mod)); }
  // Reports an index out of range where slot 0 is not -inf.
  static void check(const Call& call) { run(call, code_of(call.p.mod).outside); }
  // Adds the gradients of captured numbers: slot 1 has those of the scores, slot 0 the products.
  static void gradients(const Call& call) { run(call, code_of(call.p.mod).gradients); }

 private:
  // How an operand is read: at + row step, as one number for all of a row, or a number a lane.
  struct In {
    const R* at;
    int64_t step;
    bool splat;
    int8_t tile;  // which of the tiles, or -1
    template <class E = R>
    FA_INLINE const E* row(int64_t r) const {
      return reinterpret_cast<const E*>(at + r * step);
    }
  };
  struct Step {  // an instruction for the keys at hand
    int64_t rows, width;
    R* out;
    int64_t out_step;
    In in[3];
    template <class E>
    FA_INLINE E* result(int64_t r) const {
      return reinterpret_cast<E*>(out + r * out_step);
    }
    bool for_keys;  // it has a row for each key
    int8_t tile;    // of its result, or -1
  };
  // For which rows the constant values and the steps of a list are in the scratch memory.
  struct Made {
    int64_t b = -1, h = -1, i0 = -1, lanes = -1;
  };
  static constexpr int kLists = 6;
  // The scratch memory: what is made of each list; slots of [lanes]; slots of [kStepKeys][lanes]; a
  // tile for `check`; the steps of all lists. The first three slots are tiles and have no room:
  // `Made` is there.
  static_assert(kLists * sizeof(Made) <= 3 * kMostLanes * sizeof(R));
  static int64_t seen_at(const ScoreModCode& code) {
    return (code.constant_slots + (code.slots - code.constant_slots) * kStepKeys) * kMostLanes;
  }
  static int64_t steps_at(const ScoreModCode& code) {
    return seen_at(code) + (empty(code.outside) ? 0 : kTileKeys * kMostLanes);
  }

  template <class E>
  static FA_INLINE Vec<E> take(const In& in, int64_t r, int64_t l) {
    const E* row = in.template row<E>(r);
    return in.splat ? splat(row[0]) : load(row + l);
  }
  template <class A, class O, class F>
  static FA_INLINE void one(const Step& s, F f) {
    for (int64_t l = 0; l < s.width; l += W)
      for (int64_t r = 0; r < s.rows; ++r)
        store(s.template result<O>(r) + l, Vec<O>(f(take<A>(s.in[0], r, l))));
  }
  template <class A, class O, class F>
  static FA_INLINE void two(const Step& s, F f) {
    const auto all = [&](auto first, auto second) {
      for (int64_t l = 0; l < s.width; l += W)
        for (int64_t r = 0; r < s.rows; ++r)
          store(s.template result<O>(r) + l, Vec<O>(f(first(r, l), second(r, l))));
    };
    const auto vector = [&](int x) {
      return [in = s.in[x]](int64_t r, int64_t l) { return load(in.template row<A>(r) + l); };
    };
    const auto single = [&](int x) {
      return [in = s.in[x]](int64_t r, int64_t) { return splat(in.template row<A>(r)[0]); };
    };
    if (s.in[0].splat)  // then the other one is not: `step_of`
      all(single(0), vector(1));
    else
      s.in[1].splat ? all(vector(0), single(1)) : all(vector(0), vector(1));
  }
  template <class E>
  static FA_INLINE void where(const Step& s) {
    for (int64_t l = 0; l < s.width; l += W)
      for (int64_t r = 0; r < s.rows; ++r) {
        const VI test = take<I>(s.in[0], r, l);
        const Vec<E> x = take<E>(s.in[1], r, l), y = take<E>(s.in[2], r, l);
        store(s.template result<E>(r) + l, Vec<E>(test != VI{} ? x : y));
      }
  }
  // By a function of single numbers.
  template <class A, class F>
  static FA_INLINE void each(const Step& s, F f) {
    one<A, A>(s, [&](Vec<A> x) {
      for (int l = 0; l < W; ++l) x[l] = f(x[l]);
      return x;
    });
  }
  template <class A, class F>
  static FA_INLINE void each_two(const Step& s, F f) {
    two<A, A>(s, [&](Vec<A> x, Vec<A> y) {
      for (int l = 0; l < W; ++l) x[l] = f(x[l], y[l]);
      return x;
    });
  }
  // Beyond 2^30 (double: 2^62) that number, so that a little may be added; NaN: the least.
  static FA_INLINE void each_as_int(const Step& s) {
    constexpr I most = I(1) << (sizeof(I) * 8 - 2);
    one<R, I>(s, [](V x) {
      const VI whole = __builtin_convertvector(x, VI);
      const VI high = x >= splat(R(most)), fits = (x > splat(-R(most))) & ~high;
      return VI(fits ? whole : high ? splat(most) : splat(I(-most)));
    });
  }
  template <class O>
  static FA_INLINE void fill(const Step& s, Vec<O> x) {
    for (int64_t l = 0; l < s.width; l += W) store(reinterpret_cast<O*>(s.out) + l, x);
  }

  // floor(x / d) of whole numbers; 0 for d = 0.
  static FA_INLINE I floor_divided(I x, I d) {
    if (d == 0) return 0;
    if (d == -1) return I(0) - x;  // the least number divided by -1 is out of range in C++
    const I q = x / d;
    return x % d != 0 && (x < 0) != (d < 0) ? q - 1 : q;
  }
  // f(x, floor(x / d), d) for each x. One divisor for all lanes is a shift, or an exact product in
  // double: |x| < 2^31, so x + 1/2 is at least 1 / (2 d) away from a multiple of d, and the product
  // is wrong by less than 2^-20 / d.
  template <class F>
  static FA_INLINE void divide(const Step& s, F f) {
    const In& by = s.in[1];
    const I d = by.template row<I>(0)[0];
    if (by.splat && (s.rows == 1 || by.step == 0) && d > 0) {
      if ((d & (d - 1)) == 0) {
        const int shift = __builtin_ctzll(static_cast<unsigned long long>(d));
        return one<I, I>(s, [&](VI x) { return f(x, VI(x >> shift), splat(d)); });
      }
      if constexpr (sizeof(I) == 4) {
        const double inverse = 1.0 / d;
        return one<I, I>(s, [&](VI x) {
          I q[W];
          for (int l = 0; l < W; ++l) q[l] = I(std::floor((double(x[l]) + 0.5) * inverse));
          return f(x, load(q), splat(d));
        });
      }
    }
    two<I, I>(s, [&](VI x, VI divisor) {
      VI q;
      for (int l = 0; l < W; ++l) q[l] = floor_divided(x[l], divisor[l]);
      return f(x, q, divisor);
    });
  }
  // As torch's.
  static R remainder_of(R a, R b) {
    const R rest = std::fmod(a, b);
    return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest;
  }
  static R floor_divided_of(R a, R b) {
    if (b == 0) return a / b;
    const R rest = std::fmod(a, b);
    R quotient = (a - rest) / b;
    if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
    if (quotient == 0) return std::copysign(R(0), a / b);
    const R whole = std::floor(quotient);
    return quotient - whole > R(0.5) ? whole + 1 : whole;
  }
  // The vectors' exp is 0 below e^-69, where a score may still matter: then std::exp.
  static FA_INLINE V exponential(V x) {
    const VI small = (VI)(x < splat(kLeastExponent<R>));
    for (int l = 0; l < W; ++l)
      if (small[l]) {
        for (int k = 0; k < W; ++k) x[k] = std::exp(x[k]);
        return x;
      }
    return exp(x);
  }

#if defined(__AVX512F__)
  static FA_INLINE bool all_set(VI x) {
    if constexpr (sizeof(I) == 4)
      return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) == 0xFFFF;
    else
      return _mm512_test_epi64_mask((__m512i)x, (__m512i)x) == 0xFF;
  }
#else
  static FA_INLINE bool all_set(VI x) {
    I all = -1;
    for (int l = 0; l < W; ++l) all &= x[l];
    return all != 0;
  }
#endif
  static FA_INLINE VI lane_numbers() {
    VI lane;
    for (int l = 0; l < W; ++l) lane[l] = I(l);
    return lane;
  }
  // An index, clamped: nothing outside of a table is read or written, whatever the code says.
  static FA_INLINE VI inside(VI at, I last) {
    at = at < VI{} ? VI{} : at;
    return at > splat(last) ? splat(last) : at;
  }
  static FA_INLINE bool rises(VI at) { return all_set(VI(at - lane_numbers() == splat(at[0]))); }
  static FA_INLINE bool falls(VI at) { return all_set(VI(at + lane_numbers() == splat(at[0]))); }
  // Neighbouring rows often read neighbouring numbers, as of a table by i - j: that is one load.
  static FA_INLINE V read_at(const R* table, VI at) {
    if (rises(at)) return load(table + at[0]);
    if (!falls(at)) return gather(table, at);
    const V turned = load(table + at[W - 1]);
    V reversed;
    for (int l = 0; l < W; ++l) reversed[l] = turned[W - 1 - l];
    return reversed;
  }
  static FA_INLINE VI read_at(const int64_t* table, VI at) {
    VI values;
    for (int l = 0; l < W; ++l) values[l] = I(table[at[l]]);
    return values;
  }

  // Adds dS times its factor at the indices of captured numbers.
  static void scatter(const Call& call, const ModInstruction& x, const Step& s, const R* ds) {
    R* to = call.gradient;
    const I last = I(code_of(call.p.mod).floats - 1);
    const In &at = s.in[0], &factor = s.in[1];
    const auto term = [&](int64_t r, int64_t l) {
      const V g = load(ds + r * call.lanes + l);
      return V(g == V{} ? V{} : g * take<R>(factor, r, l));
    };
    const bool one_index = x.in[0].of == int64_t(ModClass::uniform);
    if (one_index || x.in[0].of == int64_t(ModClass::key)) {
      V sum{};
      for (int64_t r = 0; r < s.rows; ++r) {
        for (int64_t l = 0; l < s.width; l += W) sum += term(r, l);
        if (one_index && r + 1 < s.rows) continue;
        R total = R(0);
        for (int l = 0; l < W; ++l) total += sum[l];
        to[std::clamp<I>(at.template row<I>(r)[0], 0, last)] += total;
        sum = V{};
      }
      return;
    }
    for (int64_t r = 0; r < s.rows; ++r)
      for (int64_t l = 0; l < s.width; l += W) {
        const V g = term(r, l);
        const VI where = inside(load(at.template row<I>(r) + l), last);
        if (rises(where)) {
          R* first = to + where[0];
          store(first, V(load(first) + g));
        } else {
          for (int k = 0; k < W; ++k) to[where[k]] += g[k];
        }
      }
  }

  static R* slot(const Call& call, const ScoreModCode& code, int64_t at) {
    if (at < 3) return call.tiles[at];
    if (at < code.constant_slots) return call.scratch + at * kMostLanes;
    return call.scratch + code.constant_slots * kMostLanes +
           (at - code.constant_slots) * kStepKeys * kMostLanes;
  }
  [[gnu::noinline]] static void run(const Call& call, const ModList& list) {
    const ScoreModCode& code = code_of(call.p.mod);
    const auto* all = reinterpret_cast<const ModInstruction*>(&code + 1);
    if (empty(list)) return;
    Step* steps = reinterpret_cast<Step*>(call.scratch + steps_at(code));
    Made& made = reinterpret_cast<Made*>(call.scratch)[&list - &code.score];
    const Rows& rows = call.rows;
    if (made.i0 != rows.i0 || made.h != rows.h || made.b != rows.b || made.lanes != call.lanes) {
      for (int64_t x = list.begin; x < list.end; ++x) {
        steps[x] = step_of(call, code, all[x]);
        if (x < list.varying) execute(call, code, all[x], steps[x], 0);
      }
      made = {rows.b, rows.h, rows.i0, call.lanes};
    }
    for (int64_t j = 0; j < call.keys.count; j += kStepKeys) {
      const int64_t n = std::min(kStepKeys, call.keys.count - j), at = j * call.lanes;
      for (int64_t x = list.varying; x < list.end; ++x) {
        Step& s = steps[x];
        s.rows = s.for_keys ? n : 1;
        if (s.tile >= 0) s.out = call.tiles[s.tile] + at;
        for (In& in : s.in)
          if (in.tile >= 0) in.at = call.tiles[in.tile] + at;
        execute(call, code, all[x], s, j);
      }
    }
  }
  static Step step_of(const Call& call, const ScoreModCode& code, const ModInstruction& x) {
    Step s;
    const auto of = ModClass(x.out.of);
    s.for_keys = of == ModClass::tile;
    s.rows = 1;
    s.width = of == ModClass::uniform ? W : of == ModClass::key ? kStepKeys : call.lanes;
    s.out = slot(call, code, x.out.slot);
    s.out_step = call.lanes;
    s.tile = x.out.slot < 3 ? int8_t(x.out.slot) : int8_t(-1);
    for (int k = 0; k < 3; ++k) {
      const auto in = ModClass(x.in[k].of);
      const int64_t step = in == ModClass::tile ? call.lanes : in == ModClass::key ? 1 : 0;
      // One number for all lanes; a uniform value is stored as a vector, as a uniform result reads it.
      const bool single = in != of && (in == ModClass::uniform || in == ModClass::key);
      const int8_t tile = x.in[k].slot < 3 ? int8_t(x.in[k].slot) : int8_t(-1);
      s.in[k] = {slot(call, code, x.in[k].slot), step, single, tile};
    }
    return s;
  }

  // The indices of rows, or of keys, from `first` on: those after the last repeat it, so that indices
  // stay in range.
  static void count(const Step& s, int64_t from, int64_t first, int64_t size) {
    I* to = reinterpret_cast<I*>(s.out);
    for (int64_t l = 0; l < s.width; ++l) to[l] = I(from + std::min(first + l, size - 1));
  }
  // -inf where a mask_mod hides a key, even for NaN.
  static void hide(const Step& s) {
    for (int64_t l = 0; l < s.width; l += W)
      for (int64_t r = 0; r < s.rows; ++r) {
        R* at = s.template result<R>(r) + l;
        const VI test = take<I>(s.in[0], r, l);
        store(at, V(test != VI{} ? load(at) : splat(-kInf<R>)));
      }
  }
  // Notes an index out of range where s.out is not -inf.
  static void check(const Call& call, const Step& s) {
    for (int64_t r = 0; r < s.rows; ++r) {
      const I* wrong = s.in[0].template row<I>(r);
      const R* at = s.out + r * s.out_step;
      for (int64_t l = 0; l < call.rows.count; ++l)
        if (wrong[s.in[0].splat ? 0 : l] && !(at[l] == -kInf<R>))
          __atomic_store_n(call.p.mod.outside, int64_t(1), __ATOMIC_RELAXED);
    }
  }

  // The result of one instruction, for the keys of the tile from j on.
  [[gnu::noinline]] static void execute(const Call& call, const ScoreModCode& code,
                                        const ModInstruction& x, const Step& s, int64_t j) {
    const Params& p = call.p;
    const auto number = [&] {
      double value;
      std::memcpy(&value, &x.number, sizeof value);
      return R(value);
    };
    switch (ScoreModOp(x.op)) {
      case ScoreModOp::b:
        return fill<I>(s, splat(I(drawn(p.at_item, call.rows.b, p.items_again))));
      case ScoreModOp::h:
        return fill<I>(s, splat(I(drawn(p.at_head, call.rows.h, p.heads_again))));
      case ScoreModOp::i:
        return count(s, p.at_row, call.rows.i0, p.M);
      case ScoreModOp::j:
        return count(s, p.at_key, call.keys.j0 + j, p.N);
      case ScoreModOp::constant_f:
        return fill<R>(s, splat(number()));
      case ScoreModOp::constant_i:
        return fill<I>(s, splat(I(x.number)));
      case ScoreModOp::constant_b:
        return fill<I>(s, splat(I(-x.number)));
      case ScoreModOp::load_f: {
        const R* table = static_cast<const R*>(p.mod.floats);
        const I last = I(code.floats - 1);
        return one<I, R>(s, [&](VI at) { return read_at(table, inside(at, last)); });
      }
      case ScoreModOp::load_i: {
        const I last = I(code.ints - 1);
        return one<I, I>(s, [&](VI at) { return read_at(p.mod.ints, inside(at, last)); });
      }
      case ScoreModOp::pow_f:
        return each_two<R>(s, [](R a, R b) { return R(std::pow(a, b)); });
      case ScoreModOp::floor_div_f:
        return each_two<R>(s, floor_divided_of);
      case ScoreModOp::remainder_f:
        return each_two<R>(s, remainder_of);
      case ScoreModOp::where_f:
        return where<R>(s);
      case ScoreModOp::where_i:
        return where<I>(s);
      case ScoreModOp::floor_div_i:
        return divide(s, [](VI, VI q, VI) { return q; });
      case ScoreModOp::remainder_i:
        return divide(s, [](VI x, VI q, VI d) { return d == VI{} ? VI{} : x - q * d; });
      case ScoreModOp::shift_left_i:
        return each_two<I>(s, [](I a, I b) { return I(a << bits_of_shift(b)); });
      case ScoreModOp::shift_right_i:
        return each_two<I>(s, [](I a, I b) { return I(a >> bits_of_shift(b)); });
      case ScoreModOp::to_int_f:
        return each_as_int(s);
      case ScoreModOp::copy:
        return one<R, R>(s, [](V a) { return a; });
      case ScoreModOp::hide:
        return hide(s);
      case ScoreModOp::check:
        return check(call, s);
      case ScoreModOp::scatter:
        return scatter(call, x, s, call.tiles[1] + j * call.lanes);
#define FA_ONE(name, A, O, ...) \
  case ScoreModOp::name:        \
    return one<A, O>(s, [](Vec<A> a) { return __VA_ARGS__; });
#define FA_TWO(name, A, O, ...) \
  case ScoreModOp::name:        \
    return two<A, O>(s, [](Vec<A> a, Vec<A> b) { return __VA_ARGS__; });
#define FA_EACH(name, ...) \
  case ScoreModOp::name:   \
    return each<R>(s, [](R a) { return R(__VA_ARGS__); });
        FA_OPERATORS(FA_ONE, FA_TWO, FA_EACH)
#undef FA_ONE
#undef FA_TWO
#undef FA_EACH
    }
  }
  static FA_INLINE I bits_of_shift(I n) { return std::clamp<I>(n, 0, 8 * sizeof(I) - 1); }
};

#if defined(FA_HOME)  // see unit.cpp
FA_HOME template void ScoreMod<float>::run(const Call&, const ModList&);
FA_HOME_F64 template void ScoreMod<double>::run(const Call&, const ModList&);
#endif

}  // namespace FA_ISA
}  // namespace fa
