// Products that accumulate in tensor memory (tcgen05.mma). They run at any time between their issue
// and the end of a commit, those of one thread and accumulator in order: lazily at its end.
#include <algorithm>

#include "tensor.h"

namespace emu {

namespace {

// The instruction's descriptor, as CUTLASS's UMMA::InstrDescriptor has it.
struct Shape {
  Element element;
  uint32_t rows, columns;
  bool a_across, b_across;
  int sign;
};

Shape shape_of(const char* site, const TensorProduct& product) {
  const uint32_t bits = product.instruction;
  const auto field = [&](int first, int count) { return bits >> first & ((1u << count) - 1); };
  constexpr uint32_t kOthers = 1u << 6 | 1u << 23 | 1u << 29;
  if (field(0, 4) || field(30, 2) || bits & kOthers)
    fail("%s: instruction descriptor 0x%x, expected no sparsity, saturation, shift or reserved bit",
         site, bits);
  const uint32_t d = field(4, 2), a = field(7, 3), b = field(10, 3);
  if (d != 1 || a != b || (product.tf32 ? a != 2 : a > 1))
    fail("%s: instruction descriptor 0x%x has formats %u, %u and %u of D, A and B, expected float32, and "
         "of A and B %s", site, bits, d, a, b, product.tf32 ? "tf32" : "float16 or bfloat16, one for both");
  const Element element = product.tf32 ? Element::kTf32 : a ? Element::kBfloat16 : Element::kFloat16;
  const Shape found{element, field(24, 5) * 16, field(17, 6) * 8, field(15, 1) != 0, field(16, 1) != 0,
                    field(13, 1) != field(14, 1) ? -1 : 1};
  const uint32_t multiple = found.rows == 64 ? 8 : 16;
  if ((found.rows != 64 && found.rows != 128) || !found.columns || found.columns > 256 ||
      found.columns % multiple)
    fail("%s: %u x %u, expected 64 rows and a multiple of 8 columns, or 128 and of 16, up to 256", site,
         found.rows, found.columns);
  if (product.tf32 && (found.a_across || found.b_across))
    fail("%s: tf32 that does not lie along k, which is not known here", site);
  if (product.a_in_tensor_memory && found.a_across)
    fail("%s: A in tensor memory, expected along k", site);
  return found;
}

Matrix matrix_of_operand(const char* site, uint64_t descriptor, bool across) {
  constexpr uint32_t kSpans[] = {1, 0, 8, 0, 4, 0, 2, 0};
  if ((descriptor >> 46 & 7) != 1)
    fail("%s: descriptor 0x%llx, expected 1 in bits 46 to 48", site,
         static_cast<unsigned long long>(descriptor));
  const uint32_t span = kSpans[descriptor >> 61];
  if (!span)
    fail("%s: descriptor 0x%llx has swizzle %u, expected 0, 2, 4 or 6", site,
         static_cast<unsigned long long>(descriptor), static_cast<uint32_t>(descriptor >> 61));
  return matrix_of(site, descriptor, 7ull << 61 | 7ull << 46, span, across);
}

TensorPlace place_at(const char* site, uint32_t at, uint32_t rows, uint32_t columns) {
  const TensorPlace found{at >> 16, at & 0xFFFF, rows, columns};
  if (found.lane && !(rows == 64 && found.lane == 16))
    fail("%s: lane %u, expected 0%s", site, found.lane, rows == 64 ? " or 16" : "");
  expect_allocated(site, found.column, columns);
  return found;
}

TensorWarp& mine() { return tensor_memory().warps[size_t(self->warp)]; }

// Products of one thread follow each other if they add to one accumulator in one shape; otherwise
// nothing orders them but a wait.
void expect_in_order(const TensorMultiplication& product, Clock known) {
  std::vector<TensorMultiplication>& recent = mine().recent;
  recent.erase(std::remove_if(recent.begin(), recent.end(), [&](const auto& x) { return x.clock <= known; }),
               recent.end());
  for (const TensorMultiplication& other : recent) {
    const bool same = other.d == product.d && other.element == product.element;
    const bool clash = (!same && other.d.overlaps(product.d)) || other.d.overlaps(product.a) ||
                       other.a.overlaps(product.d);
    if (options.check && clash)
      return found(std::string(product.site) + ": NOT IN ORDER with " + other.site +
                   ", which is in flight in a part of the same columns of tensor memory");
  }
  recent.push_back(product);
}

void note(const TensorMultiplication& product, const Fiber& by, Clocks known) {
  const uint16_t agent = block->agents.tensor(kTensorProducts, by.warp);
  Step step = by.step(product.site);
  step.agent = agent;
  step.clock = product.clock;
  // Bounds are checked even if races are not.
  const Clocks of_shared = by.clocks.of_async_proxy(by.clocks.proxied, block->agents.proxied());
  const auto note_shared = [&](uint32_t address, int, int) {
    shared_pointer(address, 16);
    note_proxied_read(address, 16, step, of_shared);
  };
  const int rows = static_cast<int>(product.d.rows), columns = static_cast<int>(product.d.columns);
  if (!product.a.columns) each_chunk(product.a_shared, product.element, 0, rows, note_shared);
  each_chunk(product.b, product.element, 0, columns, note_shared);
  if (!options.check) return;
  Shadow& shadow = *tensor_memory().shadow;
  if (product.a.columns)
    for (uint32_t row = 0; row < product.a.rows; ++row)
      shadow.read(in_tensor_memory(product.a.lane_of(row), product.a.column),
                  4 * static_cast<int>(product.a.columns), step, known);
  known.learn(agent, ~Clock{0});  // expect_in_order has looked at them
  for (uint32_t row = 0; row < product.d.rows; ++row) {
    const uintptr_t at = in_tensor_memory(product.d.lane_of(row), product.d.column);
    if (product.add) shadow.read(at, 4 * columns, step, known);
    shadow.write(at, 4 * columns, step, known);
  }
}

// A as rows of k: element (i, k) at k * rows + i.
std::vector<float> a_of(const TensorMultiplication& product) {
  const int rows = static_cast<int>(product.d.rows);
  if (!product.a.columns) return read(product.a_shared, product.element, 0, rows);
  const int depth = depth_of(product.element), bytes = bytes_of(product.element);
  std::vector<float> values(size_t(rows * depth));
  for (int row = 0; row < rows; ++row) {
    const size_t cell = tensor_cell(product.a.lane_of(static_cast<uint32_t>(row)), product.a.column);
    const auto* from = reinterpret_cast<const unsigned char*>(&tensor_memory().cells[cell]);
    for (int k = 0; k < depth; ++k)
      values[size_t(k * rows + row)] = value_of(from + k * bytes, product.element);
  }
  return values;
}

void multiply(const TensorMultiplication& product) {
  const size_t columns = product.d.columns;
  const std::vector<float> a = a_of(product);
  const std::vector<float> b = read(product.b, product.element, 0, static_cast<int>(columns));
  std::vector<float> sums(columns);
  report.multiplies++;
  for (uint32_t row = 0; row < product.d.rows; ++row) {
    uint32_t* const cells =
        &tensor_memory().cells[tensor_cell(product.d.lane_of(row), product.d.column)];
    std::fill(sums.begin(), sums.end(), 0.0f);
    if (product.add) std::memcpy(sums.data(), cells, 4 * columns);
    add_products(sums, a.data() + row, static_cast<int>(product.d.rows), depth_of(product.element),
                 product.sign, b.data());
    std::memcpy(cells, sums.data(), 4 * columns);
  }
}

// The next commit of a warp lands: its products are computed.
void land(TensorWarp& warp) {
  const TensorCommit commit = std::move(warp.commits.front());
  warp.commits.pop_front();
  for (; !warp.products.empty() && warp.products.front().clock <= commit.clock; warp.products.pop_front())
    if (options.lazy) multiply(warp.products.front());
  warp.over[kTensorProducts] = commit.clock;
  arrival_lands(commit.site, commit.arrives, commit.of);
}

}  // namespace

void tensor_multiply(const char* site, const TensorProduct& given) {
  const Shape shape = shape_of(site, given);
  TensorMultiplication product{};
  product.site = site;
  product.element = shape.element;
  product.d = place_at(site, given.d, shape.rows, shape.columns);
  if (given.a_in_tensor_memory) {
    product.a = place_at(site, static_cast<uint32_t>(given.a), shape.rows, 32 / 4);
    if (product.a.lane != product.d.lane)
      fail("%s: A in lane %u, D in lane %u, expected one", site, product.a.lane, product.d.lane);
  } else {
    product.a_shared = matrix_of_operand(site, given.a, shape.a_across);
  }
  product.b = matrix_of_operand(site, given.b, shape.b_across);
  product.sign = shape.sign;
  product.add = given.add;
  product.lane = self->lane;
  product.clock = mine().committed + 1;
  const Clocks known = known_of_tensor_memory(current());
  const uint16_t agent = block->agents.tensor(kTensorProducts, self->warp);
  expect_in_order(product, agent < known.own.size() ? known.own[agent] : 0);
  note(product, current(), known);
  mine().products.push_back(product);
  if (!options.lazy) return multiply(product);
  if (product.add) return;
  for (uint32_t row = 0; row < product.d.rows; ++row)
    std::fill_n(&tensor_memory().cells[tensor_cell(product.d.lane_of(row), product.d.column)],
                product.d.columns, ~0u);
}

void tensor_commit(const char* site, uint32_t mbarrier) {
  if (skipped(site)) return;
  TensorWarp& warp = mine();
  for (const TensorMultiplication& each : warp.products)
    if (each.clock > warp.committed && each.lane != self->lane)
      fail("%s: lane %d commits what lane %d of its warp issued, expected the same thread", site,
           self->lane, each.lane);
  TensorCommit commit{site, mbarrier_arrival(site, mbarrier), {}, ++warp.committed};
  // It publishes what this thread knows of tensor memory, as a fence before a synchronisation does.
  const Clocks known = known_of_tensor_memory(current());
  const size_t first = block->agents.tensor(kTensorProducts, 0);
  const size_t agents = kTensorWorks * block->warps.size();
  commit.of.block = block->number;
  for (size_t i = 0; i < agents; ++i)
    if (first + i < known.own.size())
      commit.of.learn(static_cast<uint16_t>(first + i), known.own[first + i]);
  commit.of.learn(block->agents.tensor(kTensorProducts, self->warp), warp.committed);
  commit.of.tensor.assign(commit.of.own.begin() + static_cast<long>(first), commit.of.own.end());
  warp.commits.push_back(std::move(commit));
  if (!options.lazy) land(warp);
}

bool commits_in_flight(const Block& of) {
  if (!of.proxy.tensor) return false;
  const std::vector<TensorWarp>& warps = of.proxy.tensor->warps;
  return std::any_of(warps.begin(), warps.end(), [](const auto& x) { return !x.commits.empty(); });
}

void land_commit() {
  std::vector<TensorWarp*> some;
  for (TensorWarp& warp : tensor_memory().warps)
    if (!warp.commits.empty()) some.push_back(&warp);
  land(*some[block->random() % some.size()]);
}

}  // namespace emu
