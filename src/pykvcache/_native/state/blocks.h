// Blocks: runs of a sequence's cells as contiguous bytes, and states built of them. Attention cells (with their index)
// and window cells are in separate blocks. A block of n cells has their extensions (M-RoPE), then n rows for each kind
// of row and layer, then the rows of an index.
#pragma once

#include <vector>

#include "state_pieces.h"

namespace pykv {

// Layout of a block of PART_ATTENTION or PART_WINDOW; usable without the memory.
struct block_layout {
    size_t                  ext_bytes = 0;   // per cell, before its rows
    size_t                  cell_bytes = 0;  // 0 if the memory has no such part
    bool                    v_trans = false;
    std::vector<state_rows> rows = {};
};
block_layout block_layout_of(const memory * m, bool v_trans, memory_part part);

// Whether the values of a block of n cells cannot overflow in attention.
bool block_fits(const block_layout & layout, const uint8_t * data, uint32_t n) noexcept;

// Copy the cells [first, first + count) of a block of n_src cells to `at` of one of n_dst.
void block_copy(const block_layout & layout, const uint8_t * src, size_t n_src, size_t first, size_t count, uint8_t * dst,
                size_t n_dst, size_t at) noexcept;

enum block_result : int32_t {
    BLOCKS_MISSING,  // the sequence does not hold all of the cells
    BLOCKS_WRITTEN,
    BLOCKS_VALUES,  // NaN, infinity, or values whose products overflow
};

// Copy n cells, starting at `first`, to each of dst, `last` cells to the last one, and check their values. Returns a
// block_result. `two`: a second thread may help.
int32_t blocks_write(const memory * m, bool v_trans, memory_part part, llama_seq_id seq, llama_pos first, uint32_t n,
                     uint32_t last, const std::vector<uint8_t *> & dst, bool two) noexcept;

// A block of n cells, of which the first `used` count.
struct block_span {
    const uint8_t * data;
    uint32_t        n, used;
};

// Consecutive cells of one part.
struct block_run {
    llama_pos               first = 0;  // position of the first cell
    std::vector<block_span> blocks = {};
};

size_t n_cells(const block_run & run);

// Join blocks to a sequence's state of some parts. `state`: its recurrent part, or empty.
int32_t block_join(const memory * m, bool v_trans, part_set which, const block_run & attention, const block_run & window,
                   state_piece state, joined_state & out) noexcept;

}  // namespace pykv
