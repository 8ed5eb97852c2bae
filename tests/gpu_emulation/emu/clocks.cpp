#include "clocks.h"

#include <algorithm>

namespace emu {

static void join(Clocks::Known& to, const Clocks::Known& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

void Clocks::join(const Clocks& from) {
  if (from.block == block) {
    emu::join(own, from.own);
    emu::join(proxied, from.proxied);
    emu::join(proxied_global, from.proxied_global);
    emu::join(tensor, from.tensor);
  }
  if (from.others == others && (from.block == block || from.own.empty())) return;
  auto all = others ? *others : std::map<int64_t, Known>();
  if (from.block != block && !from.own.empty()) emu::join(all[from.block], from.own);
  if (from.others)
    for (const auto& [of, known] : *from.others) emu::join(of == block ? own : all[of], known);
  others = std::make_shared<const std::map<int64_t, Known>>(std::move(all));
}

Clocks Clocks::of_async_proxy(const Known& told, size_t first) const {
  Clocks known = *this;
  for (size_t i = 0; i < first; ++i) known.own[i] = i < told.size() ? told[i] : 0;
  return known;
}

bool Clocks::know_other(const Step& step) const {
  const auto of = others->find(step.block);
  return of != others->end() && step.agent < of->second.size() &&
         step.clock <= of->second[step.agent];
}

}  // namespace emu
