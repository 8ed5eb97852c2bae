// Copies from shared memory by bulk: boxes of tensors, contiguous bytes, and sums of float32. A
// group has read its sources when a thread waits for that (.read), and has written when it waits
// for all. Lazily both happen as late as that, or when the thread exits.
#include <algorithm>

#include "block.h"

namespace emu {

namespace {

float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

void read(Bulk& bulk) {
  if (!bulk.data.empty()) return;
  for (const BoxRow& row : bulk.rows) {
    std::vector<unsigned char>& bytes = bulk.data.emplace_back(static_cast<size_t>(row.bytes));
    const uint32_t first = row.shared + static_cast<uint32_t>(row.first);
    for (uint32_t i = 0; i < bytes.size(); ++i)
      bytes[i] = block->shared[swizzled(first + i, bulk.span) - kWindow];
  }
}

// Adds what global memory holds. The ISA: to nearest even, and subnormal numbers are zeros.
bool add(std::vector<unsigned char>& bytes, const BoxRow& row) {
  std::vector<unsigned char> before(bytes.size());
  if (!copied(before.data(), row.global(), row.bytes, false)) return false;
  for (size_t i = 0; i < bytes.size(); i += 4) {
    float x, y;
    std::memcpy(&x, &bytes[i], 4);
    std::memcpy(&y, &before[i], 4);
    x = flushed(flushed(x) + flushed(y));
    std::memcpy(&bytes[i], &x, 4);
  }
  return true;
}

void write(Bulk& bulk) {
  if (bulk.done) return;
  read(bulk);
  bulk.done = true;
  for (size_t i = 0; i < bulk.rows.size(); ++i) {
    const BoxRow& row = bulk.rows[i];
    if ((bulk.adds && !add(bulk.data[i], row)) ||
        !copied(row.global(), bulk.data[i].data(), row.bytes, true))
      found(std::string(bulk.site) + ": " + std::to_string(row.bytes) +
            " bytes that are no memory");
  }
}

// The proxy knows of what fences covered. It adds atomically, for the device.
void note(const Bulk& bulk) {
  const Fiber& by = current();
  const Agents& agents = block->agents;
  const Clocks known = by.clocks.of_async_proxy(by.clocks.proxied, agents.proxied());
  Step reads = by.step(bulk.site);
  reads.clock = by.bulk.committed + 1;
  Step writes = reads;
  reads.agent = agents.bulk_reads(by.id);
  writes.agent = agents.bulk_writes(by.id);
  for (const BoxRow& row : bulk.rows) {
    const uint32_t first = row.shared + static_cast<uint32_t>(row.first);
    const uint32_t end = first + static_cast<uint32_t>(row.bytes);
    for (uint32_t at = first, next; at < end; at = next) {
      next = std::min(end, (at / 16 + 1) * 16);
      note_proxied_read(swizzled(at, bulk.span), static_cast<int>(next - at), reads, known);
    }
    if (row.bytes)
      note_proxied_target(row.global(), static_cast<int>(row.bytes), bulk.adds, writes, by.clocks);
  }
}

void begin(Bulk bulk, uint32_t from, uint32_t bytes) {
  shared_pointer(from, 16);
  shared_pointer(from + bytes - 16, 16);
  note(bulk);
  if (!options.lazy) write(bulk);
  current().bulk.issued.push_back(std::move(bulk));
}

}  // namespace

void bulk_bytes(const char* site, void* to, uint32_t from, uint32_t bytes, bool adds) {
  if (skipped(site)) return;
  const auto address = reinterpret_cast<uintptr_t>(to);
  if (!bytes || (bytes | from | address) % 16)
    fail("%s: %u bytes from %u to %p, expected multiples of 16", site, bytes, from, to);
  if (!is_global(to)) fail("%s: its target, %p, is not in global memory", site, to);
  begin({site, adds, 1, {{from, address, 0, int64_t{bytes}}}, {}}, from, bytes);
}

void bulk_box(const char* site, const void* map, int rank, const int32_t* at, uint32_t from) {
  if (skipped(site)) return;
  const TensorMap of = map_at(site, map, rank);
  if (from % 128) fail("%s: its source, %u, is no multiple of 128", site, from);
  begin({site, false, 1u << of.swizzle, rows_of(of, at, from), {}}, from,
        static_cast<uint32_t>(box_bytes(of)));
}

void bulk_commit(const char* site) {
  if (skipped(site)) return;
  BulkGroups& mine = current().bulk;
  mine.pending.push_back(std::move(mine.issued));
  mine.issued.clear();
  mine.committed++;
}

void bulk_wait(const char* site, int pending, bool reads_only) {
  if (skipped(site)) return;
  Fiber& fiber = current();
  BulkGroups& mine = fiber.bulk;
  const auto left = static_cast<Clock>(pending);
  const Clock over = mine.committed > left ? mine.committed - left : 0;
  Clock group = mine.committed - static_cast<Clock>(mine.pending.size());
  for (auto& bulks : mine.pending)
    if (group++ < over)
      for (Bulk& bulk : bulks) reads_only ? read(bulk) : write(bulk);
  mine.read = std::max(mine.read, over);
  fiber.clocks.learn(block->agents.bulk_reads(fiber.id), mine.read);
  if (reads_only) return;
  while (mine.committed - static_cast<Clock>(mine.pending.size()) < over) mine.pending.pop_front();
  fiber.clocks.learn(block->agents.bulk_writes(fiber.id),
                     mine.committed - static_cast<Clock>(mine.pending.size()));
}

void bulk_end() {
  BulkGroups& mine = current().bulk;
  if (!mine.issued.empty()) fail("exits with bulk copies that no group holds");
  Clock group = mine.committed - static_cast<Clock>(mine.pending.size());
  for (auto& bulks : mine.pending) {
    const bool was_read = group++ < mine.read;
    for (Bulk& bulk : bulks) {
      if (!was_read) fail("%s: its thread exits before it has read shared memory", bulk.site);
      write(bulk);
    }
  }
  mine.pending.clear();
}

}  // namespace emu
