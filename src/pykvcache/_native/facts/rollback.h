// Roll back recurrent states: llama.cpp keeps n_rs_seq earlier states besides the newest one, but does not know how
// many of them are valid.
#pragma once

#include "probe.h"

namespace pykv {

// Number of tokens that the recurrent state of a sequence can be rolled back.
uint32_t n_back(const memory * m, llama_seq_id seq);
// Whether the sequence can be rolled back to before p0, with all cells that the next token sees in the other parts.
bool can_step_back(const memory * m, llama_seq_id seq, llama_pos p0);
// Largest n_rs_seq up to `asked` for which llama.cpp's graph of this model has room. May throw.
uint32_t most_kept(const llama_context * ctx, uint32_t asked);

}  // namespace pykv
