// The small kernels beside the backward pass: delta of every row, and the gradient of the sinks.
// The kernels of sm90 have the same bodies, with states of another form.
#pragma once
#include "../launch.h"
#include "semaphore.cuh"

namespace fa {
namespace sm80 {

constexpr int kRowThreads = 128;

// The sum over the lanes of a warp, in one order.
FA_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int flip = 16; flip; flip /= 2) x += ptx::shuffle_xor(x, flip);
  return x;
}

// What the backward kernels of this folder read: as it is, of tiles of kTile rows at most.
struct StateForm {
  static constexpr int kTile = kRowsOfTiles;
  static FA_DEVICE RowState of(const FaParams&, Normaliser from, float minus_delta) {
    return {from.level, from.rest, minus_delta};
  }
};

// The states of all rows: their normalisers, and delta[b, h, i] = sum over d of dout * out, less
// dlse, which is subtracted from every dp of the row. 0 if there is no output. A warp for each row.
template <class Type, bool general, class Form>
FA_DEVICE void put_states(const FaParams& batch, float* workspace) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * (kRowThreads / 32) + warp;
  const int64_t rows = padded_rows(batch, Form::kTile);
  const int64_t i = at % rows, h = at / rows % batch.H, b = at / rows / batch.H;
  const Item p(batch, b);
  const Turns turns(workspace);  // none is taken yet
  if (at == 0) turns.clear(batch);
  if (i >= padded_rows(p, Form::kTile)) return;  // another item is longer
  if (lane == 0) turns.clear(item_begins(p, b, h, Form::kTile) + i);
  const RowStates states(p, workspace, b, h, Form::kTile);
  if (i >= p.M) {
    if (lane == 0) states.set(i, Form::of(p, {INFINITY, 0.0f}, 0.0f));
    return;
  }
  const auto row_of = [&](const FaTensor& x) {
    return static_cast<const uint16_t*>(x.data) + b * x.stride[0] + h * x.stride[1] +
           i * x.stride[2];
  };
  const uint16_t *out = row_of(p.out), *dout = row_of(p.dout);
  float sum = 0.0f;
  for (int64_t d = lane; d < p.Dv; d += 32)
    sum = fmaf(ptx::widen(Type(), out[d * p.out.stride[3]]),
               ptx::widen(Type(), dout[d * p.dout.stride[3]]), sum);
  sum = warp_sum(sum);
  if (p.dlse.data) {
    const int64_t* stride = p.dlse.stride;
    sum -= read(p.dlse, b * stride[0] + h * stride[1] + i * stride[2]);
  }
  if (lane == 0) states.set(i, Form::of(p, Normalisers(p, b, h).at<general>(i), -sum));
}

template <class Type, bool general>
__global__ void __launch_bounds__(kRowThreads)
    delta_kernel(const FaParams batch, float* workspace) {
  put_states<Type, general, StateForm>(batch, workspace);
}

// dsinks[h] = - sum over b and i of exp(sink - normaliser) delta: the sink is a key without a
// value. A block for each head, in a packed batch for each head of every item; it adds in one
// order.
template <int threads, class Form>
FA_DEVICE void put_sink_gradient(const FaParams& batch, float* workspace) {
  FA_SHARED_MEMORY(memory);
  auto* sums = reinterpret_cast<float*>(memory);
  const int64_t h = blockIdx.x % batch.H, first = blockIdx.x / batch.H;
  const Item p(batch, first);
  const int thread = static_cast<int>(threadIdx.x);
  const float sink = read(p.sinks, h * p.sinks.stride[1]);
  float sum = 0.0f;
  for (int64_t at = thread; at < (p.cu_q ? 1 : p.B) * p.M; at += threads) {
    const int64_t b = first + at / p.M, i = at % p.M;
    const Normaliser normaliser = Normalisers(p, b, h).at<true>(i);
    if (normaliser.level == INFINITY || sink == -INFINITY) continue;
    const float minus_delta = RowStates(p, workspace, b, h, Form::kTile).at(kMinusDelta, i);
    sum += probability<true>(sink, normaliser, kLog2e) * minus_delta;
  }
  sum = warp_sum(sum);
  if (thread % 32 == 0) sums[thread / 32] = sum;
  ptx::block_sync("sinks: every warp has its sum");
  if (thread != 0) return;
  float total = 0.0f;
  for (int warp = 0; warp < threads / 32; ++warp) total += sums[warp];
  static_cast<float*>(p.dsinks.data)[first * p.dsinks.stride[0] + h * p.dsinks.stride[1]] = total;
}

template <int threads>
__global__ void __launch_bounds__(threads)
    sink_gradient_kernel(const FaParams batch, float* workspace) {
  put_sink_gradient<threads, StateForm>(batch, workspace);
}

template <class Form, class Kernel>
int start_states(Kernel kernel, const FaParams& p, float* workspace, void* stream) {
  constexpr int warps = kRowThreads / 32;
  static_assert(Form::kTile % warps == 0, "blocks would be left over");
  return launch_blocks("delta_kernel", kernel, p.B * p.H * padded_rows(p, Form::kTile) / warps,
                       kRowThreads, 0, stream, p, workspace);
}

template <class Kernel>
int start_sinks(Kernel kernel, const FaParams& p, float* workspace, void* stream) {
  const int64_t blocks = p.cu_q ? p.B * p.H : p.H;
  return launch_blocks("sink_gradient_kernel", kernel, blocks, kRowThreads,
                       sizeof(float) * (kRowThreads / 32), stream, p, workspace);
}

template <class Type, bool general>
int start_delta(const FaParams& p, float* workspace, void* stream) {
  return start_states<StateForm>(delta_kernel<Type, general>, p, workspace, stream);
}

// A template, so that sources of sm90, which include this, have no instance.
template <int rows = kRowThreads>
int start_sink_gradient(const FaParams& p, float* workspace, void* stream) {
  return start_sinks(sink_gradient_kernel<rows>, p, workspace, stream);
}

}  // namespace sm80
}  // namespace fa
