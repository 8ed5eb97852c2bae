// Kernels that run the instructions of ptx.cuh in this folder, each alone, for tests.
// tests/gpu_emulation/instructions90.py has the inputs, and what must come out. Waits for mbarriers have
// a limit of time, so that a mistake is reported, and does not hang.
#include "../launch.h"
#include "probe.cuh"

namespace fa {
namespace sm90 {

// What is run, numbered as in instructions90.py. Products: kProducts + 16 F16 + 8 registers + 2 A + B,
// where A and B are 1 if mn_major.
enum Probe {
  kProducts = 0,
  kLoadBox = 32,
  kStoreBox,
  kLoadBytes,
  kAddBytes,
  kPhases,
  kRegisters,
  kStoreMatrices,
  kStoreMatricesTransposed,
  kTurns,
  kNothingArrives,
};

// -- products -------------------------------------------------------------------------------------

constexpr int kRowsOfA = 64, kRowsOfB = 128, kColumns = 128, kAWords = kRowsOfA * 32;
constexpr int kBAt = kAWords * 4, kBPart = 64 * 128, kProductBytes = kBAt + kRowsOfB * 128;

// out (64 x 128, float32) = A B, the sum of four products of 16. a has 64 rows of 64 elements, b has
// 128: the tile as it lies in memory, for B in parts of 64 rows if it is mn_major.
template <class Type, bool in_registers, bool a_mn, bool b_mn>
__global__ void __launch_bounds__(kWarpgroup)
    probe_products(const uint32_t* a, const uint32_t* b, float* out, Report report) {
  FA_SHARED_MEMORY(memory);
  auto* shared = reinterpret_cast<uint32_t*>(memory);
  report.begins(kBegun);
  fill<true>(shared, a, kAWords);
  fill<true>(shared + kAWords, b, kRowsOfB * 32);
  ptx::block_sync("probe: tiles are there");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
  uint32_t left[4][4];
  for (int k = 0; k < 4; ++k)
    for (int i = 0; i < 4; ++i)
      left[k][i] = a[(row + 8 * (i % 2)) * 32 + 8 * k + lane % 4 + 4 * (i / 2)];
  float d[kColumns / 8][4];
  for (auto& each : d)
    for (float& x : each) x = 1000.0f;  // the first product does not add
  const uint32_t a_at = ptx::shared_address(memory), b_at = a_at + kBAt;
  ptx::fence_operand(d);
  ptx::products_fence("probe: products begin");
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t right = (b_mn ? ptx::mn_major(b_at, kBPart) : ptx::k_major(b_at)) +
                           ptx::in_descriptor(k * (b_mn ? 2048 : 32));
    const uint32_t from = (a_mn ? ptx::mn_major(a_at, kBPart) : ptx::k_major(a_at)) +
                          ptx::in_descriptor(k * (a_mn ? 2048 : 32));
    using Tile = ptx::Products<kColumns>;
    if constexpr (in_registers)
      Tile::template rs<b_mn>("probe: a product", Type(), d, left[k], right, k > 0);
    else
      Tile::template ss<a_mn, b_mn>("probe: a product", Type(), d, from, right, k > 0);
  }
  ptx::products_commit("probe: the products");
  report.begins(kProductsEnd);
  ptx::products_wait<0>("probe: products end");
  ptx::fence_operand(d);
  for (int j = 0; j < kColumns / 8; ++j)
    for (int e = 0; e < 4; ++e)
      out[(row + 8 * (e / 2)) * kColumns + 8 * j + 2 * (lane % 4) + e % 2] = d[j][e];
  report.begins(kDone);
}

// -- copies ---------------------------------------------------------------------------------------

constexpr int kBoxRows = 16, kBoxBytes = kBoxRows * 128, kBoxWords = kBoxBytes / 4;

// out = a box of 16 rows of the tensor, as shared memory has it; `a` is there before.
__global__ void probe_load_box(const __grid_constant__ TensorMap map, ptx::BoxAt at,
                               const uint32_t* a, uint32_t* out, Report report) {
  FA_SHARED_MEMORY(memory);
  auto* shared = reinterpret_cast<uint32_t*>(memory);
  report.begins(kBegun);
  fill<false>(shared, a, kBoxWords);
  const Awaited bytes(memory + kBoxBytes, 1);
  if (threadIdx.x == 0) {
    ptx::mbarrier_expect("probe: a box is asked for", bytes.at, kBoxBytes);
    ptx::load_box("probe: a box", ptx::shared_address(memory), &map, at, bytes.at);
  }
  if (!bytes.ends(report, kBytesArrive, 0)) return;
  copy_out(out, shared, kBoxWords);
  report.begins(kDone);
}

// A box of the tensor = a, which has the layout of shared memory.
__global__ void probe_store_box(const __grid_constant__ TensorMap map, ptx::BoxAt at,
                                const uint32_t* a, Report report) {
  FA_SHARED_MEMORY(memory);
  report.begins(kBegun);
  fill<false>(reinterpret_cast<uint32_t*>(memory), a, kBoxWords);
  ptx::block_sync("probe: a box is there");
  report.begins(kCopiedOut);
  if (threadIdx.x == 0) {
    ptx::store_box("probe: a box goes out", &map, at, ptx::shared_address(memory));
    ptx::bulk_commit("probe: it is a group");
    ptx::bulk_wait<0>("probe: it has gone out");
  }
  report.begins(kDone);
}

__global__ void probe_load_bytes(const uint32_t* a, const uint32_t* b, uint32_t* out,
                                 Report report) {
  FA_SHARED_MEMORY(memory);
  auto* shared = reinterpret_cast<uint32_t*>(memory);
  report.begins(kBegun);
  fill<false>(shared, a, kBoxWords);
  const Awaited bytes(memory + kBoxBytes, 1);
  if (threadIdx.x == 0) {
    ptx::mbarrier_expect("probe: bytes are asked for", bytes.at, kBoxBytes);
    ptx::load_bytes("probe: bytes", ptx::shared_address(memory), b, kBoxBytes, bytes.at);
  }
  if (!bytes.ends(report, kBytesArrive, 0)) return;
  copy_out(out, shared, kBoxWords);
  report.begins(kDone);
}

// out += a
__global__ void probe_add_bytes(const uint32_t* a, float* out, Report report) {
  FA_SHARED_MEMORY(memory);
  report.begins(kBegun);
  fill<false>(reinterpret_cast<uint32_t*>(memory), a, kBoxWords);
  ptx::block_sync("probe: numbers are there");
  report.begins(kCopiedOut);
  if (threadIdx.x == 0) {
    ptx::add_bytes("probe: numbers are added", out, ptx::shared_address(memory), kBoxBytes);
    ptx::bulk_commit("probe: they are a group");
    ptx::bulk_wait<0>("probe: they have been added");
  }
  report.begins(kDone);
}

// -- threads that wait for each other -------------------------------------------------------------

// Two phases of an mbarrier: out = a, backwards, twice; then whether the first phase was over before
// all had arrived.
__global__ void probe_phases(const uint32_t* a, uint32_t* out, Report report) {
  FA_SHARED_MEMORY(memory);
  auto* values = reinterpret_cast<uint32_t*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  report.begins(kBegun);
  const Awaited phase(memory + kWarpgroup * 4, kWarpgroup);
  if (!phase.ends(report, kPhaseEnds, 1)) return;  // the one before the first counts as ended
  if (thread > 0) ptx::mbarrier_arrive("probe: all but one arrive", phase.at);
  if (thread == 0) {
    out[2 * kWarpgroup] = ptx::mbarrier_wait_for("probe: a phase too early", phase.at, 0, 0);
    ptx::mbarrier_arrive("probe: the last one arrives", phase.at);
  }
  for (uint32_t turn = 0; turn < 2; ++turn) {
    values[thread] = a[thread];
    if (!phase.ends(report, kPhaseEnds, turn)) return;
    out[turn * kWarpgroup + threadIdx.x] = values[kWarpgroup - 1 - thread];
    ptx::block_sync("probe: values are read");
    if (turn == 0) ptx::mbarrier_arrive("probe: all arrive", phase.at);
  }
  report.begins(kDone);
}

// Warpgroups that exchange registers as those of the kernels do: out = the number of each thread.
__global__ void __launch_bounds__(3 * kWarpgroup, 1) probe_registers(uint32_t* out, Report report) {
  report.begins(kExchanged);
  ptx::block_sync("probe: the step is reported");  // no store moves past it
  if (threadIdx.x < kWarpgroup)
    ptx::fewer_registers<24>("probe: registers for others");
  else
    ptx::more_registers<240>("probe: registers of others");
  out[threadIdx.x] = threadIdx.x;
  ptx::block_sync("probe: all have theirs");
  report.begins(kDone);
}

// out = what shared memory has after a warp has stored four matrices. a: 4 words of each lane; b:
// the address of each lane's row.
template <bool transposed>
__global__ void probe_store_matrices(const uint32_t* a, const uint32_t* b, uint32_t* out,
                                     Report report) {
  FA_SHARED_MEMORY(memory);
  report.begins(kBegun);
  const uint32_t* mine = a + 4 * threadIdx.x;
  const uint32_t r[4] = {mine[0], mine[1], mine[2], mine[3]};
  const uint32_t at = ptx::shared_address(memory) + b[threadIdx.x];
  if (transposed)
    ptx::store_matrices_transposed("probe: matrices", at, r);
  else
    ptx::store_matrices("probe: matrices", at, r);
  ptx::warp_sync("probe: matrices are there");
  copy_out(out, reinterpret_cast<const uint32_t*>(memory), 128);
  report.begins(kDone);
}

// Two warpgroups take turns by named barriers: out = the one that had each turn.
__global__ void probe_turns(uint32_t* out, Report report) {
  FA_SHARED_MEMORY(memory);
  auto* next = reinterpret_cast<uint32_t*>(memory);
  const int mine = static_cast<int>(threadIdx.x) / kWarpgroup;
  report.begins(kBegun);
  if (threadIdx.x == 0) *next = 0;
  ptx::block_sync("probe: no turn yet");
  const auto await_turn = [&] { ptx::barrier_sync("probe: my turn", 1 + mine, 2 * kWarpgroup); };
  const auto pass_turn = [&] {
    ptx::barrier_arrive("probe: the other's turn", 2 - mine, 2 * kWarpgroup);
  };
  report.begins(kTurn);
  if (mine == 1) pass_turn();
  for (int turn = 0; turn < 4; ++turn) {
    await_turn();
    if (threadIdx.x % kWarpgroup == 0) {
      out[*next] = static_cast<uint32_t>(mine);
      *next += 1;
    }
    pass_turn();
  }
  if (mine == 0) await_turn();  // the last turn that was passed on
  report.begins(kDone);
}

// What a report says of a wait for what never comes.
__global__ void probe_nothing_arrives(Report report) {
  FA_SHARED_MEMORY(memory);
  report.begins(kBegun);
  const Awaited phase(memory, 1);
  if (phase.ends(report, kPhaseEnds, 0)) report.begins(kDone);
}

// -- launches -------------------------------------------------------------------------------------

template <class... P, class... A>
int start(const char* name, void (*kernel)(P...), int threads, int bytes, void* stream,
          A... arguments) {
  return launch(name, kernel, dim3(1), dim3(static_cast<unsigned>(threads)),
                static_cast<size_t>(bytes), stream, arguments...);
}

template <class Type, bool in_registers, bool a_mn>
int start_products(const FaProbe& p, const Report& report, void* stream) {
  const auto* a = static_cast<const uint32_t*>(p.a);
  const auto* b = static_cast<const uint32_t*>(p.b);
  auto* out = static_cast<float*>(p.out);
  const auto kernel = p.what % 2 ? probe_products<Type, in_registers, a_mn, true>
                                 : probe_products<Type, in_registers, a_mn, false>;
  return start("probe_products", kernel, kWarpgroup, kProductBytes, stream, a, b, out, report);
}
template <class Type>
int start_products_of(const FaProbe& p, const Report& report, void* stream) {
  if (p.what & 8) return start_products<Type, true, false>(p, report, stream);
  return p.what & 2 ? start_products<Type, false, true>(p, report, stream)
                    : start_products<Type, false, false>(p, report, stream);
}

int start_box(const FaProbe& p, const Report& report, void* stream) {
  TensorMap map;
  Sizes sizes;
  for (int i = 0; i < 4; ++i) sizes.size[i] = p.size[i];
  const int failed = encode(map, p.tensor, sizes, kBoxRows);
  const ptx::BoxAt at = {static_cast<int32_t>(p.at[3]), static_cast<int32_t>(p.at[2]),
                         static_cast<int32_t>(p.at[1]), static_cast<int32_t>(p.at[0])};
  const auto* a = static_cast<const uint32_t*>(p.a);
  if (failed) return checked(failed, "cuTensorMapEncodeTiled");
  if (p.what == kStoreBox)
    return start("probe_store_box", probe_store_box, kWarpgroup, kBoxBytes, stream, map, at, a,
                 report);
  return start("probe_load_box", probe_load_box, kWarpgroup, kBoxBytes + kAwaitedBytes, stream, map,
               at, a, static_cast<uint32_t*>(p.out), report);
}

int probe(const FaProbe& p, void* stream) {
  const Report report = {static_cast<uint32_t*>(p.report), static_cast<uint64_t>(p.nanoseconds)};
  const auto* a = static_cast<const uint32_t*>(p.a);
  const auto* b = static_cast<const uint32_t*>(p.b);
  auto* out = static_cast<uint32_t*>(p.out);
  if (p.what < kLoadBox)
    return p.what & 16 ? start_products_of<ptx::F16>(p, report, stream)
                       : start_products_of<ptx::BF16>(p, report, stream);
  constexpr int kBytes = kBoxBytes + kAwaitedBytes, kPhaseBytes = kWarpgroup * 4 + kAwaitedBytes;
  switch (p.what) {
    case kLoadBox:
    case kStoreBox:
      return start_box(p, report, stream);
    case kLoadBytes:
      return start("probe_load_bytes", probe_load_bytes, kWarpgroup, kBytes, stream, a, b, out,
                   report);
    case kAddBytes:
      return start("probe_add_bytes", probe_add_bytes, kWarpgroup, kBoxBytes, stream, a,
                   static_cast<float*>(p.out), report);
    case kPhases:
      return start("probe_phases", probe_phases, kWarpgroup, kPhaseBytes, stream, a, out, report);
    case kRegisters:
      return start("probe_registers", probe_registers, 3 * kWarpgroup, 0, stream, out, report);
    case kStoreMatrices:
      return start("probe_store_matrices", probe_store_matrices<false>, 32, 512, stream, a, b, out,
                   report);
    case kStoreMatricesTransposed:
      return start("probe_store_matrices", probe_store_matrices<true>, 32, 512, stream, a, b, out,
                   report);
    case kTurns:
      return start("probe_turns", probe_turns, 2 * kWarpgroup, 16, stream, out, report);
    case kNothingArrives:
      return start("probe_nothing_arrives", probe_nothing_arrives, kWarpgroup, kAwaitedBytes,
                   stream, report);
  }
  return checked(cudaErrorInvalidValue, "probe");
}

}  // namespace sm90
}  // namespace fa

extern "C" FA_EXPORT int64_t fa_cuda_probe_sm90(const FaProbe* p, void* stream) {
  return fa::sm90::probe(*p, stream);
}
