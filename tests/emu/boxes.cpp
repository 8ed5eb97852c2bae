// Copies of boxes of tensors to shared memory (cp.async.bulk.tensor), and the maps of these
// tensors. A box lands at any time after it was asked for; until then its target holds NaN.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "block.h"

namespace emu {

namespace {
int bytes_of(const TensorMap& map) {
  constexpr uint8_t kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};
  return map.type < sizeof kBytes ? kBytes[map.type] : 0;
}

uint64_t box_bytes(const TensorMap& map) {
  auto bytes = static_cast<uint64_t>(bytes_of(map));
  for (int i = 0; i <= map.rank; ++i) bytes *= map.box[i];
  return bytes;
}

// Why this is not the map of a tensor; empty if it is one.
std::string fault_of(const TensorMap& map) {
  const int bytes = bytes_of(map);
  const auto said = [](const char* what, auto got, const char* expected) {
    return std::string(what) + " " + std::to_string(got) + ", expected " + expected;
  };
  if (map.rank > 4) return said("rank less one", map.rank, "0 to 4");
  if (!bytes) return said("element type", map.type, "0 to 12");
  if (map.interleave || map.fill)
    return "an interleaved layout or a fill with NaN, which are not known here";
  if (map.swizzle > 3) return said("swizzle mode", map.swizzle, "0 to 3");
  if (!map.address || map.address % 16) return said("address", map.address, "a multiple of 16");
  for (int i = 0; i <= map.rank; ++i) {
    if (!map.dims[i]) return said("dimension", map.dims[i], "at least 1");
    if (!map.box[i] || map.box[i] > 256) return said("box", map.box[i], "1 to 256");
    if (map.element_strides[i] != 1) return said("element stride", map.element_strides[i], "1");
  }
  for (int i = 0; i < map.rank; ++i)
    if (map.strides[i] % 16 || map.strides[i] >> 40)
      return said("stride", map.strides[i], "a multiple of 16 below 2^40");
  const uint32_t row = map.box[0] * static_cast<uint32_t>(bytes);
  if (row % 16) return said("bytes of a row of the box", row, "a multiple of 16");
  if (map.swizzle && row != 16u << map.swizzle)
    return said("bytes of a row of a swizzled box", row, "as many as the swizzle has");
  if (const uint64_t bytes = box_bytes(map); bytes > block->shared_bytes)
    return said("bytes of a box", bytes, "no more than there is of shared memory");
  return "";
}

// Visits the rows of a box: target, source, how many bytes precede the tensor's first column, and
// how many are inside the tensor: 0 for a row outside.
template <class Visit>
void each_row(const Box& box, Visit visit) {
  const TensorMap& map = box.map;
  const int bytes = bytes_of(map);
  uint32_t rows = 1;
  for (int i = 1; i <= map.rank; ++i) rows *= map.box[i];
  for (uint32_t row = 0; row < rows; ++row) {
    const auto* source = reinterpret_cast<const unsigned char*>(map.address);
    bool inside = true;
    for (uint32_t i = 1, rest = row; i <= map.rank; rest /= map.box[i++]) {
      const int64_t at = box.at[i] + int64_t{rest % map.box[i]};
      inside &= at >= 0 && at < map.dims[i];
      source += at * static_cast<int64_t>(map.strides[i - 1]);
    }
    const int64_t first = std::max<int64_t>(0, -int64_t{box.at[0]});
    const int64_t end = std::min<int64_t>(map.box[0], int64_t{map.dims[0]} - box.at[0]);
    visit(box.to + row * map.box[0] * static_cast<uint32_t>(bytes),
          source + (box.at[0] + first) * bytes, first * bytes,
          inside && end > first ? (end - first) * bytes : 0);
  }
}

// Copies from memory that may not exist: a wrong map must not end the process.
bool copied(void* to, const void* from, int64_t bytes) {
  iovec target{to, static_cast<size_t>(bytes)};
  iovec source{const_cast<void*>(from), static_cast<size_t>(bytes)};
  const ssize_t read = bytes ? process_vm_readv(getpid(), &target, 1, &source, 1, 0) : 0;
  if (read == bytes) return true;
  if (read >= 0 || errno == EFAULT) return false;
  std::memcpy(to, from, static_cast<size_t>(bytes));  // where that call is not allowed
  return true;
}

void land(const Box& box) {
  std::vector<unsigned char> row(box.map.box[0] * static_cast<size_t>(bytes_of(box.map)));
  each_row(box, [&](uint32_t to, const unsigned char* from, int64_t first, int64_t bytes) {
    std::fill(row.begin(), row.end(), 0);
    if (!copied(row.data() + first, from, bytes))
      found(std::string(box.site) + ": " + std::to_string(bytes) + " bytes that are no memory");
    for (uint32_t i = 0; i < row.size(); ++i)
      block->shared[swizzled(to + i, 1u << box.map.swizzle) - kWindow] = row[i];
  });
  bytes_arrive(box.site, box.arrives, box_bytes(box.map));
}

// Notes an access to a map's bytes, in pieces as large as its alignment.
void note_map(void (*note)(const void*, int, const char*), const void* map, const char* site) {
  for (int at = 0; at < kMapBytes; at += kMapAlign)
    note(static_cast<const unsigned char*>(map) + at, kMapAlign, site);
}

// The map that a block published there, unchanged and acquired by this thread.
TensorMap published_map(const char* site, const void* map) {
  const auto found_map = block->proxy.maps.find(map);
  if (found_map == block->proxy.maps.end())
    fail("%s: no tensor map that this block published is at %p; what a host encodes is not known "
         "here", site, map);
  const Clocks& clocks = current().clocks;
  const Published& published = found_map->second;
  bool acquired = false;
  for (const Step& step : published.acquired) acquired |= clocks.know(step);
  if (options.check && !acquired)
    found(std::string(site) + ": NO PROXY FENCE: the tensor map was published by thread " +
          std::to_string(published.by.agent) +
          " and not acquired since by one that this thread knows of");
  note_map(plain_read, map, site);
  TensorMap copy;
  std::memcpy(&copy, map, sizeof copy);
  if (std::memcmp(&copy, &published.map, sizeof copy))
    fail("%s: its tensor map was overwritten since it was published", site);
  if (const std::string fault = fault_of(copy); !fault.empty())
    fail("%s: its tensor map has %s", site, fault.c_str());
  return copy;
}

unsigned char* shared_map(uint32_t address) {
  shared_pointer(address + kMapAlign, kMapAlign);
  return shared_pointer(address, kMapAlign);
}

}  // namespace

void map_replace(const char* site, uint32_t address, MapField field, uint32_t ordinal,
                 uint64_t value) {
  if (skipped(site)) return;
  unsigned char* const at = shared_map(address);
  if (ordinal > 4 || (field == MapField::kStride && ordinal > 3))
    fail("%s: dimension %u, expected one of five, of strides one of four", site, ordinal);
  note_map(plain_read, at, site);
  note_map(plain_write, at, site);
  TensorMap map;
  std::memcpy(&map, at, sizeof map);
  const auto word = static_cast<uint32_t>(value);
  const auto byte = static_cast<uint8_t>(std::min<uint64_t>(value, 255));
  switch (field) {
    case MapField::kAddress: map.address = value; break;
    case MapField::kRank: map.rank = byte; break;
    case MapField::kBox: map.box[ordinal] = word; break;
    case MapField::kDims: map.dims[ordinal] = word; break;
    case MapField::kStride: map.strides[ordinal] = value; break;
    case MapField::kElementStride: map.element_strides[ordinal] = word; break;
    case MapField::kType: map.type = byte; break;
    case MapField::kInterleave: map.interleave = byte; break;
    case MapField::kSwizzle: map.swizzle = byte; break;
    case MapField::kFill: map.fill = byte; break;
  }
  std::memcpy(at, &map, sizeof map);
}

namespace {

struct Publication {
  const char* site;
  unsigned char* to;
  uint32_t from;
};

// Once for the warp; all lanes must give the same arguments.
void publish(void** brought, uint32_t) {
  const auto& mine = *static_cast<Publication*>(brought[self->lane]);
  for (int lane = 0; lane < 32; ++lane) {
    const auto& other = *static_cast<Publication*>(brought[lane]);
    if (other.to != mine.to || other.from != mine.from)
      fail("%s: lanes of a warp publish different maps", mine.site);
  }
  const unsigned char* const from = shared_map(mine.from);
  note_map(plain_read, from, mine.site);
  note_map(plain_write, mine.to, mine.site);
  std::memcpy(mine.to, from, kMapBytes);
  Published& published = block->proxy.maps[mine.to];
  published = {current().step(mine.site), {}, {}};
  std::memcpy(&published.map, from, sizeof published.map);
}

}  // namespace

void map_publish(const char* site, void* to, uint32_t from) {
  if (skipped(site)) return;
  Publication mine{site, static_cast<unsigned char*>(to), from};
  warp_meet(site, ~0u, &mine, publish, site);
}

void map_acquire(const char* site, const void* map) {
  if (skipped(site)) return;
  const auto found_map = block->proxy.maps.find(map);
  if (found_map == block->proxy.maps.end()) return;
  Fiber& fiber = current();
  // All lanes of the warp that published it met to do so.
  const Step by = found_map->second.by;
  if (by.agent / 32 == fiber.id / 32 || fiber.clocks.know(by))
    found_map->second.acquired.push_back(fiber.step(site));
}

void load_box(const char* site, uint32_t to, const void* map, int rank, const int32_t* at,
              uint32_t mbarrier) {
  if (skipped(site)) return;
  Box box = {site, published_map(site, map), {}, to, mbarrier_arrival(site, mbarrier)};
  if (rank != box.map.rank + 1)
    fail("%s: %d coordinates, its tensor map has %d", site, rank, box.map.rank + 1);
  std::copy(at, at + rank, box.at);
  const int bytes = static_cast<int>(box_bytes(box.map));
  if (to % 128) fail("%s: its target, %u, is no multiple of 128", site, to);
  shared_pointer(to + static_cast<uint32_t>(bytes) - 16, 16);
  const Fiber& by = current();
  Step step = by.step(site);
  step.agent = block->agents.arrivals(box.arrives.index);
  step.clock = box.arrives.phase + 1;
  note_proxied_write(to, bytes, step, by.clocks);
  const Clocks known = by.clocks.of_async_proxy(by.clocks.proxied_global, block->agents.proxied());
  each_row(box, [&](uint32_t, const unsigned char* from, int64_t, int64_t count) {
    if (count) note_proxied_source(from, static_cast<int>(count), step, known);
  });
  if (!options.lazy) return land(box);
  std::memset(shared_pointer(to, 16), 0xFF, static_cast<size_t>(bytes));
  block->proxy.boxes.push_back(box);
}

void land_box() {
  std::vector<Box>& boxes = block->proxy.boxes;
  Box& chosen = boxes[block->random() % boxes.size()];
  const Box lands = chosen;
  chosen = boxes.back();
  boxes.pop_back();
  land(lands);
}

}  // namespace emu
