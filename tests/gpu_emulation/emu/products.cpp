// Products of warpgroups (wgmma): each of four warps adds 16 rows of A times B to its own
// registers. Products read shared memory, and write registers, at any time between their issue and
// the wait for their group: lazily at its end, and until then the registers hold NaN.
#include <algorithm>

#include "block.h"
#include "operands.h"

namespace emu {

namespace {

constexpr int kRows = 16;  // of a warp
constexpr uint32_t kNan = 0xFFFFFFFFu;

// As wgmma has it: the swizzle is in the last two bits.
Matrix matrix_of_operand(const char* site, uint64_t descriptor, bool across) {
  constexpr uint32_t kSpans[] = {1, 8, 4, 2};
  return matrix_of(site, descriptor, 3ull << 62, kSpans[descriptor >> 62], across);
}

// Lane 4 g + t holds of A the rows g and g + 8, of k two words at a time, or for 32 bits one.
std::vector<float> fragments(const ProductInFlight& product) {
  const Element element = product.of.element;
  std::vector<float> values(static_cast<size_t>(kRows * depth_of(element)));
  const int per_word = 4 / bytes_of(element);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      for (int e = 0; e < per_word; ++e) {
        const int row = lane / 4 + 8 * (i % 2), k = per_word * (lane % 4) + 4 * per_word * (i / 2) + e;
        const auto* word = reinterpret_cast<const unsigned char*>(&product.a[size_t(4 * lane + i)]);
        values[static_cast<size_t>(k * kRows + row)] =
            value_of(word + e * bytes_of(element), element);
      }
  return values;
}

// Adds to `values`, by lane and register: rows g and g + 8, two columns at a time.
void multiply(const ProductInFlight& product, int rank, std::vector<float>& values) {
  const Product& of = product.of;
  const int depth = depth_of(of.element), columns = of.columns, registers = columns / 2;
  const std::vector<float> a = product.a.empty()
      ? read(matrix_of_operand(product.site, of.a_at, of.a_across), of.element, kRows * rank, kRows)
      : fragments(product);
  const std::vector<float> b =
      read(matrix_of_operand(product.site, of.b_at, of.b_across), of.element, 0, columns);
  std::vector<float> row(static_cast<size_t>(columns));
  report.multiplies++;
  for (int i = 0; i < kRows; ++i) {
    const auto register_of = [&](int j) -> float& {
      const int lane = i % 8 * 4 + j % 8 / 2;
      return values[static_cast<size_t>(lane * registers + j / 8 * 4 + i / 8 * 2 + j % 2)];
    };
    for (int j = 0; j < columns; ++j) row[size_t(j)] = of.add ? register_of(j) : 0.0f;
    add_products(row, a.data() + i, kRows, depth, of.a_sign * of.b_sign, b.data());
    for (int j = 0; j < columns; ++j) register_of(j) = row[size_t(j)];
  }
}

// -- order -----------------------------------------------------------------------------------------

Products& products_of_warp() {
  std::vector<Products>& all = block->proxy.products;
  if (all.empty()) all.resize(block->warps.size());
  return all[size_t(self->warp)];
}

bool alike(const Product& x, const Product& y) {
  return (x.a || x.a_at == y.a_at) && x.b_at == y.b_at && x.add == y.add;
}

// Warps of a warpgroup execute the same of these instructions in one order; between them each is
// free.
void count_instruction(const char* site, const Product* product = nullptr) {
  const auto group = static_cast<size_t>(self->warp / 4);
  if (4 * group + 4 > block->warps.size())
    fail("%s: warp %d of %zu, expected one of a whole warpgroup of four", site, self->warp,
         block->warps.size());
  auto& all = block->proxy.instructions;
  if (all.empty()) all.resize(block->warps.size() / 4);
  std::vector<GroupInstruction>& mine = all[group];
  const size_t at = products_of_warp().instructions++;
  if (at == mine.size()) mine.push_back({site, product ? *product : Product{}});
  const GroupInstruction& other = mine[at];
  if (std::strcmp(other.site, site))
    fail("warps of a warpgroup have diverged: warp %d is at %s, another was at %s", self->warp, site,
         other.site);
  if (product && !alike(*product, other.product))
    fail("%s: warps of a warpgroup have different descriptors or scales", site);
}

// Looks at the first lane: the others have the same registers.
bool holds(const Accumulator& accumulator, const uint32_t* at) {
  const auto first = accumulator.registers.begin();
  const auto end = first + static_cast<long>(accumulator.registers.size() / 32);
  return std::find(first, end, at) != end;
}

// The registers that these products add to; earlier products on them may be in flight.
std::shared_ptr<Accumulator> accumulator_of(const char* site, const Product* const* of) {
  auto found = std::make_shared<Accumulator>();
  for (int lane = 0; lane < 32; ++lane)
    found->registers.insert(found->registers.end(), of[lane]->d, of[lane]->d + of[lane]->columns / 2);
  for (const auto& other : products_of_warp().accumulators) {
    if (other->registers == found->registers) return other;
    for (int i = 0; i < of[0]->columns / 2; ++i)
      if (holds(*other, of[0]->d[i])) fail("%s: its registers are in flight in another shape", site);
  }
  for (uint32_t* x : found->registers) {
    found->values.push_back(__uint_as_float(*x));
    *x = kNan;
  }
  products_of_warp().accumulators.push_back(found);
  return found;
}

void end_accumulator(const char* site, Accumulator& mine) {
  for (size_t i = 0; i < mine.registers.size(); ++i) {
    if (*mine.registers[i] != kNan) fail("%s: an accumulator was written in flight", site);
    *mine.registers[i] = __float_as_uint(mine.values[i]);
  }
}

void multiply_once(ProductInFlight& product, int warp) {
  if (!product.multiplied) multiply(product, warp % 4, product.to->values);
  product.multiplied = true;
}

void finish(const ProductInFlight& product) {
  Accumulator& to = *product.to;
  for (size_t i = 0; i < product.a.size(); ++i)
    if (*product.a_registers[i] != product.a[i])
      fail("%s: a register of A was written in flight", product.site);
  if (--to.in_flight) return;
  end_accumulator(product.site, to);
  auto& all = products_of_warp().accumulators;
  for (auto& each : all)
    if (each == product.to) {
      std::swap(each, all.back());
      return all.pop_back();
    }
}

struct Beginning {
  const char* site;
  const Product* product;
};

// All lanes must agree, except on registers.
void expect_one(const char* site, const Product* const* of) {
  for (int lane = 1; lane < 32; ++lane) {
    if (!alike(*of[0], *of[lane]))
      fail("%s: lanes of a warp have different descriptors or scales", site);
  }
  for (int lane = 0; lane < 32; ++lane)
    if (options.check && !of[lane]->ordered)
      return found(std::string(site) + ": NO FENCE: its registers were used since the last wgmma.fence");
}

void note_reads(const char* site, const Product& product) {
  if (!options.check) return;
  // Any lane may issue it, so all must know of the writes to what it reads.
  const Fiber& by = block->fibers[size_t(self->warp) * 32 + block->random() % 32];
  const Clocks known = by.clocks.of_async_proxy(by.clocks.proxied, block->agents.proxied());
  Step step = by.step(site);
  step.agent = block->agents.products(self->warp);
  step.clock = products_of_warp().committed + 1;
  const auto note = [&](uint32_t address, int, int) {
    shared_pointer(address, 16);
    note_proxied_read(address, 16, step, known);
  };
  if (!product.a)
    each_chunk(matrix_of_operand(site, product.a_at, product.a_across), product.element,
               kRows * (self->warp % 4), kRows, note);
  each_chunk(matrix_of_operand(site, product.b_at, product.b_across), product.element, 0, product.columns,
             note);
}

void begin(void** brought, uint32_t) {
  const Product* of[32];
  const char* const site = static_cast<Beginning*>(brought[0])->site;
  for (int lane = 0; lane < 32; ++lane) of[lane] = static_cast<Beginning*>(brought[lane])->product;
  expect_one(site, of);
  count_instruction(site, of[0]);
  note_reads(site, *of[0]);
  ProductInFlight product{site, *of[0], {}, {}, nullptr};
  for (int lane = 0; lane < 32 && of[0]->a; ++lane)
    for (int i = 0; i < 4; ++i) {
      for (const auto& other : products_of_warp().accumulators)
        if (!lane && holds(*other, of[0]->a[i]))
          fail("%s: a register of A is an accumulator in flight", site);
      product.a_registers.push_back(of[lane]->a[i]);
      product.a.push_back(*of[lane]->a[i]);
    }
  product.to = accumulator_of(site, of);
  product.to->in_flight++;
  if (!options.lazy) multiply_once(product, self->warp);
  products_of_warp().issued.push_back(std::move(product));
}

}  // namespace

void products_begin(const char* site, const Product& product) {
  if (skipped(site)) return;
  Beginning mine{site, &product};
  warp_meet(site, ~0u, &mine, begin, site);
}

// Fences and waits are for a whole warp: all of its lanes must be at the same one.
static void together(const char* site, Act act, void* brought = nullptr) {
  warp_meet(site, ~0u, brought, act, site);
}

bool products_fence(const char* site) {
  if (skipped(site)) return false;
  together(site, [](void** brought, uint32_t) { count_instruction(*static_cast<const char**>(brought[0])); },
           &site);
  return true;
}

namespace {

// The products of the four warps of the current warpgroup.
Products* products_of_group() { return &block->proxy.products[size_t(self->warp / 4) * 4]; }

struct Wait {
  const char* site;
  int pending;
  Clock over;  // groups that will be done
};

void commit(void** brought, uint32_t) {
  count_instruction(*static_cast<const char**>(brought[0]));
  Products& mine = products_of_warp();
  mine.pending.push_back(std::move(mine.issued));
  mine.issued.clear();
  mine.committed++;
  for (Products* each = products_of_group(); each < products_of_group() + 4; ++each) {
    for (const int thread : each->waiting) wake(thread);
    each->waiting.clear();
  }
}

void wait(void** brought, uint32_t) {
  count_instruction(static_cast<Wait*>(brought[0])->site);
  const Clock committed = products_of_warp().committed;
  for (int lane = 0; lane < 32; ++lane) {
    auto& told = *static_cast<Wait*>(brought[lane]);
    const auto pending = static_cast<Clock>(told.pending);
    told.over = committed > pending ? committed - pending : 0;
  }
}

// Finishes groups up to `over`: all four warps' products are computed, and this one gets its
// registers.
void finish_groups(Clock over) {
  for (int warp = self->warp / 4 * 4; warp < self->warp / 4 * 4 + 4; ++warp) {
    Products& each = block->proxy.products[size_t(warp)];
    Clock group = each.committed - static_cast<Clock>(each.pending.size());
    for (auto& products : each.pending)
      if (group++ < over)
        for (ProductInFlight& product : products) multiply_once(product, warp);
  }
  Products& mine = products_of_warp();
  while (mine.committed - static_cast<Clock>(mine.pending.size()) < over) {
    for (const ProductInFlight& product : mine.pending.front()) finish(product);
    mine.pending.pop_front();
  }
}

}  // namespace

void products_commit(const char* site) {
  if (skipped(site)) return;
  together(site, commit, &site);
}

// A group belongs to the whole warpgroup: a thread that waits for it waits for four warps, and then
// knows of their products. (FlashAttention-3 hands a stage back by one thread of 128.)
void products_wait(const char* site, int pending) {
  if (skipped(site)) return;
  Wait mine{site, pending, 0};
  together(site, wait, &mine);
  const auto committed = [&] {
    Clock least = mine.over;
    for (int i = 0; i < 4; ++i) least = std::min(least, products_of_group()[i].committed);
    return least;
  };
  while (committed() < mine.over) {
    products_of_warp().waiting.push_back(self->id);
    wait_for(site);
  }
  finish_groups(mine.over);
  Clocks& clocks = current().clocks;
  for (int warp = self->warp / 4 * 4; warp < self->warp / 4 * 4 + 4; ++warp) {
    const uint16_t agent = block->agents.products(warp);
    if (!clocks.know({block->number, mine.over, agent, false, false, ""}))
      clocks.learn(agent, mine.over);
  }
}

void products_end() {
  if (block->proxy.products.empty()) return;
  if (!products_of_warp().accumulators.empty()) fail("exits with products of its warp in flight");
}

void products_all_end() {
  const Proxy& proxy = block->proxy;
  for (size_t warp = 0; warp < 4 * proxy.instructions.size(); ++warp)
    if (const size_t done = proxy.products[warp].instructions, all = proxy.instructions[warp / 4].size();
        done != all)
      return found("warps of a warpgroup have diverged: warp " + std::to_string(warp) + " ends after " +
                   std::to_string(done) + " instructions of products, another after " +
                   std::to_string(all));
}

void async_proxy_fence(const char* site, bool of_shared_alone) {
  if (skipped(site)) return;
  Fiber& fiber = current();
  const auto end = fiber.clocks.own.begin() + block->agents.proxied();
  fiber.clocks.proxied.assign(fiber.clocks.own.begin(), end);
  if (!of_shared_alone) fiber.clocks.proxied_global = fiber.clocks.proxied;
  fiber.clocks.own[size_t(fiber.id)]++;
}

}  // namespace emu
