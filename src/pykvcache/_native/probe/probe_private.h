// Private members of llama.cpp's context, and its caches' sets of positions.
#pragma once

#include <limits>

#include "llama-adapter.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "opened.h"
#include "probe_pin.h"

namespace pykv {

constexpr llama_pos POS_END = std::numeric_limits<llama_pos>::max();

inline cell_set::const_iterator from(const cell_set & cells, llama_pos p) { return cells.lower_bound({p, 0}); }

namespace opened {

PYKV_OPEN(graph_params, llama_context, graph_params,
          llm_graph_params (llama_context::*)(llm_graph_result *, const llama_ubatch &,
                                              const llama_memory_context_i *, llm_graph_type) const)
PYKV_OPEN(sched_need_reserve, llama_context, sched_need_reserve, bool llama_context::*)
PYKV_OPEN(loras, llama_context, loras, llama_adapter_loras_ptr llama_context::*)
PYKV_OPEN(graph_reuse_disable, llama_context, graph_reuse_disable, bool llama_context::*)

}  // namespace opened

}  // namespace pykv
