// What llama.cpp's context keeps to itself, and the sets of positions that its caches show.
#pragma once

#include <limits>
#include <set>
#include <utility>

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-kv-cache.h"
#include "llama-kv-cells.h"
#include "opened.h"

namespace pykv {

using cell_set = std::set<std::pair<llama_pos, uint32_t>>;  // of one sequence: position, cell

constexpr llama_pos POS_END = std::numeric_limits<llama_pos>::max();

inline cell_set::const_iterator from(const cell_set & cells, llama_pos p) { return cells.lower_bound({p, 0}); }

namespace opened {

PYKV_OPEN(graph_params, llama_context, graph_params,
          llm_graph_params (llama_context::*)(llm_graph_result *, const llama_ubatch &,
                                              const llama_memory_context_i *, llm_graph_type) const)
PYKV_OPEN(sched_need_reserve, llama_context, sched_need_reserve, bool llama_context::*)

}  // namespace opened

}  // namespace pykv
