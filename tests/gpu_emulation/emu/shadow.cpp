#include "shadow.h"

#include <algorithm>

namespace emu {

void Shadow::clear() {
  for (auto& [number, page] : pages_) spare_.push_back(std::move(page));
  pages_.clear();
  recent_.fill({});
}

Shadow::Chunk& Shadow::chunk_at(uintptr_t at) {
  const uintptr_t number = at / kPageBytes;
  Recent& recent = recent_[number % recent_.size()];
  if (recent.number != number) {
    std::unique_ptr<Page>& page = pages_[number];
    if (!page) {
      if (spare_.empty()) {
        page = std::make_unique<Page>();
      } else {
        page = std::move(spare_.back());
        spare_.pop_back();
        for (Chunk& chunk : *page) chunk = Chunk();
      }
      if (fresh_)
        for (Chunk& chunk : *page) chunk.whole.fresh = true;
    }
    recent = {number, page.get()};
  }
  return (*recent.page)[at % kPageBytes / kChunkBytes];
}

void Shadow::split(Chunk& chunk, size_t parts) {
  std::vector<Cell> into(parts);
  for (size_t i = 0; i < parts; ++i) {
    const size_t before = chunk.parts.size();
    const Cell& from = before ? chunk.parts[i * before / parts] : chunk.whole;
    Cell& part = into[i];
    part.written = from.written;
    part.read = from.read;
    part.fresh = from.fresh;
    if (from.crowd) part.crowd = std::make_unique<Crowd>(*from.crowd);
  }
  chunk.parts = std::move(into);
}

template <class Visit>
void Shadow::visit(uintptr_t at, int bytes, Visit each) {
  const uintptr_t end = at + static_cast<uintptr_t>(bytes);
  const size_t needed = (at | end) % 2 ? kChunkBytes : kChunkBytes / 2;
  for (uintptr_t begin = at / kChunkBytes * kChunkBytes; begin < end; begin += kChunkBytes) {
    Chunk& chunk = chunk_at(begin);
    const bool whole = at <= begin && begin + kChunkBytes <= end;
    if (whole && chunk.parts.empty()) {
      each(chunk.whole, begin);
      continue;
    }
    if (chunk.parts.size() < needed) split(chunk, needed);
    const size_t parts = chunk.parts.size(), shift = parts == kChunkBytes ? 0 : 1;
    for (size_t i = at <= begin ? 0 : (at - begin) >> shift;
         i < parts && begin + (i << shift) < end; ++i)
      each(chunk.parts[i], begin + (i << shift));
  }
}

// The first step of a group that is not known; else an empty one.
static Step unknown(Step first, uint32_t lanes, const Clocks& known) {
  const int warp = first.agent / 32 * 32;
  for (; lanes; lanes &= lanes - 1) {
    first.agent = static_cast<uint16_t>(warp + __builtin_ctz(lanes));
    if (!known.know(first)) return first;
  }
  return Step();
}

bool Shadow::know_all(const std::vector<Group>& groups, uintptr_t at, Kind kind, const Step& now,
                      const Clocks& known, bool of_loads) {
  for (const Group& group : groups) {
    if (group.first.loads && !of_loads) continue;
    const Step step = unknown(group.first, group.lanes, known);
    if (!step.clock) continue;
    complain_(kind, at, step, now);
    return false;
  }
  return true;
}

// Are all accesses to a cell known, except the last write?
bool Shadow::know_all(const Cell& cell, uintptr_t at, Kind of_readers, const Step& now,
                      const Clocks& known) {
  const Step reader = unknown(cell.read.first, cell.read.lanes, known);
  if (reader.clock) {
    complain_(of_readers, at, reader, now);
    return false;
  }
  return !cell.crowd || know_all(cell.crowd->readers, at, of_readers, now, known);
}

// Adds to a group of the same warp; else replaces a known group, or one of two groups of forgotten
// blocks.
void Shadow::remember(std::vector<Group>& groups, const Group& one, const Clocks& known) {
  for (Group& group : groups) {
    if (!group.takes(one.first)) continue;
    group.lanes |= one.lanes;
    return;
  }
  bool forgotten = forgotten_(one.first.block);
  for (Group& group : groups) {
    const int64_t block = group.first.block;
    const bool other = block != one.first.block && forgotten_(block);
    if ((forgotten && other) || !unknown(group.first, group.lanes, known).clock) {
      group = one;
      return;
    }
    forgotten |= other;
  }
  groups.push_back(one);
}

void Shadow::read(uintptr_t at, int bytes, const Step& now, const Clocks& known) {
  const uint32_t lane = 1u << now.agent % 32;
  visit(at, bytes, [&](Cell& cell, uintptr_t at) {
    const bool together = cell.read.takes(now);
    if (together && cell.read.lanes & lane) return;  // a repeated read
    if (cell.fresh)
      complain_(kUninitialised, at, Step(), now);
    else if (!known.know(cell.written))
      complain_(kWriteRead, at, cell.written, now);
    else if (cell.crowd)
      know_all(cell.crowd->atomics, at, kOfAtomics, now, known, false);
    cell.fresh = false;  // report once
    if (together) {
      cell.read.lanes |= lane;
      return;
    }
    if (unknown(cell.read.first, cell.read.lanes, known).clock) {
      if (!cell.crowd) cell.crowd = std::make_unique<Crowd>();
      remember(cell.crowd->readers, cell.read, known);
    }
    cell.read = {now, lane};
  });
}

void Shadow::write(uintptr_t at, int bytes, const Step& now, const Clocks& known,
                   const Clocks& known_of_readers) {
  visit(at, bytes, [&](Cell& cell, uintptr_t at) {
    if (!known.know(cell.written))
      complain_(kWriteWrite, at, cell.written, now);
    else if (know_all(cell, at, kReadWrite, now, known_of_readers) && cell.crowd)
      know_all(cell.crowd->atomics, at, kOfAtomics, now, known_of_readers);
    cell.written = now;
    cell.read = Group();
    cell.crowd.reset();
    cell.fresh = false;
  });
}

void Shadow::access_atomically(uintptr_t at, int bytes, bool reads, const Step& now,
                               const Clocks& known, const Clocks& known_of_readers) {
  visit(at, bytes, [&](Cell& cell, uintptr_t at) {
    if (!cell.crowd) cell.crowd = std::make_unique<Crowd>();
    if (cell.fresh && reads)
      complain_(kUninitialised, at, Step(), now);
    else if (!known.know(cell.written))
      complain_(kOfAtomics, at, cell.written, now);
    else if (!now.loads)
      know_all(cell, at, kOfAtomics, now, known_of_readers);
    for (const Group& group : cell.crowd->atomics) {
      if (group.first.block == now.block || !(group.first.narrow || now.narrow)) continue;
      const Step other = unknown(group.first, group.lanes, known);
      if (!other.clock) continue;
      complain_(kOfAtomics, at, other, now);
      break;
    }
    cell.fresh = false;
    if (!now.loads) {
      cell.read = Group();
      cell.crowd->readers.clear();
    }
    remember(cell.crowd->atomics, {now, 1u << now.agent % 32}, known);
  });
}

}  // namespace emu
