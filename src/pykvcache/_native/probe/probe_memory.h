// The classified memory behind probe.h, and llama.cpp's private members. The only header that includes llama.cpp's
// private ones.
#pragma once

#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llama-adapter.h"
#include "llama-arch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-io.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-kv-cache.h"
#include "llama-kv-cells.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"
#include "probe.h"
#include "probe_kv.h"

namespace pykv {

// llama.cpp's mask adds 32 and the window to a position, in int32.
constexpr llama_pos MOST_POSITIONS = std::numeric_limits<llama_pos>::max() - 32;

// Where llama.cpp keeps a sequence's last `n` earlier states: in planes of one cell, the newest of them in the plane
// after `plane`.
struct earlier_states {
    int32_t  cell = -1;
    uint32_t plane = 0, n = 0;
};

// A memory has at most one attention cache, an index of its cells, a window cache, and a recurrent part.
class memory : public memory_traits {
  public:
    memory() { max_position = MOST_POSITIONS; }

    float                     key_scale = 1;  // factor by which RoPE scales keys
    bool                      keys_only = false;  // V is read from the K of the same cell
    llama_memory_i *          mem = nullptr;
    llama_kv_cache *          base = nullptr;
    llama_kv_cache *          swa = nullptr;
    llama_kv_cache *          index = nullptr;  // of sparse attention: one cell per cell of base
    const llama_hparams *     index_hparams = nullptr;
    llama_memory_recurrent *  recurrent = nullptr;
    const llama_hparams *     hparams = nullptr;
    llm_arch                  arch = LLM_ARCH_UNKNOWN;
    std::map<uint32_t, key_rope> ropes;  // by layer of the model
    std::map<memory_part, hadamard_facts> turned;
    std::vector<llama_pos>    first = std::vector<llama_pos>(LLAMA_MAX_SEQ, 0);
    std::vector<earlier_states> earlier = std::vector<earlier_states>(LLAMA_MAX_SEQ);
};

inline llama_kv_cache * cache_of(const memory * m, memory_part part) {
    return part == PART_WINDOW ? m->swa : part == PART_INDEX ? m->index : m->base;
}
inline const llama_hparams & hparams_of(const memory * m, memory_part part) {
    return part == PART_INDEX ? *m->index_hparams : *m->hparams;
}

// Build the model's graph and derive from it: ropes, turned, gives_logits, endless, fault, max_position.
void read_graph(const llama_context * ctx, memory & m);
// Whether a shift rotates the keys of a layer as the graph did.
bool shift_is_like_graph(const llama_context * ctx, const memory & m, uint32_t il);

constexpr llama_pos POS_END = std::numeric_limits<llama_pos>::max();

// An open end as llama.h writes it: with streams it copies nothing else.
inline llama_pos begin_of(llama_pos p0) { return p0 ? p0 : -1; }
inline llama_pos end_of(llama_pos p1) { return p1 != POS_END ? p1 : -1; }

using cell_set = std::set<std::pair<llama_pos, uint32_t>>;  // of one sequence: position, cell

inline cell_set::const_iterator from(const cell_set & cells, llama_pos p) { return cells.lower_bound({p, 0}); }

// Private members of llama.cpp's classes, which an explicit template instantiation may name. If a class changes, this
// fails to compile.
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
