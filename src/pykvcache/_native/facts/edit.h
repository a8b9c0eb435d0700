// All functions that change a context's memory. Only sequence_facts can make the key, so only it can call them. It
// updates the facts about sequences together with the memory (sequences.h).
#pragma once

#include "adapters.h"
#include "guarded.h"
#include "probe.h"
#include "probe_state.h"
#include "system.h"

namespace pykv {

class edit_key {
    friend class sequence_facts;
    edit_key() {}
};

// As in probe.h: the context's lock is held, ids and ranges are valid, an open end is 0 or the largest
// position. Functions that return int32_t return CAUGHT after an exception.

// First position of a sequence with a recurrent state, which does not store it; kept through moves.
void    set_first(edit_key, memory * m, llama_seq_id seq, llama_pos first);
int32_t clear_cells(edit_key, memory * m, bool data) noexcept;
int32_t remove_cells(edit_key, memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1) noexcept;  // 0: refused
// Whether copy_cells() replaces the destination atomically; otherwise the destination must be empty.
bool    copies_replace(const memory * m);
int32_t copy_cells(edit_key, memory * m, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) noexcept;
int32_t add_cells(edit_key, memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta) noexcept;
// Adds each cell's own shift, because llama_memory_seq_div rotates K the wrong way.
int32_t divide_cells(edit_key, memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, int d) noexcept;
// Compact each stream: move used cells, with their data, to the lowest places. Returns the number of moved cells or
// CAUGHT. Nothing may be pending. The search for free cells continues above them.
int64_t move_cells_down(edit_key, memory * m) noexcept;

// Apply pending shifts and stream copies now (llama_context::memory_update); 1 on failure. Avoids a bug: llama.cpp
// multiplies all keys by YaRN's length factor again with each shift.
int32_t flush(edit_key, llama_context * ctx, const memory * m) noexcept;

// Restore a checked state of a sequence, all or nothing; 1 on success. 0 if llama.cpp's own reader is needed: the
// memory has more than cells, or no free cells besides the old ones. `two`: a second thread may help.
int32_t state_place(edit_key, memory * m, bool v_trans, llama_seq_id seq, const std::vector<state_block> & blocks,
                    const std::vector<state_piece> & pieces, bool two) noexcept;
// Restore a checked state with llama.cpp's reader; CAUGHT if it refuses.
int32_t state_read(edit_key, memory * m, llama_seq_id seq, bool partial, const std::vector<state_piece> & pieces) noexcept;
// Remove the sequence from the window and recurrent parts; the attention part keeps it.
int32_t drop_parts(edit_key, memory * m, llama_seq_id seq) noexcept;
// Zero all free recurrent states: a new sequence starts with 0 times the old contents, which may be NaN.
int32_t zero_free_states(edit_key, memory * m) noexcept;
// Make new sequences in free recurrent cells start from zeros: an aborted step may have marked a cell as zeroed
// without writing it.
void    forget_free_states(edit_key, memory * m) noexcept;
// Repair each stream's search position: after a failed decode it may be that of another stream.
void    settle_searches(edit_key, memory * m) noexcept;
// Roll a sequence back to before position p0 by an earlier state (rollback.cpp); 0: refused.
int32_t step_back(edit_key, memory * m, llama_seq_id seq, llama_pos p0) noexcept;
// Record which earlier states are valid after a decode; `before`: cells of all sequences' states before it.
void    note_earlier(edit_key, const llama_context * ctx, memory * m, const llama_batch & batch, const int32_t * before) noexcept;
void    share_earlier(edit_key, memory * m, llama_seq_id src, llama_seq_id dst) noexcept;
void    forget_earlier(edit_key, memory * m, llama_seq_id seq) noexcept;  // -1: of all
// Truncate the attention part at `from`.
int32_t cut_attention(edit_key, memory * m, llama_seq_id seq, llama_pos from) noexcept;

inline int32_t run_decode(edit_key, llama_context * ctx, const llama_batch & batch) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        rest_x87();
        const int32_t code = llama_decode(ctx, batch);
        llama_synchronize(ctx);  // results are read later, possibly by another thread
        return code;
    });
}

// Switch adapters. Reserves the graphs now, so that running out of memory shows here. 1 if llama.cpp refuses the
// control vector. `base` gets all of them but the activated one; null if there is none.
int32_t use_adapters(edit_key, llama_context * ctx, adapter_set & set, adapter_map & base) noexcept;
// Exchange the LoRA adapters. Reserves no graphs: the ones with all adapters are the largest.
void    swap_adapters(edit_key, llama_context * ctx, adapter_map & other) noexcept;

inline int32_t run_encode(edit_key, llama_context * ctx, const llama_batch & batch) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        rest_x87();
        const int32_t code = llama_encode(ctx, batch);
        llama_synchronize(ctx);
        return code;
    });
}

}  // namespace pykv
