// The calls of one run of the library: one, or one for each sequence of a packed batch. Each has
// its own plan, so that a sequence has the bits that it has alone. Their phases run together: the
// tasks of all sequences are one list, the longest sequences first, so that the smallest tasks come
// last.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "../../common/item_size.h"
#include "../base/plan.h"
#include "../score/sequence.h"
#include "kernel_choice.h"

namespace fa {

// True if the offsets go from 0 to `total` without falling, in steps of at most `most`.
inline bool rises(const int64_t* cu, int64_t n, int64_t total, int64_t most) {
  if (cu[0] != 0) return false;
  for (int64_t b = 0; b < n; ++b)  // bounds first, so that the difference cannot overflow
    if (cu[b + 1] < cu[b] || cu[b + 1] > total || cu[b + 1] - cu[b] > most) return false;
  return cu[n] == total;
}

// True if every page that a length needs exists.
inline bool pages_exist(const Params& p) {
  for (int64_t b = 0; b < p.B; ++b)
    for (int64_t at = 0; at * p.page < p.lengths[b]; ++at)
      if (p.pages[b * p.blocks + at] < 0 || p.pages[b * p.blocks + at] >= p.P) return false;
  return true;
}

class Calls {
 public:
  template <class MakePlan>
  Calls(const Params& p, int64_t pass, MakePlan make_plan) : threads_(p.threads), run_(p.run) {
    if (!p.cu_q || shares_pages(p, pass)) {
      alone_.p = p;
      begin_ = &alone_;
      count_ = 1;
    } else {
      packed_.reserve(p.B);
      for (int64_t b : by_length(p)) packed_.emplace_back().p = sequence(p, b);
      begin_ = packed_.data();
      count_ = p.B;
    }
    for (const Call& call : *this) work_ += work_of(call.p);
    if (work_ < kShort) run_ = nullptr;
    for (Call& call : *this) {
      call.p.run = run_;
      // Its share of the threads: tasks are as large as those of a batch.
      const double share = work_of(call.p) / work_;
      if (begin_ != &alone_) call.p.threads = static_cast<int64_t>(std::ceil(p.threads * share));
      call.plan = make_plan(call.p);
      call.workspace = workspace_;
      workspace_ += (call.plan.workspace + 63) / 64 * 64;
      for (int at = 0; at < kPhases; ++at) {
        call.first[at] = tasks_[at];
        if (at >= call.plan.count) continue;
        tasks_[at] += call.plan.phases[at].tasks;
        scratch_[at] = std::max(scratch_[at], call.plan.phases[at].scratch);
      }
    }
  }
  Calls(const Calls&) = delete;

  int64_t threads() const { return threads_; }
  HostedRun* run() const { return run_; }  // null: it is not interrupted
  int64_t tasks(int at) const { return at < kPhases ? tasks_[at] : 0; }
  int64_t most_tasks() const { return *std::max_element(tasks_, tasks_ + kPhases); }
  size_t scratch(int at) const { return scratch_[at]; }
  size_t workspace() const { return workspace_; }
  double work() const { return work_; }

  void give_workspace(char* memory) {
    for (Call& call : *this)
      if (call.plan.workspace) call.p.workspace = memory + call.workspace;
  }
  void run(int at, int64_t task, char* scratch) const {
    const Call* after = std::upper_bound(
        begin_, begin_ + count_, task, [at](int64_t t, const Call& x) { return t < x.first[at]; });
    const Call& call = *(after - 1);
    call.plan.phases[at].run(call.p, task - call.first[at], scratch);
  }

 private:
  struct Call {
    Params p;
    Plan plan;
    size_t workspace;        // offset of its workspace
    int64_t first[kPhases];  // index of its first task among all
  };
  static std::vector<int64_t> by_length(const Params& p) {
    std::vector<int64_t> order(p.B);
    std::iota(order.begin(), order.end(), 0);
    const auto scores = [&](int64_t b) {
      const int64_t keys = p.page ? p.lengths[b] : p.cu_k[b + 1] - p.cu_k[b];
      return (p.cu_q[b + 1] - p.cu_q[b]) * keys;
    };
    std::sort(order.begin(), order.end(), [&](int64_t x, int64_t y) {
      const int64_t of_x = scores(x), of_y = scores(y);
      return of_x > of_y || (of_x == of_y && x < y);
    });
    return order;
  }
  // A byte of keys and values counts as two multiply-adds, which take as long as reading it from
  // memory: with few rows, reading is the work.
  static double work_of(const Params& p) {
    const double bytes = double(p.B) * p.Hk * p.N * (p.D + p.Dv) * item_size(p.k.dtype);
    return 1 + double(p.B) * p.H * p.M * p.N * (p.D + p.Dv) + 2 * bytes;
  }
  static constexpr double kShort = 1 << 28;  // some ten milliseconds; with a score_mod, up to 100
  Call* begin() { return begin_; }
  Call* end() { return begin_ + count_; }

  Call alone_;
  std::vector<Call> packed_;
  Call* begin_;
  int64_t count_;
  int64_t threads_;
  HostedRun* run_;
  double work_ = 0;
  size_t workspace_ = 0;
  int64_t tasks_[kPhases] = {};
  size_t scratch_[kPhases] = {};
};

}  // namespace fa
