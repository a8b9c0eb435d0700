// Facts that llama.cpp keeps to itself: which memory this is, and which cells are really there.
//
// probe_memory.h and probe_private.h are the only files that include llama.cpp's private headers.
// Nothing here changes a memory: edit.h does. Every function expects the context's lock to be held and
// ids and ranges to be valid.
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

enum no_shift : int {
    SHIFT_OK,
    SHIFT_MULTI_POS,   // M-RoPE: several positions per token
    SHIFT_ARCH,        // per-layer rotary sizes (step35), or a class without shifts
    SHIFT_NO_ROPE,     // a sub-cache in which no layer is rotated
    SHIFT_BF16,        // no kernel rotates bf16
    SHIFT_QUANTIZED,   // quantised keys without a Hadamard matrix, which the shift graph reads anyway
    SHIFT_PARTIAL,     // quantised keys of which a part is rotated, and the matrix mixes both
    SHIFT_SCALED,      // YaRN with another length factor in each part
    SHIFT_OTHERWISE,   // layers that shifts rotate by other settings than the graph, or though it does not
    SHIFT_TABLE,       // a learned table of positions, which keys and values were computed from
};

enum shift_problem : int { SHIFT_FITS, SHIFT_NEGATIVE, SHIFT_OVERFLOW, SHIFT_COLLIDES };

struct model_facts {
    bool     learned_positions;  // a table of absolute positions: n_ctx_train is a hard limit
    bool     causal;
    bool     has_classifier;     // what pooling_type "rank" reads its scores from
    int32_t  n_embd_out;
    int32_t  n_cls_out;
    uint64_t k_per_cell;         // K values per cell, summed over layers
    uint64_t v_per_cell;
    uint64_t state_values;       // of one recurrent state, summed over layers
};

// What llama.cpp made of the parameters it was given.
struct context_facts {
    bool    flash_attn;
    bool    kv_unified;
    bool    causal;
    int     pooling_type;
    int32_t n_threads;
    int32_t n_threads_batch;
    bool    gives_logits;  // some graphs leave them out beside embeddings
    bool    endless;       // RoPE of 0 dimensions, of which ggml's kernel makes an endless loop
    const char * fault;    // what llama.cpp would read wrong of the graph's results, or ""
};

struct memory_facts {
    uint32_t n_cells;          // cells per stream of the attention part, states of a recurrent one
    uint32_t n_swa;
    uint32_t max_rollback;     // tokens that a recurrent state can step back
    uint64_t bytes_total;
    uint64_t bytes_per_token;  // of attention cells; a recurrent state costs the same for any length
};

// The index of sparse attention has a cell of its own for each of attention's: what is looked for among them.
enum memory_part : int { PART_ATTENTION, PART_WINDOW, PART_RECURRENT, PART_INDEX };

model_facts look_at_model(const llama_model * model);
// Whether every cached head size is a multiple of the block of this type.
bool heads_divisible(const llama_model * model, ggml_type type, bool keys);

// Whether this build does without fast/: on llama.cpp's own functions, cells stay where they are.
bool is_plain();

class memory;  // a classified llama_memory_t; dies with its context

// ggml's names of what it lies in.
std::vector<std::string> buffer_types(const memory * m);

memory * memory_new(llama_context * ctx) noexcept;
void memory_delete(memory * m) noexcept;

memory_kind  kind(const memory * m);
const char * class_name(const memory * m);
no_shift     why_no_shift(const memory * m);
// The highest position that a token may have: of a learned table, of RoPE in float32, or of an int32.
llama_pos    max_position(const memory * m);
// Whether positions index the cells, so that they begin at 0 and end with the context.
bool         bounded(const memory * m);
// Whether attention goes to blocks of neighbouring cells that belong to the same sequences.
bool         picks_blocks(const memory * m);
// Whether graphs attend to all cells where flash attention is off, or sequences share a stream.
bool         may_be_dense(const memory * m) noexcept;
// Whether it is known here how a state of it is laid out.
bool         has_layout(const memory * m) noexcept;
// Whether sequences go as wholes alone: folded into a state, or into copies that cannot be cut.
bool         whole_only(const memory * m);
// Whether a state has parts that no block holds (state_parts): they cannot be rewound.
bool         has_rest(const memory * m) noexcept;
// Whether a part of the layers keeps a sliding window of cells only.
bool         windowed(const memory * m);
uint32_t     n_stream(const memory * m);
context_facts look_at_context(const llama_context * ctx, const memory * m);
memory_facts look_at_memory(const memory * m);

// Visit used cells in order: start with stream = cell = 0, go on until false. `members`
// has room for n_seq_max flags.
bool next_cell(const memory * m, memory_part part, uint32_t n_seq_max, uint32_t & stream, uint32_t & cell,
               llama_pos & pos, uint8_t * members);
uint32_t n_used(const memory * m, memory_part part);
// Cells of attention up to the highest used one, in the stream where that is highest.
uint32_t n_spanned(const memory * m);
// Cells that a decode into this sequence may still take; -1 where a sequence does not consist of cells.
int64_t  n_free(const memory * m, llama_seq_id seq);

// Lowest and highest position that the sequence holds; false when it holds nothing.
bool extent(const memory * m, llama_seq_id seq, llama_pos & lo, llama_pos & hi);
// Whether every cache of the memory could have its cells moved: their order has to mean nothing.
bool can_compact(const memory * m);
// What removing [p0, p1) of a sequence means.
enum removal {
    REMOVE_NOTHING,  // nothing is there
    REMOVE_EMPTY,    // all of it, and it has no cell
    REMOVE_WHOLE,    // all of it
    REMOVE_PART,     // a part that can go
    REMOVE_STEPS,    // the end of it, by an earlier state of the recurrent part
    REMOVE_REFUSED,  // a part that cannot: what queries from the end see is not all there, or `whole_only`
};
removal removal_of(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, bool whole_only);
// Lowest position from which every part of the memory still holds the sequence, or -1.
llama_pos first_kept(const memory * m, llama_seq_id seq);
// Where the recurrent state of a sequence is, or -1.
int32_t state_cell(const memory * m, llama_seq_id seq);
// Lowest position of what the sequence consists of, a recurrent state included; 0 where it holds nothing.
llama_pos first_of(const memory * m, llama_seq_id seq);
// Whether the sequence holds anything in [p0, p1).
bool holds(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1);
// Number of cells that the sequence holds.
size_t n_held(const memory * m, llama_seq_id seq);
// Highest held position below p, or -1.
llama_pos last_before(const memory * m, llama_seq_id seq, llama_pos p);
// First position that a query at `next` sees.
llama_pos window_start(const memory * m, llama_pos next) noexcept;
// The fewest tokens that a sequence can be cut to whose window cells begin at `first`.
llama_pos least_cut(const memory * m, llama_pos first) noexcept;
// The position from which on the window cache holds every cell of the sequence, up to its end.
llama_pos window_begin(const memory * m, llama_seq_id seq);
// Where the window cells of a sequence begin with which it can be cut by up to a window; later, where they are not all
// there. The largest position where nothing can be cut so: without a window, or with a recurrent state.
llama_pos spare_begin(const memory * m, llama_seq_id seq);
// The first position that queries see from up to a window before the one after `last`.
llama_pos cut_begin(const memory * m, llama_pos last) noexcept;
// Whether the window cache still has every cell that a query at `next` would see.
bool window_intact(const memory * m, llama_seq_id seq, llama_pos next);
// Whether the window cache has dropped any cell of the sequence.
bool window_dropped(const memory * m, llama_seq_id seq);
// Whether another sequence shares a cell of this one in [p0, p1).
bool shared(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1);
// Whether both sequences hold the very same cells.
bool same_cells(const memory * m, llama_seq_id a, llama_seq_id b);

shift_problem add_check(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, int64_t delta, llama_pos & where);
shift_problem div_check(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, int d, llama_pos & where);

// Let the next decode, encode or update make a new scheduler: what failed may have left this one half done.
void distrust_scheduler(llama_context * ctx) noexcept;
// A server of ggml's RPC forgets its last graph when any buffer is freed: it is not asked to run it again.
void build_each_graph(llama_context * ctx) noexcept;

}  // namespace pykv
