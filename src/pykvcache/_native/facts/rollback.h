// Stepping a recurrent state back: llama.cpp keeps the states after a sequence's last tokens beside the
// newest one (n_rs_seq of them), and does not know how many of these are still true.
#pragma once

#include "probe.h"

namespace pykv {

// Tokens that the recurrent state of a sequence can step back now.
uint32_t n_back(const memory * m, llama_seq_id seq);
// Whether everything from position p0 on can go that way, and the other parts keep what is seen then.
bool can_step_back(const memory * m, llama_seq_id seq, llama_pos p0);
// The most states to keep for which llama.cpp's graph of this model has room, `asked` where that is one. May throw.
uint32_t most_kept(const llama_context * ctx, uint32_t asked);

}  // namespace pykv
