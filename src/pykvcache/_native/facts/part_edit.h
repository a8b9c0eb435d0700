// Changing one part of a memory alone, which llama.h cannot: for states of the part that forgets.
#pragma once

#include "probe.h"

namespace pykv {

// Lowest position from p on that the sequence holds, or INT32_MAX.
llama_pos first_from(const memory * m, llama_seq_id seq, llama_pos p);
// How many cells of a sequence the window cache takes, once those that it has are gone, without a loss to others: none
// that they can be cut with (spare_begin), and in a cache that is smaller than the context none that they will need.
uint32_t window_room(const memory * m, llama_seq_id seq, uint32_t n_seq_max);
// Whether the window cache has room for n cells of a sequence once those that it has are gone.
bool window_has_room(const memory * m, llama_seq_id seq, uint32_t n);

}  // namespace pykv
