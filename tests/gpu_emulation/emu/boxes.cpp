// Copies to shared memory by bulk (cp.async.bulk): boxes of tensors, and contiguous bytes. A copy
// lands at any time after it was asked for; until then its target holds NaN.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "block.h"

namespace emu {

std::vector<BoxRow> rows_of(const TensorMap& map, const int32_t* at, uint32_t shared) {
  const int bytes = bytes_of(map);
  uint32_t rows = 1;
  for (int i = 1; i <= map.rank; ++i) rows *= map.box[i];
  std::vector<BoxRow> found;
  for (uint32_t row = 0; row < rows; ++row) {
    auto address = map.address;
    bool inside = true;
    for (uint32_t i = 1, rest = row; i <= map.rank; rest /= map.box[i++]) {
      const int64_t of = at[i] + int64_t{rest % map.box[i]};
      inside &= of >= 0 && of < map.dims[i];
      address += static_cast<uint64_t>(of) * map.strides[i - 1];
    }
    const int64_t first = std::max<int64_t>(0, -int64_t{at[0]});
    const int64_t end = std::min<int64_t>(map.box[0], int64_t{map.dims[0]} - at[0]);
    found.push_back({shared + row * map.box[0] * static_cast<uint32_t>(bytes),
                     address + static_cast<uint64_t>((at[0] + first) * bytes), first * bytes,
                     inside && end > first ? (end - first) * bytes : 0});
  }
  return found;
}

bool copied(void* to, const void* from, int64_t bytes, bool writes) {
  iovec target{to, static_cast<size_t>(bytes)};
  iovec source{const_cast<void*>(from), static_cast<size_t>(bytes)};
  const ssize_t done = !bytes   ? 0
                       : writes ? process_vm_writev(getpid(), &source, 1, &target, 1, 0)
                                : process_vm_readv(getpid(), &target, 1, &source, 1, 0);
  if (done == bytes) return true;
  if (done >= 0 || errno == EFAULT) return false;
  std::memcpy(to, from, static_cast<size_t>(bytes));  // where that call is not allowed
  return true;
}

namespace {

void land(const Box& box) {
  std::vector<unsigned char> row(box.map.box[0] * static_cast<size_t>(bytes_of(box.map)));
  for (const BoxRow& of : rows_of(box.map, box.at, box.to)) {
    std::fill(row.begin(), row.end(), 0);
    if (!copied(row.data() + of.first, of.global(), of.bytes, false))
      found(std::string(box.site) + ": " + std::to_string(of.bytes) + " bytes that are no memory");
    for (uint32_t i = 0; i < row.size(); ++i)
      block->shared[swizzled(of.shared + i, 1u << box.map.swizzle) - kWindow] = row[i];
  }
  bytes_arrive(box.site, box.arrives, box_bytes(box.map));
}

// Begins a copy; its addresses are right.
void begin(const Box& box) {
  const auto bytes = static_cast<uint32_t>(box_bytes(box.map));
  shared_pointer(box.to + bytes - 16, 16);
  const Fiber& by = current();
  Step step = by.step(box.site);
  step.agent = block->agents.arrivals(box.arrives.index);
  step.clock = box.arrives.phase + 1;
  note_proxied_write(box.to, static_cast<int>(bytes), step, by.clocks);
  const Clocks known = by.clocks.of_async_proxy(by.clocks.proxied_global, block->agents.proxied());
  for (const BoxRow& of : rows_of(box.map, box.at, box.to))
    if (of.bytes) note_proxied_source(of.global(), static_cast<int>(of.bytes), step, known);
  block->proxy.arrivals[{box.arrives.index, box.arrives.phase}] = box.site;
  if (!options.lazy) return land(box);
  std::memset(shared_pointer(box.to, 16), 0xFF, bytes);
  block->proxy.boxes.push_back(box);
}

}  // namespace

void load_box(const char* site, uint32_t to, const void* map, int rank, const int32_t* at,
              uint32_t mbarrier) {
  if (skipped(site)) return;
  Box box = {site, map_at(site, map, rank), {}, to, mbarrier_arrival(site, mbarrier)};
  std::copy(at, at + rank, box.at);
  if (to % 128) fail("%s: its target, %u, is no multiple of 128", site, to);
  begin(box);
}

// As a box of a tensor that has one row of these bytes.
void load_bytes(const char* site, uint32_t to, const void* from, uint32_t bytes,
                uint32_t mbarrier) {
  if (skipped(site)) return;
  const auto address = reinterpret_cast<uintptr_t>(from);
  if (!bytes || (bytes | to | address) % 16)
    fail("%s: %u bytes from %p to %u, expected multiples of 16", site, bytes, from, to);
  if (!is_global(from)) fail("%s: its source, %p, is not in global memory", site, from);
  TensorMap map = {};
  map.address = address;
  map.dims[0] = map.box[0] = bytes;
  begin({site, map, {}, to, mbarrier_arrival(site, mbarrier)});
}

void land_box() {
  std::vector<Box>& boxes = block->proxy.boxes;
  Box& chosen = boxes[block->random() % boxes.size()];
  const Box lands = chosen;
  chosen = boxes.back();
  boxes.pop_back();
  land(lands);
}

void boxes_end() {
  while (!block->proxy.boxes.empty()) land_box();
  for (const auto& [phase, site] : block->proxy.arrivals) {
    const Step end = {block->number, phase.second + 1, block->agents.arrivals(phase.first), false,
                      false, ""};
    const auto waited = [&](const Fiber& fiber) { return fiber.clocks.know(end); };
    if (std::none_of(block->fibers.begin(), block->fibers.end(), waited))
      return found("ends with bulk copies in flight: no thread has waited for those of " +
                   std::string(site));
  }
}

}  // namespace emu
