// The C ABI: checks arguments by their values, and runs plans on threads.
#include <atomic>
#include <cstring>

#include "../../common/band.h"
#include "../../common/extents.h"
#include "../base/plan.h"
#include "append.h"
#include "hosted_run.h"
#include "kernel_choice.h"
#include "packed_batch.h"
#include "read_sum.h"
#include "thread_memory.h"
#include "threads.h"

namespace fa {
namespace {

std::atomic<bool> poisoned{false};

// After fork() the OpenMP pool of the parent is gone, and waiting for it would hang: a child
// computes on the calling thread.
bool forked = false;
[[maybe_unused]] const int at_fork = at_fork_of_child([] { forked = true; });

// Runs the tasks that next() gives, on this thread, until `of` ends: run(task, scratch). Returns
// their number, or -1 if there is no memory.
template <class Next, class Run>
int64_t run_on_thread(int64_t tasks, size_t scratch_size, HostedRun* of, Next next,
                      const Run& run) {
  ScratchMemory& memory = memory_of_thread().scratch;
  char* scratch = scratch_size ? memory.get(scratch_size) : nullptr;
  if (scratch_size && !scratch) return -1;
  int64_t done = 0;
  for (int64_t task; !(of && of->ends()) && (task = next()) < tasks; ++done) {
    if (poisoned && scratch) std::memset(scratch, 0xFF, scratch_size);
    run(task, scratch);
  }
  memory.trim();
  return done;
}

// What threads share of a phase.
struct Progress {
  std::atomic<int64_t> next{0}, done{0}, without_memory{0};
};

// Runs phases one after another, the tasks of each in their order: Work has tasks(at),
// scratch(at) and run(at, task, scratch); the first phase without a task is the end. False if there
// was no memory, or if `of` ended.
//
// Threads meet once, at the end. Between phases one waits for tasks that others have begun, not for
// the others themselves: beside other load, a thread that the system has not yet given a core would
// delay each phase.
template <class Work>
bool run_phases(int64_t threads, HostedRun* of, const Work& work) {
  if (forked) threads = 1;
  if (threads <= 1) {  // counts for itself: atomic operations take a part of a tiny call
    for (int at = 0; const int64_t tasks = work.tasks(at); ++at) {
      int64_t task = 0;
      const auto run = [&](int64_t x, char* scratch) { work.run(at, x, scratch); };
      if (run_on_thread(tasks, work.scratch(at), of, [&] { return task++; }, run) != tasks)
        return false;
    }
    return true;
  }
  Progress phases[kPhases];
  on_threads(threads, [&](int64_t all) {
    for (int at = 0; const int64_t tasks = work.tasks(at); ++at) {
      Progress& here = phases[at];
      if (here.next.load(std::memory_order_relaxed) < tasks) {  // no memory for nothing
        const int64_t done = run_on_thread(
            tasks, work.scratch(at), of,
            [&] { return here.next.fetch_add(1, std::memory_order_relaxed); },
            [&](int64_t task, char* scratch) { work.run(at, task, scratch); });
        (done < 0 ? here.without_memory += 1 : here.done += done);
      }
      const auto over = [&] { return here.done == tasks || here.without_memory == all; };
      if (!work.tasks(at + 1) && !(of && of->is_asker())) return;
      wait_until(over, of);
      if (here.done < tasks) return;
    }
  });
  for (int at = 0; const int64_t tasks = work.tasks(at); ++at)
    if (phases[at].done < tasks) return false;
  return true;
}
// The same of one phase.
template <class Run>
bool run_tasks(int64_t tasks, size_t scratch_size, int64_t threads, HostedRun* of, const Run& run) {
  struct One {
    int64_t count;
    size_t size;
    const Run& call;
    int64_t tasks(int at) const { return at == 0 ? count : 0; }
    size_t scratch(int) const { return size; }
    void run(int, int64_t task, char* scratch) const { call(task, scratch); }
  };
  if (!kThreadsStay || tasks <= 1) threads = std::min(threads, tasks);
  return run_phases(threads, of, One{tasks, scratch_size, run});
}

// Waking a thread costs what a million multiply-adds do. All calls of a kind have as many threads, so
// that libgomp ends none that the next one needs again.
int64_t threads_for(const Calls& calls) {
  const double worth = 1 + calls.work() / (1 << 20);
  const int64_t most = std::min(calls.threads(), calls.most_tasks());
  return worth < most ? static_cast<int64_t>(worth) : most;
}

int64_t run_calls(Calls& calls, void* workspace) {
  if (const size_t size = calls.workspace()) {
    if (poisoned) std::memset(workspace, 0xFF, size);
    calls.give_workspace(static_cast<char*>(workspace));
  }
  const bool done = run_phases(threads_for(calls), calls.run(), calls);
  if (calls.run() && calls.run()->ended()) return FA_INTERRUPTED;  // tasks may have returned early
  return done ? FA_OK : FA_NO_MEMORY;
}

int64_t bad_values(const Params& p) {
  if (p.cu_q && !rises(p.cu_q, p.B, p.T, p.M)) return FA_BAD_OFFSET;
  if (p.cu_k && !rises(p.cu_k, p.B, p.S, p.N)) return FA_BAD_OFFSET;
  const int64_t room = p.page ? std::min(p.N, p.blocks * p.page) : all_keys(p);
  if (p.lengths)
    for (int64_t b = 0; b < p.B; ++b) {
      const int64_t most = p.cu_k ? p.cu_k[b + 1] - p.cu_k[b] : room;
      if (p.lengths[b] < 0 || p.lengths[b] > most) return FA_BAD_LENGTH;
    }
  return p.page && !pages_exist(p) ? FA_BAD_PAGE : FA_OK;
}

int64_t run_pass(const Params& p, int64_t pass) {
  Calls calls(p, pass, [&](const Params& one) { return make_plan(one, pass); });
  const bool given = p.workspace || !calls.workspace();
  ScratchMemory& memory = memory_of_thread().workspace;
  void* workspace = given ? p.workspace : memory.get(calls.workspace());
  if (!given && !workspace) return FA_NO_MEMORY;
  const int64_t status = run_calls(calls, workspace);
  if (!given) memory.trim();
  return status;
}

// How many sequences of a packed batch run together. Each has a plan, or a part of the workspace;
// with very many of them all of these would take more memory than the results.
int64_t at_once(const Params& p, int64_t pass) {
  constexpr int64_t most = 4096, bytes_per_thread = int64_t{4} << 20;
  if (!shares_pages(p, pass)) return most;
  Params one = p;
  one.B = 1;
  const int64_t each = std::max<int64_t>(make_plan(one, pass).workspace, 1);
  return std::clamp<int64_t>(bytes_per_thread * p.threads / each, 1, most);
}

int64_t run_sequences(const Params& p, int64_t pass) {
  if (!p.cu_q || p.B == 0) return run_pass(p, pass);
  const int64_t most = at_once(p, pass);
  if (p.B <= most) return run_pass(p, pass);
  int64_t status = FA_OK;
  for (int64_t first = 0; first < p.B && status == FA_OK; first += most) {
    if (interrupted(p)) return FA_INTERRUPTED;
    Params some = p;
    begin_at(some, first);
    some.B = std::min(most, p.B - first);
    status = run_pass(some, pass);
  }
  return status;
}

}  // namespace

bool ends(HostedRun& run) { return run.ends(); }

}  // namespace fa

extern "C" {

const char* fa_abi_fields(void) { return FA_FIELDS; }

int64_t fa_cpu_max_head_dim(void) { return FA_CPU_MAX_HEAD_DIM; }

int64_t fa_cpu_workspace(const FaCall* call, int64_t pass) {
  const fa::Params p{call->params, call->mod};
  if (fa::bad_values(p) != FA_OK) return 0;
  const fa::Calls calls(p, pass, [&](const fa::Params& one) { return fa::make_plan(one, pass); });
  return static_cast<int64_t>(calls.workspace());
}

void fa_cpu_host(const FaHost* host) { fa::host = *host; }

int64_t fa_cpu_run(const FaCall* call, int64_t pass, int64_t brief) {
  fa::HostedRun run(brief);
  if (const int64_t status = fa::bad_extent(*call, pass)) return status;
  fa::Params p{call->params, call->mod};
  if (const int64_t status = fa::bad_values(p)) return status;
  int64_t outside = 0;
  p.mod.outside = &outside;
  if (run.is_asker()) p.run = &run;
  try {
    const int64_t status = fa::run_sequences(p, pass);
    return status == FA_OK && outside ? int64_t{FA_BAD_INDEX} : status;
  } catch (const std::bad_alloc&) {  // a batch of very many sequences
    return FA_NO_MEMORY;
  }
}

int64_t fa_cpu_index(const FaIndexer* p) {
  fa::HostedRun run(false);
  const fa::IndexerTasks tasks = fa::indexer_tasks(*p);
  const bool done =
      fa::run_tasks(tasks.count, tasks.scratch, std::min(p->threads, tasks.count),
                    run.is_asker() ? &run : nullptr,
                    [&](int64_t task, char* scratch) { tasks.run(*p, task, scratch); });
  return run.ended() ? FA_INTERRUPTED : done ? FA_OK : FA_NO_MEMORY;
}

// Waking a thread takes as long as turning some 2^17 numbers, measured.
int64_t fa_cpu_norm_rope(const FaNormRope* p) {
  if (p->cu && !fa::rises(p->cu, p->sequences, p->M, p->N)) return FA_BAD_OFFSET;
  const fa::NormRopeTasks tasks = fa::norm_rope_tasks(*p);
  fa::ScratchMemory& memory = fa::memory_of_thread().workspace;
  char* workspace = tasks.workspace ? memory.get(tasks.workspace) : nullptr;
  if (tasks.workspace && !workspace) return FA_NO_MEMORY;
  const double numbers = double(p->B * p->M) * (p->part[0].H + p->part[1].H) * p->D;
  const double worth = 1 + numbers / (1 << 17);
  const int64_t threads = worth < p->threads ? static_cast<int64_t>(worth) : p->threads;
  const bool done =
      fa::run_tasks(tasks.count, tasks.scratch, threads, nullptr,
                    [&](int64_t task, char* scratch) { tasks.run(*p, task, scratch, workspace); });
  if (done) tasks.finish(*p, workspace);
  memory.trim();
  return done ? FA_OK : FA_NO_MEMORY;
}

// Waking a thread takes as long as quantising some 2^16 numbers.
int64_t fa_cpu_append(const FaAppend* p) {
  if (const int64_t status = fa::bad_append(*p)) return status;
  const fa::RowWriter writer = fa::row_writer(*p);
  const int64_t tasks = fa::append_tasks(*p);
  const double worth = 1 + double(fa::all_new_rows(*p)) * p->Hk * p->D / (1 << 16);
  const int64_t threads = worth < p->threads ? static_cast<int64_t>(worth) : p->threads;
  const bool done = fa::run_tasks(
      tasks, p->D * writer.number_size, threads, nullptr,
      [&](int64_t task, char* scratch) { fa::append_rows(*p, writer, task, scratch); });
  return done ? FA_OK : FA_NO_MEMORY;
}

const char* fa_cpu_score_mod_ops(void) { return fa::kScoreModOps; }

void fa_cpu_poison(int64_t on) { fa::poisoned = on != 0; }

float fa_cpu_read_sum(const float* x, int64_t n, int64_t streams) {
  return fa::read_sum(x, n, streams);
}

}  // extern "C"
