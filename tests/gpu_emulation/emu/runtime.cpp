// CUDA's runtime, as far as a launch needs it. Work runs at once, or waits in its stream until the
// host asks for it. Streams run in any order, as a device orders only the work in one stream.
#include "runtime.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "block.h"

using Task = std::function<void()>;

// A stream belongs to a device; while it records, its launches become a graph's.
struct CUstream_st {
  int device;
  std::deque<Task> waiting;
  std::vector<Task>* recorder = nullptr;
  long graph = -1;  // its number
};

namespace emu {

namespace {

constexpr int kDevices = 2, kVersion = 13000;
constexpr size_t kMemory = size_t(1) << 30, kWithoutAsking = 48 << 10;

struct Device {
  CUstream_st stream;  // the default one
  unsigned char* memory = nullptr;
  size_t used = 0;
  std::map<const void*, size_t> allowed;  // by kernel: bytes of dynamic shared memory
};

struct Runtime {
  Device devices[kDevices];
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::deque<std::vector<Task>> graphs;  // with stable addresses
  std::vector<std::string> log;  // a line for each call
  bool at_once = true, apart = false;
  int driver = 13000;  // the newest CUDA that it knows
  int binary = 80;     // what runs on the devices: nvcc's code for sm_80, or the driver's for others
  long calls = 0, failing = -1;  // which call fails, and how
  cudaError_t failure = cudaSuccess;
};
Runtime runtime;
thread_local int current_device = 0;

bool on_device(int device, uintptr_t address) {
  const auto begin = reinterpret_cast<uintptr_t>(runtime.devices[device].memory);
  return begin && address >= begin && address < begin + kMemory;
}

// Is this address mapped in this process?
bool mapped(uintptr_t address) {
  constexpr uintptr_t page = 4096;
  unsigned char present;
  return address >= (uintptr_t(1) << 32) && address < (uintptr_t(1) << 47) &&
         mincore(reinterpret_cast<void*>(address / page * page), 1, &present) == 0;
}

// The first word of the parameters that is a pointer, but not to memory of this device.
std::string stray_pointer(const Work& work, int device) {
  for (size_t i = 0; i < work.arguments.size(); ++i)
    for (size_t at = 0; at + 8 <= work.arguments[i].bytes; at += 8) {
      uintptr_t word;
      std::memcpy(&word, static_cast<const unsigned char*>(work.arguments[i].at) + at, 8);
      if (on_device(device, word) || !mapped(word)) continue;
      const bool other = on_device(1 - device, word);
      return std::string(other ? "a pointer of another device" : "a host pointer") + " at byte " +
             std::to_string(at) + " of parameter " + std::to_string(i);
    }
  return "";
}

std::string name_of(const void* kernel) {
  Dl_info info;
  return dladdr(kernel, &info) && info.dli_sname ? info.dli_sname : "?";
}

bool known(cudaStream_t stream) {
  return !stream || std::any_of(runtime.streams.begin(), runtime.streams.end(),
                                [&](const auto& x) { return x.get() == stream; });
}

}  // namespace

bool fails(const std::string& call) {
  runtime.log.push_back(call);
  return runtime.calls++ == runtime.failing;
}
cudaError_t failure() { return runtime.failure; }
int driver_version() { return runtime.driver; }

cudaError_t attributes_of(cudaFuncAttributes* found, const void*) {
  if (fails("attributes")) return runtime.failure;
  if (runtime.driver < kVersion) return cudaErrorInsufficientDriver;
  *found = {80, runtime.binary};
  return cudaSuccess;
}

cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (fails("allow " + std::to_string(value))) return runtime.failure;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<size_t>(value) > options.shared_limit)
    return cudaErrorInvalidValue;
  runtime.devices[current_device].allowed[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t launch_on(cudaStream_t stream, const Work& work) {
  const std::shared_ptr<void> values(work.values, work.release);
  const std::string name = name_of(work.kernel);
  const auto number = [&](cudaStream_t x) {
    for (size_t i = 0; i < runtime.streams.size(); ++i)
      if (runtime.streams[i].get() == x) return std::to_string(i + 1);
    return std::string(x ? "?" : "0");
  };
  if (fails("launch on device " + std::to_string(current_device) + " stream " + number(stream) + " " +
            name))
    return runtime.failure;
  if (!known(stream) || (stream && stream->device != current_device))
    return cudaErrorInvalidResourceHandle;
  Device& device = runtime.devices[current_device];
  const auto allowed = device.allowed.find(work.kernel);
  const size_t most = allowed == device.allowed.end() ? kWithoutAsking
                                                      : std::max(allowed->second, kWithoutAsking);
  if (work.shared_bytes > most) return cudaErrorInvalidValue;
  if (!can_launch(work.grid, work.block)) return cudaErrorInvalidConfiguration;
  if (runtime.apart) {
    const std::string stray = stray_pointer(work, current_device);
    if (!stray.empty()) {  // reported, not dereferenced
      found("launch of " + name + ": " + stray);
      return cudaSuccess;
    }
  }
  CUstream_st& queue = stream ? *stream : device.stream;
  const Task task = [work, values] { work.run(work); };
  if (queue.recorder)
    queue.recorder->push_back(task);
  else if (runtime.at_once)
    task();
  else
    queue.waiting.push_back(task);
  return cudaSuccess;
}

}  // namespace emu

cudaError_t cudaDriverGetVersion(int* version) {
  *version = emu::runtime.driver;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = emu::kVersion;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  if (emu::fails("get device")) return emu::runtime.failure;
  *device = emu::current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (emu::fails("set device " + std::to_string(device))) return emu::runtime.failure;
  if (device < 0 || device >= emu::kDevices) return cudaErrorInvalidDevice;
  emu::current_device = device;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
  }
  return "unrecognized error code";
}

// What the tests do with the runtime besides the calls of launch.h.
extern "C" {

// The initial state: device 0 is current, no work waits. Memory is empty, but stays mapped: an old
// tensor has lost its values, but reading it does not end the process.
void emu_runtime_reset() {
  emu::Runtime next;
  for (int i = 0; i < emu::kDevices; ++i) {
    next.devices[i].stream.device = i;
    next.devices[i].memory = emu::runtime.devices[i].memory;
    if (next.devices[i].memory) madvise(next.devices[i].memory, emu::kMemory, MADV_DONTNEED);
  }
  emu::runtime = std::move(next);
  emu::current_device = 0;
}

// at_once: work runs at once, else it waits in its stream. apart: pointers among a kernel's
// parameters must be to memory of its device.
void emu_runtime_mode(int at_once, int apart) {
  emu::runtime.at_once = at_once;
  emu::runtime.apart = apart;
}

// The driver knows CUDA up to this version, and runs code for this architecture.
void emu_runtime_driver(int version, int binary) {
  emu::runtime.driver = version;
  emu::runtime.binary = binary;
}

// The call after `calls` more fails with this code.
void emu_runtime_fail(long calls, int code) {
  emu::runtime.failing = emu::runtime.calls + calls;
  emu::runtime.failure = static_cast<cudaError_t>(code);
}

// Memory of a device, at a multiple of 256 bytes as cudaMalloc's; it is never reused.
void* emu_allocate(int device, size_t bytes) {
  emu::Device& on = emu::runtime.devices[device];
  if (!on.memory) {
    void* found = mmap(nullptr, emu::kMemory, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return nullptr;
    on.memory = static_cast<unsigned char*>(found);
  }
  if (on.used + bytes > emu::kMemory) return nullptr;
  unsigned char* at = on.memory + on.used;
  on.used += (bytes + 255) / 256 * 256;
  return at;
}

void* emu_stream(int device) {
  emu::runtime.streams.push_back(std::make_unique<CUstream_st>());
  emu::runtime.streams.back()->device = device;
  return emu::runtime.streams.back().get();
}
// Runs at most so many of the waiting kernels; returns how many still wait.
int emu_run_waiting(void* stream, int most) {
  auto& waiting = static_cast<CUstream_st*>(stream)->waiting;
  for (; most > 0 && !waiting.empty(); --most) {
    waiting.front()();
    waiting.pop_front();
  }
  return static_cast<int>(waiting.size());
}
// From here on in the stream's order this memory may be reused; but a graph keeps its own.
void emu_free(void* stream, void* at, size_t bytes) {
  auto* queue = static_cast<CUstream_st*>(stream);
  if (!queue->recorder) queue->waiting.push_back([=] { std::memset(at, 0xFF, bytes); });
}

// Records what is launched on this stream until `emu_captured`, which returns its graph's number.
void emu_capture(void* stream) {
  auto* from = static_cast<CUstream_st*>(stream);
  from->graph = static_cast<long>(emu::runtime.graphs.size());
  from->recorder = &emu::runtime.graphs.emplace_back();
}
long emu_captured(void* stream) {
  auto* from = static_cast<CUstream_st*>(stream);
  from->recorder = nullptr;
  return from->graph;
}
int emu_replay(long graph) {
  for (const Task& task : emu::runtime.graphs.at(static_cast<size_t>(graph))) task();
  return 0;
}

// The calls since the reset, a line each.
long emu_runtime_log(char* text, size_t bytes) {
  std::string lines;
  for (const std::string& line : emu::runtime.log) lines += line + "\n";
  snprintf(text, bytes, "%s", lines.c_str());
  return static_cast<long>(emu::runtime.log.size());
}
}
