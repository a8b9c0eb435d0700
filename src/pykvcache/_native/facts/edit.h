// Every function that changes a context's memory. They can be called by sequence_facts alone, which
// keeps what is known of the sequences in step (sequences.h): no other class can make the key.
#pragma once

#include "adapters.h"
#include "guarded.h"
#include "probe.h"
#include "probe_state.h"
#include "x87.h"

namespace pykv {

class edit_key {
    friend class sequence_facts;
    edit_key() {}
};

// As in probe.h: the context's lock is held, ids and ranges are valid, an open end is 0 or the largest
// position. What returns int32_t returns CAUGHT where something was thrown.

// A recurrent state does not know where its sequence began: set here, kept through moves.
void    set_first(edit_key, memory * m, llama_seq_id seq, llama_pos first);
int32_t clear_cells(edit_key, memory * m, bool data) noexcept;
int32_t remove_cells(edit_key, memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1) noexcept;  // 0: refused
// Whether copy_cells() replaces what the destination held, all or nothing; elsewhere it must hold nothing.
bool    copies_replace(const memory * m);
int32_t copy_cells(edit_key, memory * m, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) noexcept;
int32_t add_cells(edit_key, memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta) noexcept;
// llama_memory_seq_div rotates K the wrong way; this adds each cell's own shift instead.
int32_t divide_cells(edit_key, memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, int d) noexcept;
// Move the cells of every stream to its lowest cells, data and all; the number of cells that moved,
// or CAUGHT. Nothing may be pending. The search for free cells goes on above them.
int64_t move_cells_down(edit_key, memory * m, uint32_t n_seq_max) noexcept;

// Apply pending shifts and stream copies now (llama_context::memory_update); 1 if that failed.
// llama.cpp would multiply all keys by YaRN's length factor again with each shift; not here.
int32_t flush(edit_key, llama_context * ctx, const memory * m) noexcept;

// Make a sequence hold a state that was found to fit, all or nothing: 1; or 0 where that takes
// llama.cpp's own reader: memories with more than cells, no room beside the rest.
// `two`: a second thread may help.
int32_t state_place(edit_key, memory * m, bool v_trans, llama_seq_id seq, const std::vector<state_block> & blocks,
                    const std::vector<state_piece> & pieces, bool two) noexcept;
// Put a state that was found to fit into the memory; CAUGHT when llama.cpp refuses it.
int32_t state_read(edit_key, memory * m, llama_seq_id seq, bool partial, const std::vector<state_piece> & pieces) noexcept;
// Remove the sequence from the window and the recurrent part; the attention part keeps it.
int32_t drop_parts(edit_key, memory * m, llama_seq_id seq) noexcept;
// Make the recurrent states zero that no sequence holds: a new one begins with 0 times what lies there.
int32_t zero_free_states(edit_key, memory * m) noexcept;
// The next sequence in a recurrent cell that nobody holds begins with zeros: a step that was stopped may have
// noted that they are there, and not written them.
void    forget_free_states(edit_key, memory * m) noexcept;
// After a decode that failed, a stream may search for free cells where another one would go on.
void    settle_searches(edit_key, memory * m) noexcept;
// Make a sequence hold what it held before position p0, by an earlier state (rollback.h); 0: refused.
int32_t step_back(edit_key, memory * m, llama_seq_id seq, llama_pos p0) noexcept;
// Which earlier states are true after a decode; `before`: where the states of all sequences were.
void    note_earlier(edit_key, const llama_context * ctx, memory * m, const llama_batch & batch, const int32_t * before) noexcept;
void    share_earlier(edit_key, memory * m, llama_seq_id src, llama_seq_id dst) noexcept;
void    forget_earlier(edit_key, memory * m, llama_seq_id seq) noexcept;  // -1: of all
// Remove the positions from `from` on from the attention part.
int32_t cut_attention(edit_key, memory * m, llama_seq_id seq, llama_pos from) noexcept;

inline int32_t run_decode(edit_key, llama_context * ctx, const llama_batch & batch) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        rest_x87();
        const int32_t code = llama_decode(ctx, batch);
        llama_synchronize(ctx);  // results are read later, possibly by another thread
        return code;
    });
}

// Compute with other adapters from now on: reserve the graphs now, so that a lack of memory shows here.
// 1 where llama.cpp refuses the control vector.
int32_t use_adapters(edit_key, llama_context * ctx, adapter_set & set) noexcept;

inline int32_t run_encode(edit_key, llama_context * ctx, const llama_batch & batch) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        rest_x87();
        const int32_t code = llama_encode(ctx, batch);
        llama_synchronize(ctx);
        return code;
    });
}

}  // namespace pykv
