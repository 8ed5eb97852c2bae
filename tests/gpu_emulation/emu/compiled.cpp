// Launches of kernels that were compiled elsewhere. What CUDA refuses at a launch is refused here.
#include "compiled.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <vector>

#include "block.h"

namespace emu {

namespace {

std::map<std::string, const Compiled*>& all() {
  static std::map<std::string, const Compiled*> kernels;
  return kernels;
}

using Find = void (*)(const char* name);  // called for a kernel that is not there yet
Find find = nullptr;

void refuse(const char* name, const std::string& why) {
  found(std::string("launch of ") + name + ": " + why);
}

std::string text(dim3 x) {
  return std::to_string(x.x) + " x " + std::to_string(x.y) + " x " + std::to_string(x.z);
}

// The parameters of the kernel that runs: one after another, each at a multiple of its alignment.
// The first address is a multiple of the largest alignment, and of no more. There are gaps, so that
// no address past a parameter is another's.
struct ParameterSpace {
  std::vector<unsigned char> memory;
  std::vector<const unsigned char*> at;
  const Compiled* of = nullptr;

  ParameterSpace() = default;
  ParameterSpace(const Compiled& kernel, const Argument* arguments) : of(&kernel) {
    constexpr size_t kGap = 16;
    size_t most = 16, end = 0;
    std::vector<size_t> offsets;
    for (int i = 0; i < kernel.parameters; ++i) {
      const size_t align = kernel.aligns[i];
      most = std::max(most, align);
      offsets.push_back((end + align - 1) / align * align);
      end = offsets.back() + kernel.bytes[i] + kGap;
    }
    memory.resize(end + 3 * most);
    const auto begin = reinterpret_cast<uintptr_t>(memory.data());
    unsigned char* const first = memory.data() + (3 * most - begin % (2 * most)) % (2 * most);
    for (int i = 0; i < kernel.parameters; ++i) {
      at.push_back(first + offsets[static_cast<size_t>(i)]);
      std::memcpy(first + offsets[static_cast<size_t>(i)], arguments[i].at, kernel.bytes[i]);
    }
  }
};
ParameterSpace space;

// Why it cannot be launched with these arguments; empty if it can.
std::string refusal(const Compiled& kernel, dim3 size, size_t shared, const Argument* arguments,
                    int count) {
  const unsigned *most = kernel.most, *exactly = kernel.exactly;
  const auto threads = [](auto x, auto y, auto z) { return static_cast<size_t>(x) * y * z; };
  if (most[0] && threads(size.x, size.y, size.z) > threads(most[0], most[1], most[2]))
    return text(size) + " threads, its .maxntid are " + text({most[0], most[1], most[2]});
  if (exactly[0] && (size.x != exactly[0] || size.y != exactly[1] || size.z != exactly[2]))
    return text(size) + " threads, its .reqntid are " +
           text({exactly[0], exactly[1], exactly[2]});
  if (shared > kernel.limit)
    return std::to_string(shared) + " bytes of shared memory, its architecture has " +
           std::to_string(kernel.limit);
  if (count != kernel.parameters)
    return std::to_string(count) + " parameters, expected " + std::to_string(kernel.parameters);
  for (int i = 0; i < count; ++i)
    if (arguments[i].bytes != kernel.bytes[i])
      return "parameter " + std::to_string(i) + " has " + std::to_string(arguments[i].bytes) +
             " bytes, expected " + std::to_string(kernel.bytes[i]);
  return "";
}

}  // namespace

bool is_parameter(const void* at, size_t bytes) {
  if (!space.of) return stacks.holds(reinterpret_cast<uintptr_t>(at));
  const auto asked = reinterpret_cast<uintptr_t>(at);
  for (size_t i = 0; i < space.at.size(); ++i) {
    const auto first = reinterpret_cast<uintptr_t>(space.at[i]);
    if (asked >= first && asked + bytes <= first + space.of->bytes[i]) return true;
  }
  return false;
}

void add(const Compiled* kernel) { all()[kernel->name] = kernel; }

const Compiled* compiled(const char* name) {
  const auto found = all().find(name);
  return found == all().end() ? nullptr : found->second;
}

void launch(const Compiled& kernel, dim3 grid, dim3 size, size_t dynamic, const Argument* arguments,
            int count) {
  const size_t begin = (kernel.shared + kernel.align - 1) / kernel.align * kernel.align;
  const size_t shared = dynamic ? begin + dynamic : kernel.shared;
  const std::string why = refusal(kernel, size, shared, arguments, count);
  if (!why.empty()) return refuse(kernel.name, why);
  space = ParameterSpace(kernel, arguments);
  launch_registers = kernel.registers;
  report.compiled++;
  launch(grid, size, shared, [&] { kernel.body(space.at.data()); });
  launch_registers = -1;
  space = ParameterSpace();
}

bool launch_compiled(const void* kernel, dim3 grid, dim3 size, size_t shared,
                     const Argument* arguments, int count) {
  if (!find) return false;
  Dl_info info;
  const char* name = dladdr(kernel, &info) && info.dli_sname ? info.dli_sname : "a nameless kernel";
  if (!compiled(name)) find(name);
  if (const Compiled* found = compiled(name))
    launch(*found, grid, size, shared, arguments, count);
  else
    refuse(name, "it was not compiled");
  return true;
}

}  // namespace emu

extern "C" {

// From here on kernels run as they were compiled; `find` adds one that is not there yet. Null: they
// run from their source again.
void emu_compiled(void (*find)(const char*)) { emu::find = find; }

// How many of them were launched since the reset.
long emu_compiled_launches() { return emu::report.compiled; }

int emu_launch(const char* name, const unsigned* grid, const unsigned* block, size_t shared,
               void* const* arguments, const size_t* bytes, int count) {
  using namespace emu;
  std::vector<Argument> all;
  for (int i = 0; i < count; ++i) all.push_back({arguments[i], bytes[i]});
  if (const Compiled* kernel = compiled(name))
    launch(*kernel, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared, all.data(),
           count);
  else
    refuse(name, "it was not compiled");
  return 0;
}
}
