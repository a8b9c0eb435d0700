// Facts that llama.cpp does not expose: the kind of memory, and the cells that exist. Nothing here changes a memory;
// edit.h does. The caller holds the context's lock and has checked ids and ranges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "llama.h"

namespace pykv {

enum memory_kind : int {
    MEMORY_NONE,
    MEMORY_ATTENTION,
    MEMORY_SLIDING_WINDOW,
    MEMORY_RECURRENT,
    MEMORY_HYBRID,
    MEMORY_HYBRID_SLIDING_WINDOW,
    MEMORY_OTHER,  // a class with indexes or compressed copies
};

// Why a memory cannot be shifted.
struct no_shift {
    std::string why;                // "" if it can
    bool        of_type = false;    // another type of K would avoid it
    bool        multi_pos = false;  // M-RoPE
};

enum shift_problem : int { SHIFT_FITS, SHIFT_NEGATIVE, SHIFT_OVERFLOW, SHIFT_COLLIDES };

struct model_facts {
    bool     learned_positions;  // a table of absolute positions: n_ctx_train is a hard limit
    bool     causal;
    bool     has_classifier;     // needed by pooling_type "rank"
    int32_t  n_embd_out;
    int32_t  n_cls_out;
    uint64_t k_per_cell;         // K values per cell, summed over layers
    uint64_t v_per_cell;
    uint64_t state_values;       // of one recurrent state, summed over layers
};

// Effective parameters of a context.
struct context_facts {
    bool    flash_attn;
    bool    kv_unified;
    bool    causal;
    int     pooling_type;
    int32_t n_threads;
    int32_t n_threads_batch;
};

// What never changes about a memory and the graph over it.
struct memory_traits {
    memory_kind kind = MEMORY_NONE;
    std::string name = "none";  // of llama.cpp's class
    no_shift    shift;
    llama_pos   max_position = 0;      // of a token: limited by a learned table, by RoPE in float32, or by int32
    bool        bounded = false;       // positions index the cells, so they start at 0 and end with the context
    bool        picks_blocks = false;  // attention picks blocks of neighbouring cells that belong to the same sequences
    bool        may_be_dense = false;  // graphs attend to all cells if flash attention is off or sequences share a stream
    bool        has_layout = true;     // the layout of its states is known here
    bool        whole_only = false;    // sequences can be changed only as a whole: they are states or compressed copies
    bool        has_rest = false;      // a state has parts that are not in blocks (state_parts) and cannot be rewound
    bool        windowed = false;      // some layers keep only a sliding window of cells
    uint32_t    n_stream = 1;
    bool        gives_logits = false;  // some graphs omit them if they give embeddings
    bool        endless = false;       // RoPE of 0 dimensions, an endless loop in ggml's kernel
    std::string fault;                 // why llama.cpp would misread the graph's results, or ""
};

struct memory_facts {
    uint32_t n_cells;          // cells per stream of the attention part, or number of recurrent states
    uint32_t n_swa;
    uint32_t max_rollback;     // tokens that a recurrent state can be rolled back
    uint64_t bytes_total;
    uint64_t bytes_per_token;  // of attention cells; a recurrent state has a fixed size
};

// PART_INDEX: the index of sparse attention, with one cell for each attention cell.
enum memory_part : int { PART_ATTENTION, PART_WINDOW, PART_RECURRENT, PART_INDEX };

model_facts look_at_model(const llama_model * model);
std::string description_of(const llama_model * model);
// Metadata of the file as alternating keys and values.
std::vector<std::string> metadata_of(const llama_model * model);
// Whether every cached head size is a multiple of this type's block size.
bool heads_divisible(const llama_model * model, ggml_type type, bool keys);

// Whether this build has no fast/: it uses llama.cpp's own functions and cannot move cells.
bool is_plain();

class memory;  // a classified llama_memory_t; dies with its context

// ggml's names of the memory's buffer types.
std::vector<std::string> buffer_types(const memory * m);

memory * memory_new(llama_context * ctx) noexcept;
void memory_delete(memory * m) noexcept;

const memory_traits & traits_of(const memory * m) noexcept;
context_facts look_at_context(const llama_context * ctx);
memory_facts look_at_memory(const memory * m);

// Visit used cells in order: start with stream = cell = 0, call until false. `members`
// has room for n_seq_max flags.
bool next_cell(const memory * m, memory_part part, uint32_t n_seq_max, uint32_t & stream, uint32_t & cell,
               llama_pos & pos, uint8_t * members);
uint32_t n_used(const memory * m, memory_part part);
// Number of attention cells up to the highest used one, maximum over streams.
uint32_t n_spanned(const memory * m);
// Free cells for a decode into this sequence; -1 if sequences do not consist of cells.
int64_t  n_free(const memory * m, llama_seq_id seq);

// Positions of a sequence, and its number of cells; 0, -1 and 0 if it is empty. One recurrent state stands for all tokens
// up to its position.
struct extent {
    llama_pos lo = 0, hi = -1;
    size_t    n = 0;
};
extent extent_of(const memory * m, llama_seq_id seq);
// Whether cells can be moved in all caches of the memory, because their order has no meaning.
bool can_compact(const memory * m);
// Effect of a removal of [p0, p1).
enum removal {
    REMOVE_NOTHING,  // the range is empty
    REMOVE_EMPTY,    // the whole sequence, which has no cells
    REMOVE_WHOLE,    // the whole sequence
    REMOVE_PART,     // a part that can be removed
    REMOVE_STEPS,    // its end, by rolling back the recurrent state
    REMOVE_REFUSED,  // a part that cannot be removed: cells that the next token sees are missing, or `whole_only`
};
removal removal_of(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, bool whole_only);
// Lowest position from which every part of the memory holds the sequence, or -1.
llama_pos first_kept(const memory * m, llama_seq_id seq);
// Cell of the sequence's recurrent state, or -1.
int32_t state_cell(const memory * m, llama_seq_id seq);
// Whether the sequence has any position in [p0, p1).
bool holds(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1);
// Highest position below p, or -1.
llama_pos last_before(const memory * m, llama_seq_id seq, llama_pos p);
// Lowest position from p on that the sequence holds, or the largest one.
llama_pos first_from(const memory * m, llama_seq_id seq, llama_pos p);
// Whether a recurrent state can be rolled back to before p0, with all cells that the next token sees in the other parts
// (rollback.cpp).
bool can_step_back(const memory * m, llama_seq_id seq, llama_pos p0);
// First position that a query at `next` sees.
llama_pos window_start(const memory * m, llama_pos next) noexcept;
// Fewest tokens to which a sequence can be truncated if its window cells begin at `first`.
llama_pos least_cut(const memory * m, llama_pos first) noexcept;
// First position from which the window cache holds all cells of the sequence.
llama_pos window_begin(const memory * m, llama_seq_id seq);
// First window cell that a truncation by up to one window needs, or later if such cells are missing. The largest
// position if that does not apply: no window, or a recurrent state.
llama_pos spare_begin(const memory * m, llama_seq_id seq);
// First position seen after a rewind from `last` by up to one window.
llama_pos cut_begin(const memory * m, llama_pos last) noexcept;
// Whether the window cache has every cell that a query at `next` sees.
bool window_intact(const memory * m, llama_seq_id seq, llama_pos next);
// Whether the window cache has dropped any cell of the sequence.
bool window_dropped(const memory * m, llama_seq_id seq);
// Number of cells that the window cache has for a sequence, its own included, without harming other sequences: they
// keep the cells that a rewind needs (spare_begin), and in a cache smaller than the context those they will need.
uint32_t window_room(const memory * m, llama_seq_id seq, uint32_t n_seq_max);
// Whether the window cache has room for n cells of a sequence after its own are removed.
bool window_has_room(const memory * m, llama_seq_id seq, uint32_t n);
// Whether another sequence shares a cell of this one in [p0, p1).
bool shared(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1);
// Whether both sequences hold the same cells.
bool same_cells(const memory * m, llama_seq_id a, llama_seq_id b);

shift_problem add_check(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, int64_t delta, llama_pos & where);
shift_problem div_check(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, int d, llama_pos & where);

// Largest n_rs_seq up to `asked` for which llama.cpp's graph of this model has room. May throw.
uint32_t most_kept(const llama_context * ctx, uint32_t asked);

// Let the next decode, encode or update create a new scheduler, because a failed call may have left this one unusable.
void distrust_scheduler(llama_context * ctx) noexcept;
// Disable graph reuse: an RPC server forgets its last graph when any buffer is freed.
void build_each_graph(llama_context * ctx) noexcept;

}  // namespace pykv
