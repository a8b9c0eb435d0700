// The classified memory behind probe.h. With probe_private.h the only header that includes llama.cpp's private ones.
#pragma once

#include <limits>
#include <map>
#include <string>
#include <vector>

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-io.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"
#include "probe.h"
#include "probe_kv.h"
#include "probe_private.h"

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
    bool                      gives_logits = false;
    bool                      endless = false;
    std::string               fault;  // why llama.cpp would misread the graph's results
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
// Why llama.cpp would misread a graph's results, or "" (probe_graph.cpp).
std::string graph_fault(const llm_graph_result & result, const llama_context * ctx);
// Highest position with correct angles in float32 (probe_positions.cpp).
llama_pos last_position(const key_rope & rope);
// Whether a shift rotates the keys of a layer as the graph did.
bool shift_is_like_graph(const llama_context * ctx, const memory & m, uint32_t il);

}  // namespace pykv
