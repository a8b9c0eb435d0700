// Change one part of a memory, which llama.h cannot: for partial states (window, recurrent state).
#pragma once

#include "probe.h"

namespace pykv {

// Lowest position from p on that the sequence holds, or INT32_MAX.
llama_pos first_from(const memory * m, llama_seq_id seq, llama_pos p);
// Number of cells that the window cache has for a sequence, its own included, without harming other sequences: they
// keep the cells that a rewind needs (spare_begin), and in a cache smaller than the context those they will need.
uint32_t window_room(const memory * m, llama_seq_id seq, uint32_t n_seq_max);
// Whether the window cache has room for n cells of a sequence after its own are removed.
bool window_has_room(const memory * m, llama_seq_id seq, uint32_t n);

}  // namespace pykv
