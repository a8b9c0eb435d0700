// States in pieces: read as one, and joined from arrays of cells or from blocks. Rows are referenced, not copied.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "state_layout.h"

namespace pykv {

// Bytes in several pieces, read as one.
class cursor {
  public:
    explicit cursor(const std::vector<state_piece> & pieces) : pieces(pieces) {}

    void skip(uint64_t n) {
        at += n;
        while (n > 0) {
            if (i == pieces.size()) {
                throw fault{STATE_TRUNCATED, "ends before byte " + std::to_string(at), 0, int64_t(at), "bytes", true};
            }
            const uint64_t step = std::min<uint64_t>(n, pieces[i].size - inside);
            inside += step;
            n -= step;
            if (inside == pieces[i].size) {
                ++i;
                inside = 0;
            }
        }
    }

    // Take a run of bytes; copied only if it crosses pieces.
    template <class F> void take(uint64_t n, F && use) {
        while (n > 0) {
            if (i == pieces.size()) {
                throw fault{STATE_TRUNCATED, "ends before byte " + std::to_string(at + n), 0, int64_t(at + n), "bytes", true};
            }
            const uint64_t step = std::min<uint64_t>(n, pieces[i].size - inside);
            use(pieces[i].data + inside, step);
            n -= step;
            skip(step);
        }
    }

    void read(void * dst, uint64_t n) {
        auto * out = static_cast<uint8_t *>(dst);
        take(n, [&](const uint8_t * from, uint64_t step) {
            std::memcpy(out, from, step);
            out += step;
        });
    }

    template <class T> T get() {
        T value;
        read(&value, sizeof(value));
        return value;
    }

    // Peek at the next bytes, if they are in one piece.
    const uint8_t * direct(uint64_t n) const {
        return i < pieces.size() && n <= pieces[i].size - inside ? pieces[i].data + inside : nullptr;
    }

    // A cursor over the same bytes that starts at an offset.
    cursor from(uint64_t offset) const {
        cursor other(pieces);
        other.skip(offset);
        return other;
    }

    uint64_t tell() const { return at; }

    uint64_t left() const {
        uint64_t n = 0;
        for (size_t j = i; j < pieces.size(); ++j) {
            n += pieces[j].size;
        }
        return n - inside;
    }

  private:
    const std::vector<state_piece> & pieces;
    size_t   i = 0;
    uint64_t inside = 0, at = 0;
};

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

// Blocks (blocks.cpp): runs of a sequence's cells as contiguous bytes. Attention cells (with their index) and window cells
// are in separate blocks. A block of n cells has their extensions (M-RoPE), then n rows for each kind of row and layer,
// then the rows of an index.

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
