// A run on behalf of a host (FaHost in abi.h): Python, for example. Its lock is released while the
// run computes. Now and then the thread that made the run takes it again and asks whether the run
// shall end, as after Ctrl-C. Then no task is begun any more, and long tasks return early.
#pragma once
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "../base/plan.h"
#include "platform.h"
#include "thread_memory.h"

#if defined(FA_HAS_AMX_BF16)
#include "../amx/amx_enable.h"
#endif

namespace fa {

inline FaHost host{};  // set before the first run

class HostedRun {
 public:
  // A brief run keeps the lock, and does not ask.
  explicit HostedRun(bool brief) : host_(brief || !host.unlock ? nullptr : &host) {
    if (host_) state_ = host_->unlock();
  }
  // Taking the lock ends a thread that Python no longer waits for: it unwinds the stack.
  ~HostedRun() noexcept(false) {
    if (host_) host_->lock(state_);
  }
  HostedRun(const HostedRun&) = delete;
  HostedRun& operator=(const HostedRun&) = delete;

  // True on the thread that may ask.
  bool is_asker() const { return host_ && thread_id() == host_->thread; }
  bool ended() const { return ended_.load(std::memory_order_relaxed); }
  // True if the run shall end; asks if that is due.
  bool ends() {
    if (ended() || !is_asker()) return ended();
    const Clock::time_point now = Clock::now();
    if (next_ == Clock::time_point{}) next_ = now + kInterval;
    if (now >= next_) {
      ask();
      next_ = Clock::now() + kInterval;
    }
    return ended();
  }

 private:
  using Clock = std::chrono::steady_clock;
  // Taking Python's lock may take 5 milliseconds, if another thread has it.
  static constexpr std::chrono::milliseconds kInterval{200};

  // The host may run any code meanwhile, even another run on this thread.
  void ask() {
    host_->lock(state_);
    {
      const MemoryAside memory;
#if defined(FA_HAS_AMX_BF16)
      std::optional<amx::Tiles> tiles;  // restores their configuration
      if (tiles_refused().empty()) tiles.emplace();
#endif
      if (host_->interrupted()) ended_ = true;
    }
    state_ = host_->unlock();
  }

  const FaHost* host_;
  void* state_ = nullptr;
  std::atomic<bool> ended_{false};
  Clock::time_point next_{};
};

// Waits until over() is true or the run ends, without ceasing to ask. Spins first, because most
// waits are short; then lets other threads have the core.
template <class Over>
void wait_until(Over over, HostedRun* of) {
  for (int turns = 0; !over() && !(of && of->ends()); ++turns)
    if (turns < 2000)
      relax();
    else if (turns < 3000)
      std::this_thread::yield();
    else
      nap();
}

}  // namespace fa
