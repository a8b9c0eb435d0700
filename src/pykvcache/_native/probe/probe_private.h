// Private members of llama.cpp's classes, which an explicit template instantiation may name. If a class changes, this
// fails to compile.
#pragma once

#include <limits>
#include <set>
#include <utility>

#include "llama-adapter.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-kv-cache.h"
#include "llama-kv-cells.h"

namespace pykv {

constexpr llama_pos POS_END = std::numeric_limits<llama_pos>::max();

// An open end as llama.h writes it: with streams it copies nothing else.
inline llama_pos begin_of(llama_pos p0) { return p0 ? p0 : -1; }
inline llama_pos end_of(llama_pos p1) { return p1 != POS_END ? p1 : -1; }

using cell_set = std::set<std::pair<llama_pos, uint32_t>>;  // of one sequence: position, cell

inline cell_set::const_iterator from(const cell_set & cells, llama_pos p) { return cells.lower_bound({p, 0}); }

namespace opened {

template <class Name, typename Name::type Member> struct open {
    friend constexpr typename Name::type member(Name) { return Member; }
};

#define PYKV_OPEN(name, owner, what, ...)                   \
    struct name {                                           \
        using type = __VA_ARGS__;                           \
        friend constexpr type member(name);                 \
    };                                                      \
    template struct open<name, &owner::what>;

PYKV_OPEN(graph_params, llama_context, graph_params,
          llm_graph_params (llama_context::*)(llm_graph_result *, const llama_ubatch &,
                                              const llama_memory_context_i *, llm_graph_type) const)
PYKV_OPEN(sched_need_reserve, llama_context, sched_need_reserve, bool llama_context::*)
PYKV_OPEN(loras, llama_context, loras, llama_adapter_loras_ptr llama_context::*)
PYKV_OPEN(graph_reuse_disable, llama_context, graph_reuse_disable, bool llama_context::*)
PYKV_OPEN(seq_pos, llama_kv_cells, seq_pos, cell_set (llama_kv_cells::*)[LLAMA_MAX_SEQ])
PYKV_OPEN(v_heads, llama_kv_cache, v_heads, std::vector<uint32_t> llama_kv_cache::*)
PYKV_OPEN(streams, llama_kv_cache, seq_to_stream, std::vector<uint32_t> llama_kv_cache::*)

}  // namespace opened

inline const cell_set & held_cells(const llama_kv_cells & cells, llama_seq_id seq) {
    return (cells.*member(opened::seq_pos()))[seq];
}
inline const cell_set & held_cells(const llama_kv_cache & cache, llama_seq_id seq) {
    return held_cells(cache.get_cells(seq), seq);
}

inline uint32_t stream_of(const llama_kv_cache & cache, llama_seq_id seq) {
    return (cache.*member(opened::streams()))[seq];
}

}  // namespace pykv
