// Accessors of a cache's cells that differ between versions of llama.cpp: in older ones some are private.
// CMake detects them (cmake/Pin.cmake).
#pragma once

#include <set>
#include <utility>

#include "llama-kv-cache.h"
#include "llama-kv-cells.h"
#include "opened.h"

namespace pykv {

using cell_set = std::set<std::pair<llama_pos, uint32_t>>;  // of one sequence: position, cell

#ifdef PYKVCACHE_HAS_SEQ_POS_GET
inline const cell_set & held_cells(const llama_kv_cells & cells, llama_seq_id seq) { return cells.seq_pos_get(seq); }
#else
namespace opened {
PYKV_OPEN(held, llama_kv_cells, seq_pos, cell_set (llama_kv_cells::*)[LLAMA_MAX_SEQ])
}
inline const cell_set & held_cells(const llama_kv_cells & cells, llama_seq_id seq) {
    return (cells.*member(opened::held()))[seq];
}
#endif

#ifdef PYKVCACHE_HAS_GET_STREAM
inline uint32_t stream_of(const llama_kv_cache & cache, llama_seq_id seq) { return cache.get_stream(seq); }
#else
namespace opened {
PYKV_OPEN(streams, llama_kv_cache, seq_to_stream, std::vector<uint32_t> llama_kv_cache::*)
}
inline uint32_t stream_of(const llama_kv_cache & cache, llama_seq_id seq) {
    return (cache.*member(opened::streams()))[seq];
}
#endif

inline const cell_set & held_cells(const llama_kv_cache & cache, llama_seq_id seq) {
    return held_cells(cache.get_cells(seq), seq);
}

}  // namespace pykv
