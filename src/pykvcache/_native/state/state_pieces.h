// States joined from blocks or arrays of cells. Rows are referenced, not copied.
#pragma once

#include <vector>

#include "state_layout.h"

namespace pykv {

// The pieces of a state; `own` holds the bytes created here.
struct joined_state {
    std::vector<uint8_t>     own;
    std::vector<state_piece> pieces;
};

// Visitor that collects pieces. Pointers into `own` are set in finish(), because it moves while it grows.
class piece_writer : public state_output<piece_writer> {
  public:
    explicit piece_writer(joined_state & out) : out(out) {}

    void bytes(const void * data, size_t n) {
        if (n > 0) {  // empty data may have no address
            std::memcpy(room(n), data, n);
        }
    }

    // Returns n bytes to write to, valid until the next call.
    uint8_t * room(size_t n) {
        if (!run) {
            run = true;
            parts.push_back({nullptr, 0});
        }
        const size_t at = out.own.size();
        out.own.resize(at + n);
        parts.back().size += n;
        return out.own.data() + at;
    }

    void refer(const uint8_t * data, size_t n) {
        if (n > 0) {
            run = false;
            parts.push_back({data, n});
        }
    }

    void finish() {
        const uint8_t * at = out.own.data();
        for (state_piece & part : parts) {
            if (!part.data) {
                part.data = at;
                at += part.size;
            }
        }
        out.pieces = std::move(parts);
    }

  private:
    joined_state &           out;
    std::vector<state_piece> parts;
    bool                     run = false;
};

// Cells of one stream of a part as arrays. Rows are in a state's layout, one pointer per kind.
struct cell_arrays {
    uint32_t                     n = 0;
    const int32_t *              positions = nullptr;
    const int32_t *              ext = nullptr;      // three values per cell, if the part is extended
    const int32_t *              offsets = nullptr;  // n + 1 offsets into ids; null for cells of one sequence
    const llama_seq_id *         ids = nullptr;
    std::vector<const uint8_t *> rows = {};
};

// Join the state of a sequence, or with -1 of a context. Parts in the order of state_parts(), each with its streams;
// a sequence has one.
int32_t state_join(const memory * m, bool v_trans, llama_seq_id seq, const std::vector<std::vector<cell_arrays>> & parts,
                   joined_state & out) noexcept;

// Drop the oldest window cells of a checked state if the window has no room for them (window_room). Returns 1 if
// rewritten; 0 if the state fits as it is, or already has only the visible cells.
int32_t state_fit(const memory * m, bool v_trans, llama_seq_id seq, uint32_t n_seq_max,
                  const std::vector<state_block> & blocks, const std::vector<state_piece> & pieces, joined_state & out) noexcept;

// Number of sequence ids in the records of n cells, from the size of the records.
inline size_t n_cell_ids(uint64_t size, uint32_t n, bool extended) {
    return size_t(size - n * cell_head_bytes(extended)) / sizeof(llama_seq_id);
}
// Read the records of n cells at `at`, checked by state_check(). offsets has n + 1 entries, ids n_cell_ids(). Null
// outputs are skipped.
void read_cells(const uint8_t * at, uint32_t n, bool extended, int32_t * positions, int32_t * ext, int32_t * offsets,
                llama_seq_id * ids) noexcept;

}  // namespace pykv
