// llama.cpp's state bytes: the parts of a memory's state, checking bytes against them, and
// writing a sequence's state. state_layout.h describes the layout.
#pragma once

#include <string>
#include <vector>

#include "probe.h"
#include "probe_kv.h"

namespace pykv {

// Other versions have an unknown layout; cmake/Pin.cmake refuses them with one line.
static_assert(LLAMA_STATE_SEQ_VERSION >= 3 && LLAMA_STATE_SEQ_VERSION <= 4, "unknown version of llama.cpp's states");

// Whether a part stores the sizes of its Hadamard matrices.
constexpr bool STATES_SAY_ROTATIONS = LLAMA_STATE_SEQ_VERSION >= 4;

// Kinds of byte runs in a state. The numbers are stored in files: do not change them.
enum block_kind : int {
    BLOCK_CELLS,    // position, number of sequences, extension, sequence ids; per cell
    BLOCK_K,        // one row per cell
    BLOCK_V,        // one row per cell
    BLOCK_V_TRANS,  // one row per value dimension, which holds one element per cell
    BLOCK_R,        // recurrent: last inputs of the convolution; one row per cell
    BLOCK_PLE,      // recurrent: history of per-layer embeddings; one row per cell
    BLOCK_S,        // recurrent: the state; one row per cell
};

// For tensor_at(): attention rows that are not keys are values.
constexpr int which_of(block_kind kind) { return kind == BLOCK_K ? 0 : 1; }

// One kind of row that a part stores in one layer.
struct state_rows {
    memory_part part;
    block_kind  kind;
    uint32_t    layer;
    int32_t     type;
    uint32_t    n_embd;  // elements per row of one cell
    uint64_t    row_bytes;
    uint32_t    n_head, head_dim;  // of attention rows
};

struct state_part {
    memory_part part;
    uint32_t    n_stream;
    uint32_t    n_cells;  // per stream
    uint32_t    n_layer;  // as states count them
    bool        extended;  // cells carry llama_kv_cell_ext
    bool        v_trans;
    hadamard_facts rotations;
};

// Location of a run of bytes in a checked state.
struct state_block {
    memory_part part;
    block_kind  kind;
    uint32_t    stream, layer;
    uint32_t    n_cells;
    uint64_t    offset, size;
};

enum state_fault : int {
    STATE_FITS,
    STATE_TRUNCATED,
    STATE_TRAILING,
    STATE_DAMAGED,   // not a state of any memory
    STATE_MISMATCH,  // a state of another memory
    STATE_NO_ROOM,   // more cells than this memory has
    STATE_POSITION,  // a position above the context's maximum
    STATE_VALUE,     // NaN, infinity, or values whose products overflow
    STATE_UNKNOWN,   // the check itself failed; see caught()
};

// A fault of a state; `what` and the numbers if they apply.
struct fault {
    state_fault kind  = STATE_FITS;
    std::string why   = {};
    int64_t     value = 0, limit = 0;
    std::string what    = {};
    bool        counted = false;  // whether value and limit are set
};

struct state_piece {
    const uint8_t * data;
    size_t          size;
};

// A set of parts of a memory.
using part_set = uint32_t;
constexpr part_set only(memory_part part) { return 1u << part; }
constexpr part_set NO_PARTS = 0, ATTENTION_PARTS = only(PART_ATTENTION) | only(PART_INDEX), WINDOW_PARTS = only(PART_WINDOW),
                   RECURRENT_PARTS = only(PART_RECURRENT), PARTIAL_PARTS = WINDOW_PARTS | RECURRENT_PARTS,  // PARTIAL_ONLY's
                   CELL_PARTS = ATTENTION_PARTS | WINDOW_PARTS, ALL_PARTS = CELL_PARTS | RECURRENT_PARTS;

// The parts of `which` that the memory has, in a state's order.
std::vector<state_part> state_parts(const memory * m, bool v_trans, part_set which);
std::vector<state_rows> state_rows_of(const memory * m, bool v_trans, memory_part part);

// Check the bytes without touching the memory; `seq` is -1 for a whole context's state. `which`: parts in the state.
// `known`: parts whose values were checked before.
fault state_check(const memory * m, bool v_trans, uint32_t n_seq_max, llama_seq_id seq, part_set which,
                  const std::vector<state_piece> & pieces, std::vector<state_block> & blocks, part_set known) noexcept;

// A state to be written; valid until the memory changes.
class seq_state {
  public:
    virtual ~seq_state() = default;
    virtual void write(uint8_t * dst, bool two) const = 0;

    size_t size = 0;
};

// A sequence's state, or with -1 a context's: ALL_PARTS, PARTIAL_PARTS, or RECURRENT_PARTS, which has no head. If the
// layout is not known, always all. `window_from`: first window cell to include, also cells that llama.cpp omits. Null on
// error.
seq_state * seq_state_new(const memory * m, bool v_trans, llama_seq_id seq, part_set which, llama_pos window_from) noexcept;
int32_t     seq_state_write(const seq_state * state, uint8_t * dst, bool two) noexcept;

// Number of attention cells that only this sequence holds.
uint32_t owned_alone(const memory * m, llama_seq_id seq);

}  // namespace pykv
