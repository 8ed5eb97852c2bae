#include "clocks.h"

namespace emu {

template <class Visit>
void Shadow::visit(uint32_t offset, int bytes, Visit each) {
  const uint32_t end = std::min<uint32_t>((offset + bytes + kCellBytes - 1) / kCellBytes,
                                          static_cast<uint32_t>(cells_.size()));
  for (uint32_t i = offset / kCellBytes; i < end; ++i) each(cells_[i], i * kCellBytes);
}

void Shadow::read(uint32_t offset, int bytes, const Step& now, const Clocks& known) {
  visit(offset, bytes, [&](Cell& cell, uint32_t at) {
    if (cell.in_flight) {
      complain_("READ IN FLIGHT", at, cell.written, now);
      cell.in_flight = false;
    } else if (cell.fresh) {
      complain_("UNINITIALISED", at, Step{}, now);
    } else if (cell.written.agent != now.agent && !cell.written.known_to(known)) {
      complain_("RACE write/read", at, cell.written, now);
    }
    cell.fresh = false;  // told once
    int slot = -1;
    for (int k = 0; k < cell.reader_count && slot < 0; ++k)
      if (cell.readers[k].agent == now.agent || cell.readers[k].known_to(known)) slot = k;
    if (slot < 0) slot = cell.reader_count < kReaders ? cell.reader_count++ : evicted_++ % kReaders;
    cell.readers[slot] = now;
  });
}

void Shadow::check_write(Cell& cell, uint32_t at, const Step& now, const Clocks& known) {
  if (cell.in_flight && cell.written.agent != now.agent)
    complain_("WRITE IN FLIGHT", at, cell.written, now);
  else if (cell.written.agent != now.agent && !cell.written.known_to(known))
    complain_("RACE write/write", at, cell.written, now);
  for (int k = 0; k < cell.reader_count; ++k) {
    const Step& reader = cell.readers[k];
    if (reader.agent == now.agent || reader.known_to(known)) continue;
    complain_("RACE read/write", at, reader, now);
    break;
  }
}

void Shadow::write(uint32_t offset, int bytes, const Step& now, const Clocks& known) {
  visit(offset, bytes, [&](Cell& cell, uint32_t at) {
    check_write(cell, at, now, known);
    cell.written = now;
    cell.reader_count = 0;
    cell.fresh = cell.in_flight = false;
  });
}

void Shadow::begin_copy(uint32_t offset, int bytes, const Step& now, const Clocks& known) {
  visit(offset, bytes, [&](Cell& cell, uint32_t at) {
    check_write(cell, at, now, known);
    cell.written = now;
    cell.reader_count = 0;
    cell.fresh = false;
    cell.in_flight = true;
  });
}

}  // namespace emu
