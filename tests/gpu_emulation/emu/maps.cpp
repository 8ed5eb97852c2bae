// The maps of tensors: what may be in them, how a kernel makes one, and where a copy finds one. The
// host makes others: encode.cpp.
#include <algorithm>

#include "block.h"

namespace emu {

int bytes_of(const TensorMap& map) {
  constexpr uint8_t kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};
  return map.type < sizeof kBytes ? kBytes[map.type] : 0;
}

uint64_t box_bytes(const TensorMap& map) {
  auto bytes = static_cast<uint64_t>(bytes_of(map));
  for (int i = 0; i <= map.rank; ++i) bytes *= map.box[i];
  return bytes;
}

namespace {

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

// Notes an access to a map's bytes, in pieces as large as its alignment.
void note_map(void (*note)(const void*, int, const char*), const void* map, const char* site) {
  for (int at = 0; at < kMapBytes; at += kMapAlign)
    note(static_cast<const unsigned char*>(map) + at, kMapAlign, site);
}

// The map that a block published there, unchanged and acquired by this thread.
TensorMap published_map(const char* site, const void* map) {
  const auto found_map = block->proxy.maps.find(map);
  if (found_map == block->proxy.maps.end())
    fail("%s: no tensor map that this block published, and no parameter, is at %p", site, map);
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
  return copy;
}

// The map that the host encoded, in a parameter. (A GPU requires that of __grid_constant__: the
// address of any other parameter is that of a thread's own copy.)
TensorMap map_of_host(const char* site, const void* parameter) {
  TensorMap map;
  std::memcpy(&map, parameter, sizeof map);
  if (map.origin != kOfHost)
    fail("%s: its parameter is no tensor map that cuTensorMapEncodeTiled made", site);
  return map;
}

unsigned char* shared_map(uint32_t address) {
  shared_pointer(address + kMapAlign, kMapAlign);
  return shared_pointer(address, kMapAlign);
}

}  // namespace

TensorMap map_at(const char* site, const void* map, int rank) {
  if (reinterpret_cast<uintptr_t>(map) % kMapAlign)
    fail("%s: its tensor map is at %p, expected a multiple of %d", site, map, kMapAlign);
  const TensorMap found =
      is_parameter(map, kMapBytes) ? map_of_host(site, map) : published_map(site, map);
  if (const std::string fault = fault_of(found); !fault.empty())
    fail("%s: its tensor map has %s", site, fault.c_str());
  if (rank != found.rank + 1)
    fail("%s: %d coordinates, its tensor map has %d", site, rank, found.rank + 1);
  return found;
}

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

}  // namespace emu
