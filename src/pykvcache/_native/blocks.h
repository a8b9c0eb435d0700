// Runs of a sequence's attention cells as single pieces of memory, and whole states made of them.
// A block of n cells: their extensions (M-RoPE), then for each kind of row of each layer n rows; then those of an index.
#pragma once

#include <vector>

#include "state_pieces.h"

namespace pykv {

// Bytes of one cell over all layers; 0 where the memory has no attention part.
size_t block_cell_bytes(const memory * m, bool v_trans);
// What the bytes of a block are; known without the memory.
struct block_layout {
    size_t                  ext_bytes = 0;   // of one cell, before its rows
    size_t                  cell_bytes = 0;  // 0 where the memory has no attention part
    bool                    v_trans = false;
    std::vector<state_rows> rows = {};
};
block_layout block_layout_of(const memory * m, bool v_trans);

// Whether a block of n cells holds values that attention can multiply.
bool block_fits(const block_layout & layout, const uint8_t * data, uint32_t n) noexcept;

// Copy the cells [first, first + count) of a block of n_src cells to `at` of one of n_dst.
void block_copy(const block_layout & layout, const uint8_t * src, size_t n_src, size_t first, size_t count, uint8_t * dst,
                size_t n_dst, size_t at) noexcept;

enum block_result : int32_t {
    BLOCKS_MISSING,  // the sequence does not hold all of the cells
    BLOCKS_WRITTEN,
    BLOCKS_VALUES,  // NaN, infinity, or values whose products overflow
};

// Copy n cells from `first` on to each of dst, `last` to the last of them, and look at their values: a block_result.
// `two`: with a second thread where that pays.
int32_t blocks_write(const memory * m, bool v_trans, llama_seq_id seq, llama_pos first, uint32_t n,
                     uint32_t last, const std::vector<uint8_t *> & dst, bool two) noexcept;

// A block, of which the first `used` of its n cells count.
struct block_part {
    const uint8_t * data;
    uint32_t        n, used;
};

// The state of one sequence that begins at 0. `rest`: a partial state, of the parts that are in no block; empty where
// the memory has none.
int32_t block_join(const memory * m, bool v_trans, const std::vector<block_part> & blocks, state_piece rest,
                   joined_state & out) noexcept;

}  // namespace pykv
