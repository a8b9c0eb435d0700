// Runs of a sequence's attention cells as single pieces of memory, and whole states made of them.
// A block of n cells: their extensions (M-RoPE), then for each kind of row of each layer n rows.
#pragma once

#include <vector>

#include "state_pieces.h"

namespace pykv {

// Bytes of one cell over all layers; 0 where the memory has no attention part.
size_t block_cell_bytes(const memory * m, bool v_trans);
// Copy the cells at [first, first + n) to dst: 1; 0 if the sequence does not hold all of them.
int32_t block_write(const memory * m, bool v_trans, llama_seq_id seq, llama_pos first, uint32_t n, uint8_t * dst) noexcept;

// A block, of which the first `used` of its n cells count.
struct block_part {
    const uint8_t * data;
    uint32_t        n, used;
};

// The state of one sequence that begins at 0. `rest`: a partial state, whose parts come after the attention part; empty where there are none.
int32_t block_join(const memory * m, bool v_trans, const std::vector<block_part> & blocks, state_piece rest,
                   joined_state & out) noexcept;

}  // namespace pykv
