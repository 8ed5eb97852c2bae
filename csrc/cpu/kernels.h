// The kernels of one instruction set: a table of functions that plan a call. unit.cpp fills it, and
// runtime/kernel_choice.cpp chooses from it. What a set does not have is null.
#pragma once
#include "base/plan.h"

namespace fa {

using Planner = Plan (*)(const Params& p);

// The kernels that multiply in one way.
struct Arithmetic {
  int64_t lanes = 0;  // of a vector of the type that they compute in
  Planner forward = nullptr, weights = nullptr, backward = nullptr;  // lanes are query rows
  Planner decode = nullptr, few_gradients = nullptr, paged_gradients = nullptr;  // or columns
  IndexerTasks (*indexer)(const FaIndexer& p) = nullptr;
  double (*peak)(double seconds, double (*now)()) = nullptr;  // GF/s of one core on registers alone
};

// Decoding of float32 queries on keys and values of another type.
struct StoredKeys {
  Planner f16 = nullptr, bf16 = nullptr, i8 = nullptr, e4m3 = nullptr, e5m2 = nullptr, i4 = nullptr;
  Planner i8_as_integers = nullptr, e4m3_in_tables = nullptr;
};

struct Tangents {
  Planner jvp = nullptr, forward_jvp = nullptr;
  Planner second = nullptr;            // where forward had scores of the same roundings,
  Planner second_of_others = nullptr;  // and where it did not
};

struct Kernels {
  Arithmetic f32, f64;
  Arithmetic bf16;      // multiplies bfloat16
  Arithmetic few_bf16;  // the same, of the rows that few_rows.h serves
  Arithmetic tiles[3];  // numbers of one, two and three planes: bfloat16, float16, float32
  StoredKeys stored;
  Tangents tangents_f32, tangents_f64;
  NormRopeTasks (*norm_rope)(const FaNormRope& p) = nullptr;
  // y = f(x): FaVectorFunction.
  void (*vector_function)(int64_t which, int64_t dtype, const void* x, void* y,
                          int64_t n) = nullptr;
};

// As long as lanes of rows would be half empty, lanes of columns are faster, measured, except for a
// few rows on so few keys that there is next to nothing to read. With vectors of 32 bytes they are
// faster for up to as many rows as lanes, too, if long keys of a head do not stay in a near cache. All
// passes of a call get the same answer, with values or without: they have the same roundings of
// scores.
inline __attribute__((always_inline)) bool has_few_rows(const Params& p, int64_t lanes) {
  const bool of_32_bytes = lanes == (p.q.dtype == FA_F64 ? 4 : 8);
  const bool far = p.D >= 64 && p.N * p.D >= 1 << 16;
  const int64_t most = of_32_bytes && far ? lanes : lanes / 2;
  const bool worth = p.N * lanes > 48 * p.M && p.N * p.D > 128 * p.M;
  return !p.row_invariant && p.M <= most && (p.M == 1 || worth);
}

}  // namespace fa
