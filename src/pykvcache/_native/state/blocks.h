// Runs of a sequence's cells as single pieces of memory, and whole states made of them. Attention cells (with those of
// an index) and window cells have blocks of their own.
// A block of n cells: their extensions (M-RoPE), then for each kind of row of each layer n rows; then those of an index.
#pragma once

#include <vector>

#include "state_pieces.h"

namespace pykv {

// What the bytes of a block of PART_ATTENTION or PART_WINDOW are; known without the memory.
struct block_layout {
    size_t                  ext_bytes = 0;   // of one cell, before its rows
    size_t                  cell_bytes = 0;  // 0 where the memory has no such part
    bool                    v_trans = false;
    std::vector<state_rows> rows = {};
};
block_layout block_layout_of(const memory * m, bool v_trans, memory_part part);

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
int32_t blocks_write(const memory * m, bool v_trans, memory_part part, llama_seq_id seq, llama_pos first, uint32_t n,
                     uint32_t last, const std::vector<uint8_t *> & dst, bool two) noexcept;

// A block, of which the first `used` of its n cells count.
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

// The state of one sequence, of some parts. `state`: its recurrent part; empty where there is none.
int32_t block_join(const memory * m, bool v_trans, part_set which, const block_run & attention, const block_run & window,
                   state_piece state, joined_state & out) noexcept;

}  // namespace pykv
