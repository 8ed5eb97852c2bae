// Backward on Hopper's tensor cores. A block has 128 keys, 64 to each of two warpgroups, and rows
// pass. Scores are transposed (keys by rows), so that weights and ds go on from registers to the
// products for dv and dk. Only ds goes through shared memory, for dq, which is transposed, too:
//
//   s  = K Q^T       p  = exp(s - normaliser)       dv += p dO
//   dp = V dO^T      ds = p (dp - delta)            dk += ds Q      dq^T = K^T ds
//
// The rows of all query heads that read a key head pass one after the other. In the first warpgroup
// one thread asks for boxes of k and q, one for those of v and dout, and a warp for each half of dq
// adds it to the sums of other blocks in global memory (dq_accum.cuh).
#pragma once
#include "../sm80/score_gradient.cuh"
#include "clear_rows.cuh"
#include "dq_accum.cuh"

namespace fa {
namespace sm90 {

// A warpgroup's 64 keys of a block.
template <class B>
struct KeyConsumer {
  using Type = typename B::Type;
  using Scores = ptx::Products<B::kRows>;
  using Sums = ptx::Products<B::kD>;
  using QuerySums = ptx::Products<B::kQueryRows>;
  static constexpr int kScoreFours = B::kRows / 8;

  const BackwardMemory<B>& memory;
  int mine;  // of the consumers' warpgroups

  FA_DEVICE int thread() const { return static_cast<int>(threadIdx.x) % kWarpgroup; }
  FA_DEVICE bool leads() const { return thread() == 0; }

  // s += K Q^T, or V dO^T
  FA_DEVICE void ask_scores(float (&s)[kScoreFours][4], uint32_t keys, uint32_t rows) const {
    const uint32_t left = ptx::k_major(keys + mine * kGroupRows * 128), right = ptx::k_major(rows);
    ptx::fence_operand(s);
    ptx::products_fence("backward: first sums of scores are there");
#pragma unroll
    for (int d = 0; d < B::kD / 16; ++d)
      Scores::template ss<false, false>(
          "backward: scores", Type(), s,
          left + ptx::in_descriptor(d / 4 * B::kKeyPart + d % 4 * 32),
          right + ptx::in_descriptor(d / 4 * B::kRowPart + d % 4 * 32), B::kOnto || d > 0);
    ptx::products_commit("backward: scores are asked for");
  }

  // sum += x rows, for dv and dk
  FA_DEVICE void ask_sums(float (&sum)[B::kD / 8][4], const LeftSides<kScoreFours>& x,
                          uint32_t rows) const {
    const uint32_t right = ptx::mn_major(rows, B::kRowPart);
    ptx::fence_operand(sum);
    ptx::products_fence("backward: sums and left sides are ready");
#pragma unroll
    for (int j = 0; j < B::kRows / 16; ++j)
      Sums::template rs<true>("backward: sums of keys", Type(), sum, x[j],
                              right + ptx::in_descriptor(2048 * j), true);
    ptx::products_commit("backward: sums of keys are asked for");
  }

  // dq^T = K^T ds, this warpgroup's half
  FA_DEVICE void ask_queries(float (&dq)[B::kQueryRows / 8][4], int stage) const {
    const uint32_t keys = memory.keys() + (B::kHalvesColumns ? mine * B::kKeyPart : 0);
    const uint32_t scores =
        memory.scores(stage) + (B::kHalvesColumns ? 0 : mine * B::kQueryRows * 128);
    const uint32_t left = ptx::mn_major(keys, B::kKeyPart), right = ptx::k_major(scores);
    ptx::products_fence("backward: registers of dq are free");
#pragma unroll
    for (int j = 0; j < B::kKeys / 16; ++j)
      QuerySums::template ss<true, false>(
          "backward: K^T ds", Type(), dq, left + ptx::in_descriptor(2048 * j),
          right + ptx::in_descriptor(j / 4 * B::kRowPart + j % 4 * 32), j > 0);
    ptx::products_commit("backward: dq is asked for");
  }
};

// Weights of keys that a row does not see become 0. `first` is the lane's first row of the tile,
// and `seen` the rows that see its keys. Before the `right` edge one comparison a score suffices.
template <int n>
FA_DEVICE void hide_rows(float (&p)[n][4], const Band (&seen)[2], int first, bool right) {
  const int begin[2] = {seen[0].lo - first, seen[1].lo - first};
  each_of(p, [&](int k, int e) {
    if (8 * k + e % 2 < begin[e / 2]) p[k][e] = 0.0f;
  });
  if (!right) return;
  const int end[2] = {seen[0].hi - first, seen[1].hi - first};
  each_of(p, [&](int k, int e) {
    if (8 * k + e % 2 >= end[e / 2]) p[k][e] = 0.0f;
  });
}

// A lane's part of a row of states: two adjacent rows of every eight.
FA_DEVICE float2 states_of(const float* states, sm80::Part part, int k) {
  return *reinterpret_cast<const float2*>(states + sm80::RowStates::place(part, 8 * k));
}

// For each of a lane's keys the states of its rows.
template <sm80::Part part, int n>
FA_DEVICE void spread(float (&x)[n][4], const float* states) {
#pragma unroll
  for (int k = 0; k < n; ++k) {
    const float2 two = states_of(states, part, k);
    x[k][0] = x[k][2] = two.x, x[k][1] = x[k][3] = two.y;
  }
}

// --- softmax: the weights of a tile without features, from its products
template <int n>
FA_DEVICE void exponentiate(float (&s)[n][4], const float* states, float to_log2) {
#pragma unroll
  for (int k = 0; k < n; ++k) {
    const float2 rest = states_of(states, sm80::kRest, k);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s[k][e] = ptx::exp2(fmaf(s[k][e], to_log2, e % 2 ? rest.y : rest.x));
  }
}

// --- store: a tile of ds for the products of both warpgroups
template <int n>
FA_DEVICE void put_scores(uint32_t to, const LeftSides<n>& ds) {
#pragma unroll
  for (int j = 0; j < n / 2; ++j)
    ptx::store_matrices_transposed("backward: ds", to + j * 2048, ds[j]);
  ptx::async_proxy_fence("backward: products see this ds");
}

// A tile of dq for the warp that adds it to the sums in memory. What is computed again needs no
// registers before.
template <int half_bytes, int n>
FA_DEVICE void send_queries(unsigned char* memory, const float (&dq)[n][4]) {
  const int again = static_cast<int>(ptx::thread_anew()) - kWarpgroup;
  const int half = again / kWarpgroup;
  unsigned char* const sums = memory + half * half_bytes + again % kWarpgroup * 16;
  ptx::barrier_sync("backward: the last dq is sent", kHalfFree + half, kWarpgroup + 32);
#pragma unroll
  for (int j = 0; j < n; ++j)
    reinterpret_cast<float4*>(sums)[kWarpgroup * j] = {dq[j][0], dq[j][1], dq[j][2], dq[j][3]};
  ptx::async_proxy_fence("backward: bulk copies see this dq");
  ptx::barrier_arrive("backward: this dq is written", kHalfThere + half, kWarpgroup + 32);
}

// The sums of a block. What is computed again needs no registers before.
template <class B>
FA_DEVICE void store_sums(const FaParams& batch, const KeyTask& own, float (&dk)[B::kD / 8][4],
                          float (&dv)[B::kD / 8][4]) {
  using Type = typename B::Type;
  const Item of(batch, own.b);
  const int again = static_cast<int>(ptx::thread_anew()) - kWarpgroup;
  const int key = own.first_key + again / 32 * 16 + again % 32 / 4, columns = 2 * (again % 4);
  store_gradient<Type>(of.dk, own.b, own.hk, key, columns, of.N, of.D, sm80::alone(dk),
                       static_cast<float>(of.scale));
  const bool dropout = B::kGeneral && of.dropout_p > 0;
  store_gradient<Type>(of.dv, own.b, own.hk, key, columns, of.N, of.Dv, sm80::alone(dv),
                       dropout ? static_cast<float>(dropout_rule(of.dropout_p).factor) : 1.0f);
}

// All that a thread does.
template <class B>
FA_DEVICE void backward_thread(const TensorMap& of_q, const TensorMap& of_dout,
                               const TensorMap& of_k, const TensorMap& of_v, const FaParams& batch,
                               const KeySchedule& schedule, float* workspace) {
  using Type = typename B::Type;
  constexpr int kFours = B::kRows / 8;
  FA_SHARED_MEMORY(shared);
  const BackwardMemory<B> memory(shared);
  const sm80::Turns turns(workspace);
  if (threadIdx.x == 0) {
    memory.init();
    memory.task() = KeyTask::of(schedule, turns.next_ticket());
  }
  ptx::block_sync("backward: all know their task");
  const KeyTask task = {warp_uniform(memory.task().b), warp_uniform(memory.task().hk),
                        warp_uniform(memory.task().first_key)};
  const Item p(batch, task.b);
  if (warp_uniform(task.first_key >= p.N)) return;  // another item is longer
  if (warp_uniform(turns.fall(batch))) return;
  const RowTiles tiles = RowTiles::of<B::kRows, B::kBanded>(p, task);
  const int group = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
  if (group == 0) {
    ptx::fewer_registers<B::kFewRegisters>("backward: registers for others");
    const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
    if (tiles.begin >= tiles.end) return;
    if (warp >= 2)
      add_half<B>(memory.half(warp - 2), batch, p, schedule, task, tiles, workspace, warp - 2);
    else if (threadIdx.x == 0)
      load_boxes<B, true>(memory, &of_q, &of_k, batch, p, schedule, task, tiles, workspace);
    else if (threadIdx.x == 32)
      load_boxes<B, false>(memory, &of_dout, &of_v, batch, p, schedule, task, tiles, workspace);
    return;
  }
  ptx::more_registers<B::kRegisters>("backward: registers of others");

  const int mine = group - 1, lane = static_cast<int>(threadIdx.x) % 32;
  const KeyConsumer<B> consumer = {memory, mine};
  const int warp = consumer.thread() / 32;
  const int key_below = kGroupRows * mine + 16 * warp + lane / 4;  // and + 8
  const int column = 2 * (lane % 4);
  const Visible visible(p, task.b);
  const float to_log2 = static_cast<float>(p.scale) * kLog2e;
  // This lane's part of ds in shared memory, of 8 x 8 matrices.
  const uint32_t scores = memory.scores(0) + mine * B::kRowPart + (lane / 16 * 8 + lane % 8) * 128 +
                          ((32 * warp + lane / 8 % 2 * 16) ^ (lane % 8 * 16));
  Band seen[2] = {};
  if (B::kBanded && !B::kGeneral)
    for (int half = 0; half < 2; ++half)
      seen[half] = visible.rows_of(task.first_key + key_below + 8 * half, 1 << 30);
  const auto rows = static_cast<int>(p.M);
  const int keys = warp_uniform(visible.length - task.first_key);  // of the block exist

  float dk[B::kD / 8][4] = {}, dv[B::kD / 8][4] = {};
  Passed passed;
  // In a packed batch, the rows behind the last one are of another sequence.
  const int rows_there = warp_uniform(batch.cu_q ? static_cast<int>(p.M) : 1 << 30);
  if (tiles.begin < tiles.end) {
    ptx::mbarrier_wait("backward: keys have landed", memory.keys_full(), 0);
    if (keys < B::kKeys) {
      clear_rows<B, B::kKeys, B::kParts>(shared, keys);
      clear_rows<B, B::kKeys, B::kParts>(shared + B::kKeyBytes, keys);
      rows_are_cleared<B>(kRowsCleared);
    }
  }

  const auto step = [&](int tile, const Head& head, const MaskLines(&mask)[1], auto hides) {
    float s[kFours][4], dp[kFours][4];
    LeftSides<kFours> weights, ds;
    const float* const states = memory.states(passed.stage()) + column;
    ptx::mbarrier_wait("backward: rows of q have landed", memory.q_full(passed.stage()),
                       passed.parity());
    if ((tile + 1) * B::kRows > rows_there) {
      ptx::mbarrier_wait("backward: rows of dout have landed, too",
                         memory.dout_full(passed.stage()), passed.parity());
      unsigned char* const q = shared + B::kRowsAt + passed.stage() * B::kRowBytes;
      const int left = rows_there - tile * B::kRows;
      clear_rows<B, B::kRows, B::kParts>(q, left);
      clear_rows<B, B::kRows, B::kParts>(q + B::kStages * B::kRowBytes, left);
      rows_are_cleared<B>(kRowsCleared);
    }
    if constexpr (B::kGeneral) {
      const sm80::Corner corner = {task.first_key + key_below, tile * B::kRows + column};
      MaskPairs<kFours> pairs[1];
      if (batch.mask.data)
        load_mask(pairs[0], mask[0], Places<true>{head, corner.stays, corner.passes});
      consumer.ask_scores(s, memory.keys(), memory.q(passed.stage()));
      ptx::mbarrier_wait("backward: rows of dout have landed", memory.dout_full(passed.stage()),
                         passed.parity());
      consumer.ask_scores(dp, memory.values(), memory.dout(passed.stage()));
      ptx::products_wait<0>("backward: scores and dp are there");
      ptx::fence_operand(s);
      ptx::fence_operand(dp);
      const auto passing = [&](sm80::RowState(&two)[2], int further) {
        sm80::StateTile<B::kRows>::read(two, reinterpret_cast<const unsigned char*>(states),
                                        further);
      };
      const bool whole = tile >= tiles.whole_begin && tile < tiles.whole_end && keys >= B::kKeys;
      const sm80::RowState none[1][2] = {};
      sm80::differentiate<B>(sm80::alone(s), sm80::alone(dp), head, visible, rows, whole, none,
                             passing, mask, pairs, corner);
      pack_weights<Type>(weights, s);
      consumer.ask_sums(dv, weights, memory.dout(passed.stage()));
    } else {
      spread<sm80::kLevel>(s, states);
      spread<sm80::kMinusDelta>(dp, states);
      // Scores of keys past the last one begin at -inf, so that their weights are 0.
      if (keys < B::kKeys) {
        // Computed again, so that other blocks need no register for it.
        const int again = static_cast<int>(ptx::thread_anew()) - kWarpgroup;
        const int keys_left = keys - again / 32 * 16 - again % 32 / 4;
        each_of(s, [&](int k, int e) {
          if (8 * (e / 2) >= keys_left) s[k][e] = -INFINITY;
        });
      }
      ptx::fence_operand(dp);
      consumer.ask_scores(s, memory.keys(), memory.q(passed.stage()));
      ptx::mbarrier_wait("backward: rows of dout have landed", memory.dout_full(passed.stage()),
                         passed.parity());
      consumer.ask_scores(dp, memory.values(), memory.dout(passed.stage()));
      ptx::products_wait<1>("backward: scores are there");
      ptx::fence_operand(s);
      exponentiate(s, states, to_log2);
      if (decltype(hides)::value)
        hide_rows(s, seen, tile * B::kRows + column, tile >= tiles.whole_end);
      pack_weights<Type>(weights, s);
      consumer.ask_sums(dv, weights, memory.dout(passed.stage()));
      ptx::products_wait<1>("backward: dp is there");
      ptx::fence_operand(dp);
      each_of(dp, [&](int k, int e) { dp[k][e] *= s[k][e]; });
    }
    pack_weights<Type>(ds, dp);
    // The last tile's ds is at another place: the other warpgroup may not have read it.
    put_scores<kFours>(scores + passed.stage() * B::kScoreBytes, ds);
    ptx::barrier_sync("backward: both have written ds", kScoresThere, B::kConsumers);
    float dq[B::kQueryRows / 8][4];
    consumer.ask_queries(dq, passed.stage());
    consumer.ask_sums(dk, ds, memory.q(passed.stage()));
    ptx::products_wait<1>("backward: dv and dq are there");
    ptx::fence_operand(dq);
    ptx::fence_operand(dv);
    if (consumer.leads())
      ptx::mbarrier_arrive("backward: dout is read", memory.dout_free(passed.stage()));
    send_queries<B::kHalfBytes>(shared + B::kQueriesAt, dq);
    ptx::products_wait<0>("backward: dk is there");
    ptx::fence_operand(dk);
    if (consumer.leads())
      ptx::mbarrier_arrive("backward: q is read", memory.q_free(passed.stage()));
    ++passed.tiles;
  };
  const auto all = static_cast<unsigned>(tiles.count() * schedule.group);
  for (int h = task.hk * schedule.group; passed.tiles < all; ++h) {
    const Head head(B::kGeneral ? batch : p, task.b, h, visible.shift);
    MaskLines mask[1];
    if constexpr (B::kGeneral)
      mask[0] = MaskLines(Places<true>{head, task.first_key + key_below, 0});
    const bool reversed = B::kReversible && schedule.reversed;
    const int way = reversed ? -1 : 1;
    int tile = reversed ? tiles.end - 1 : tiles.begin;
    const auto to = [&](int end, auto hides) {
#pragma unroll 1
      for (; tile != end; tile += way) step(tile, head, mask, hides);
    };
    const int end = reversed ? tiles.begin - 1 : tiles.end;
    if constexpr (B::kReversible) {
      // Tiles that see some keys in part, whole ones, and those at the other edge of the band.
      for (int until = reversed ? tiles.whole_end - 1 : tiles.whole_begin;; until = end) {
        to(until, Known<true>());
        if (tile == end) break;
        to(reversed ? tiles.whole_begin - 1 : tiles.whole_end, Known<false>());
      }
    } else {
      to(end, Known<false>());
    }
  }

  store_sums<B>(batch, memory.task(), dk, dv);
}

template <class B>
__global__ void __launch_bounds__(B::kThreads, 1)
    backward_kernel(const __grid_constant__ TensorMap of_q,
                    const __grid_constant__ TensorMap of_dout,
                    const __grid_constant__ TensorMap of_k, const __grid_constant__ TensorMap of_v,
                    const __grid_constant__ FaParams batch,
                    const __grid_constant__ KeySchedule schedule, float* workspace) {
  FA_BODY(backward_thread<B>(of_q, of_dout, of_k, of_v, batch, schedule, workspace));
}

}  // namespace sm90
}  // namespace fa
