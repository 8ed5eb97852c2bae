// Which kernels run a call, on the instruction set that is chosen.
#pragma once
#include "../base/plan.h"

namespace fa {

Plan make_plan(const Params& p, int64_t pass);
IndexerTasks indexer_tasks(const FaIndexer& p);
NormRopeTasks norm_rope_tasks(const FaNormRope& p);

// The gradients of pages, which sequences share, are sums over sequences: one plan has them all.
inline bool shares_pages(const Params& p, int64_t pass) { return pass == FA_BACKWARD && p.page; }

}  // namespace fa
