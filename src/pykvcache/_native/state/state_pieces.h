// States that are put together from cells lying elsewhere: from blocks, or from arrays. Rows are referred
// to, not copied.
#pragma once

#include <vector>

#include "state_layout.h"

namespace pykv {

// The pieces of a state, and what of them is made here.
struct joined_state {
    std::vector<uint8_t>     own;
    std::vector<state_piece> pieces;
};

// A visitor that collects pieces. Those that are made here are only counted first: `own` moves while it grows.
class piece_writer : public state_output<piece_writer> {
  public:
    explicit piece_writer(joined_state & out) : out(out) {}

    void bytes(const void * data, size_t n) {
        if (n > 0) {  // of nothing there may be no address
            std::memcpy(room(n), data, n);
        }
    }

    // n bytes to write to, until there are more.
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

// The cells of one stream of a part, as arrays. Rows are as states hold them, a pointer for each kind.
struct cell_arrays {
    uint32_t                     n = 0;
    const int32_t *              positions = nullptr;
    const int32_t *              ext = nullptr;      // three values per cell, where the part is extended
    const int32_t *              offsets = nullptr;  // n + 1, into ids; null for cells of one sequence
    const llama_seq_id *         ids = nullptr;
    std::vector<const uint8_t *> rows = {};
};

// The state of one sequence (seq >= 0), or with -1 of a whole context. Parts as state_parts() has them; of
// each its streams, of which a sequence has one.
int32_t state_join(const memory * m, bool v_trans, llama_seq_id seq, const std::vector<std::vector<cell_arrays>> & parts,
                   joined_state & out) noexcept;

// The state of one sequence that was found to fit, without the oldest window cells where the window cache has no room
// for them (window_room): 1; or 0 where all of them go, or what the next token sees alone.
int32_t state_fit(const memory * m, bool v_trans, llama_seq_id seq, uint32_t n_seq_max,
                  const std::vector<state_block> & blocks, const std::vector<state_piece> & pieces, joined_state & out) noexcept;

// Sequences that the records of n cells name, by the size of the records.
inline size_t n_cell_ids(uint64_t size, uint32_t n, bool extended) {
    return size_t(size - n * cell_head_bytes(extended)) / sizeof(llama_seq_id);
}
// Read the records of n cells that state_check() found at `at`: offsets has n + 1, ids n_cell_ids(). Null: not wanted.
void read_cells(const uint8_t * at, uint32_t n, bool extended, int32_t * positions, int32_t * ext, int32_t * offsets,
                llama_seq_id * ids) noexcept;

}  // namespace pykv
