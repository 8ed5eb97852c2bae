// The small kernels beside the backward pass: delta of every row, and the gradient of the sinks.
// The kernels of sm90 have the same bodies, with states of another form.
#pragma once
#include "../launch.h"
#include "semaphore.cuh"

namespace fa {
namespace sm80 {

constexpr int kRowThreads = 128, kRowLanes = 4;

// The sum over so many adjacent lanes of a warp, in one order.
template <int lanes = 32>
FA_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int flip = lanes / 2; flip; flip /= 2) x += ptx::shuffle_xor(x, flip);
  return x;
}

// What the backward kernels of this folder read: as it is, of tiles of kTile rows at most.
struct StateForm {
  static constexpr int kTile = kRowsOfTiles;
  static FA_DEVICE RowState of(const FaParams&, Normaliser from, float minus_delta) {
    return {from.level, from.rest, minus_delta};
  }
};

// Are the rows of x at multiples of 16 bytes, with adjacent columns?
FA_DEVICE bool in_chunks(const FaTensor& x, int64_t columns) {
  const int64_t* stride = x.stride;
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && stride[3] == 1 &&
         (stride[0] | stride[1] | stride[2] | columns) % 8 == 0;
}

// A lane's part of the product of two rows: every kRowLanes-th chunk of 16 bytes from its own on, two
// of each row at a time, so that more bytes are on their way; else single elements.
template <class Type>
FA_DEVICE float row_product(const uint16_t* x, const uint16_t* y, const FaTensor& of_x,
                            const FaTensor& of_y, int columns, int lane) {
  float sum = 0.0f;
  const auto add = [&](uint16_t a, uint16_t b) {
    sum = fmaf(ptx::widen(Type(), a), ptx::widen(Type(), b), sum);
  };
  if (!in_chunks(of_x, columns) || !in_chunks(of_y, columns)) {
    for (int d = lane; d < columns; d += kRowLanes)
      add(x[d * of_x.stride[3]], y[d * of_y.stride[3]]);
    return sum;
  }
  const auto *xs = reinterpret_cast<const uint4*>(x), *ys = reinterpret_cast<const uint4*>(y);
  const int chunks = columns / 8;
  for (int chunk = lane; chunk < chunks; chunk += 2 * kRowLanes) {
    const bool two = chunk + kRowLanes < chunks;
    const int next = two ? chunk + kRowLanes : chunk;
    const uint4 a[2] = {xs[chunk], xs[next]}, b[2] = {ys[chunk], ys[next]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && !two) break;
      const uint32_t as[] = {a[i].x, a[i].y, a[i].z, a[i].w};
      const uint32_t bs[] = {b[i].x, b[i].y, b[i].z, b[i].w};
#pragma unroll
      for (int j = 0; j < 8; ++j)
        add(static_cast<uint16_t>(as[j / 2] >> j % 2 * 16),
            static_cast<uint16_t>(bs[j / 2] >> j % 2 * 16));
    }
  }
  return sum;
}

// How many blocks of so many rows each head has.
template <unsigned rows>
FA_SHARED int64_t blocks_of_rows(const FaParams& p, int64_t tile) {
  return (padded_rows(p, tile) + rows - 1) / rows;
}

// The states of all rows: their normalisers, and delta[b, h, i] = sum over d of dout * out, less
// dlse, which is subtracted from every dp of the row. 0 if there is no output. kRowLanes lanes for
// each row.
template <class Type, bool general, class Form>
FA_DEVICE void put_states(const FaParams& batch, float* workspace) {
  constexpr unsigned kRows = kRowThreads / kRowLanes;  // of a block, all of one head
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const auto blocks = static_cast<unsigned>(blocks_of_rows<kRows>(batch, Form::kTile));
  const auto heads = static_cast<unsigned>(batch.H);
  const int64_t h = blockIdx.x / blocks % heads, b = blockIdx.x / blocks / heads;
  const int64_t i = int64_t{blockIdx.x % blocks} * kRows + threadIdx.x / kRowLanes;
  const Item p(batch, b);
  const Turns turns(workspace);  // none is taken yet
  if (blockIdx.x == 0 && threadIdx.x < 32) turns.clear(batch);
  const bool padded = i < padded_rows(p, Form::kTile);  // else another item is longer
  const bool exists = padded && i < p.M;
  float sum = 0.0f, dlse = 0.0f;
  Normaliser normaliser = {INFINITY, 0.0f};
  if (exists && lane == 0) {  // on their way together with the rows
    normaliser = Normalisers(p, b, h).at<general>(i);
    const int64_t* stride = p.dlse.stride;
    if (p.dlse.data) dlse = read(p.dlse, b * stride[0] + h * stride[1] + i * stride[2]);
  }
  if (exists) {
    const auto row_of = [&](const FaTensor& x) {
      return static_cast<const uint16_t*>(x.data) + b * x.stride[0] + h * x.stride[1] +
             i * x.stride[2];
    };
    sum = row_product<Type>(row_of(p.out), row_of(p.dout), p.out, p.dout, static_cast<int>(p.Dv),
                            lane);
  }
  sum = warp_sum<kRowLanes>(sum);
  if (!padded || lane != 0) return;
  turns.clear(item_begins(p, b, h, Form::kTile) + i);
  const RowStates states(p, workspace, b, h, Form::kTile);
  states.set(i, Form::of(p, normaliser, exists ? dlse - sum : 0.0f));
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
  const int64_t blocks = p.B * p.H * blocks_of_rows<kRowThreads / kRowLanes>(p, Form::kTile);
  return launch_blocks("delta_kernel", kernel, blocks, kRowThreads, 0, stream, p, workspace);
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
