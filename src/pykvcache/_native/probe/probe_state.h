// llama.cpp's state bytes: what a memory's state is made of, whether given bytes are such a
// state, and reading them from several pieces. state_layout.h describes the layout.
#pragma once

#include <string>
#include <vector>

#include "probe.h"
#include "probe_kv.h"

namespace pykv {

// How other versions are laid out is not known: cmake/Pin.cmake refuses them in one line.
static_assert(LLAMA_STATE_SEQ_VERSION >= 3 && LLAMA_STATE_SEQ_VERSION <= 4, "unknown version of llama.cpp's states");

// Whether a part says by which Hadamard matrices its keys and values are multiplied.
constexpr bool STATES_SAY_ROTATIONS = LLAMA_STATE_SEQ_VERSION >= 4;

// What a run of bytes in a state holds. The numbers are public: they stand in saved files.
enum block_kind : int {
    BLOCK_CELLS,    // position, number of sequences, extension, sequence ids; per cell
    BLOCK_K,        // one row per cell
    BLOCK_V,        // one row per cell
    BLOCK_V_TRANS,  // one row per value dimension, which holds one element per cell
    BLOCK_R,        // recurrent: the convolution's last inputs; one row per cell
    BLOCK_PLE,      // recurrent: the history of per-layer embeddings; one row per cell
    BLOCK_S,        // recurrent: the state; one row per cell
};

// One kind of row that a part stores in one layer.
struct state_rows {
    memory_part part;
    block_kind  kind;
    uint32_t    layer;
    int32_t     type;
    uint32_t    n_embd;  // elements of a row that belongs to one cell
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

// Where something lies in a state that was found to fit.
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
    STATE_DAMAGED,   // no memory writes such bytes
    STATE_MISMATCH,  // another memory's
    STATE_NO_ROOM,   // more cells than this memory has at all
    STATE_POSITION,  // a position past the highest of this context
    STATE_VALUE,     // NaN, infinity, or what products of would be
    STATE_UNKNOWN,   // the check itself was stopped; caught() says by what
};

// What a state has that cannot be; `what` and the numbers where there are such.
struct fault {
    state_fault kind  = STATE_FITS;
    std::string why   = {};
    int64_t     value = 0, limit = 0;
    std::string what    = {};
    bool        counted = false;  // whether value and limit say something
};

struct state_piece {
    const uint8_t * data;
    size_t          size;
};

// Some parts of a memory.
using part_set = uint32_t;
constexpr part_set only(memory_part part) { return 1u << part; }
constexpr part_set NO_PARTS = 0, ATTENTION_PARTS = only(PART_ATTENTION) | only(PART_INDEX), WINDOW_PARTS = only(PART_WINDOW),
                   RECURRENT_PARTS = only(PART_RECURRENT), PARTIAL_PARTS = WINDOW_PARTS | RECURRENT_PARTS,  // PARTIAL_ONLY's
                   CELL_PARTS = ATTENTION_PARTS | WINDOW_PARTS, ALL_PARTS = CELL_PARTS | RECURRENT_PARTS;

// Those of `which` that the memory has, in the order in which states hold them.
std::vector<state_part> state_parts(const memory * m, bool v_trans, part_set which);
std::vector<state_rows> state_rows_of(const memory * m, bool v_trans, memory_part part);

// Walk the bytes without touching the memory; `seq` is -1 for a whole context's state. `which`: the parts that are
// there. `known`: those whose values were looked at before.
state_fault state_check(const memory * m, bool v_trans, uint32_t n_seq_max, llama_seq_id seq, part_set which,
                        const std::vector<state_piece> & pieces, std::vector<state_block> & blocks, fault & found,
                        part_set known) noexcept;

// What a state is going to hold; valid until the memory changes.
class seq_state {
  public:
    virtual ~seq_state() = default;
    virtual void write(uint8_t * dst, bool two) const = 0;

    size_t size = 0;
};

// `window_from`: of a window, the cells from there on too, which llama.cpp leaves out. Null: caught.
seq_state * seq_state_new(const memory * m, bool v_trans, llama_seq_id seq, llama_pos window_from) noexcept;
// The same as llama.cpp writes it, of a whole context (seq -1) too, or of what of a sequence cannot be rewound.
seq_state * written_state_new(const memory * m, llama_seq_id seq, bool partial) noexcept;
// The recurrent part of a sequence's state alone, without a head.
seq_state * recurrent_state_new(const memory * m, llama_seq_id seq) noexcept;
void        seq_state_delete(seq_state * state) noexcept;
int32_t     seq_state_write(const seq_state * state, uint8_t * dst, bool two) noexcept;

// Cells that nobody but this sequence holds; of a memory with attention.
uint32_t owned_alone(const memory * m, llama_seq_id seq);

}  // namespace pykv
