// Copies cells to blocks, and builds a state's bytes around blocks.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "guarded.h"
#include "probe_kv.h"
#include "probe_memory.h"
#include "state_pieces.h"
#include "team.h"
#include "transfers.h"
#include "values.h"

namespace pykv {

namespace {

// The rows of a block, in order.
std::vector<state_rows> block_rows(const memory * m, bool v_trans, memory_part of) {
    std::vector<state_rows> all;
    for (const state_part & part : state_parts(m, v_trans, of == PART_WINDOW ? WINDOW_PARTS : ATTENTION_PARTS)) {
        const auto rows = state_rows_of(m, v_trans, part.part);
        all.insert(all.end(), rows.begin(), rows.end());
    }
    return all;
}

size_t ext_bytes_of(const memory * m, memory_part part) {
    const llama_kv_cache * cache = cache_of(m, part);
    return cache && cache->has_cell_ext() ? CELL_EXT_BYTES : 0;
}

class block_writer : public piece_writer {
  public:
    using piece_writer::piece_writer;

    // Blocks of the next parts; an index follows its attention cells.
    void begin_run(const block_run & next) {
        before = run == &next ? before : 0;
        run = &next;
    }

    uint32_t cells(const state_part & part, uint32_t stream) {
        const uint32_t n = stream == 0 ? uint32_t(n_cells(*run)) : 0;
        put(n);
        if (n > 0) {
            records(part, room(n * cell_bytes(part)));
            // An index has the same extensions, which are stored once.
            before = before == 0 && part.extended ? CELL_EXT_BYTES : before;
        }
        return n;
    }

    void rows(const state_part &, uint32_t, const state_rows & rows, uint32_t) {
        if (rows.kind == BLOCK_V_TRANS) {
            columns(rows);
        } else {
            for (const block_span & block : run->blocks) {
                refer(block.data + before * block.n, rows.row_bytes * block.used);
            }
        }
        before += rows.row_bytes;
    }

  private:
    // In one buffer: written field by field, records would cost a tenth of copying the rows.
    void records(const state_part & part, uint8_t * to) {
        const uint32_t     n_ids = 1;
        const llama_seq_id seq = 0;
        llama_pos          pos = run->first;
        const auto         put = [&to](const void * from, size_t n) {
            std::memcpy(to, from, n);
            to += n;
        };
        for (const block_span & block : run->blocks) {
            for (uint32_t i = 0; i < block.used; ++i, ++pos) {
                put(&pos, sizeof(pos));
                put(&n_ids, sizeof(n_ids));
                if (part.extended) {
                    put(block.data + i * CELL_EXT_BYTES, CELL_EXT_BYTES);
                }
                put(&seq, sizeof(seq));
            }
        }
    }

    void columns(const state_rows & rows) {
        const size_t element = rows.row_bytes / rows.n_embd;
        for (size_t value = 0; value < rows.n_embd; ++value) {
            for (const block_span & block : run->blocks) {
                bytes(block.data + before * block.n + value * element * block.n, element * block.used);
            }
        }
    }

    const block_run * run = nullptr;
    size_t            before = 0;  // bytes of one cell in a block that come before these rows
};

// Rows of one tensor; `before`: bytes of one cell in a block that come before them.
struct rows_copy {
    live_tensor tensor;
    state_rows  rows;
    size_t      before;
};

// The cells at n positions from `first` on, in their order; fewer where one is missing.
std::vector<live_cell> cells_from(const cell_set & held, llama_pos first, size_t n) {
    std::vector<live_cell> cells;
    cells.reserve(std::min(n, held.size()));
    for (auto it = held.lower_bound({first, 0}); it != held.end() && cells.size() < n && it->first == first; ++it, ++first) {
        cells.push_back({it->first, it->second});
    }
    return cells;
}

// Populate the pages of new memory in one call, in half the time of page faults; older systems refuse, harmlessly.
// Skipped if the last page is present: for reused memory the call would cost a fifth of the copy.
void populate(uint8_t * data, size_t size) {
#ifdef __linux__
    constexpr int          WRITE = 23;  // MADV_POPULATE_WRITE, Linux 5.14
    static const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t        begin = (uintptr_t(data) + page - 1) / page * page;
    const uintptr_t        end = (uintptr_t(data) + size) / page * page;
    unsigned char there = 0;
    if (begin < end && !(mincore(reinterpret_cast<void *>(end - page), page, &there) == 0 && (there & 1))) {
        madvise(reinterpret_cast<void *>(begin), end - begin, WRITE);
    }
#else
    (void) data, (void) size;
#endif
}

}  // namespace

block_layout block_layout_of(const memory * m, bool v_trans, memory_part part) {
    block_layout layout;
    if (!cache_of(m, part)) {
        return layout;
    }
    layout.v_trans = v_trans;
    layout.ext_bytes = layout.cell_bytes = ext_bytes_of(m, part);
    layout.rows = block_rows(m, v_trans, part);
    for (const state_rows & rows : layout.rows) {
        layout.cell_bytes += rows.row_bytes;
    }
    return layout;
}

bool block_fits(const block_layout & layout, const uint8_t * data, uint32_t n) noexcept {
    data += layout.ext_bytes * n;
    for (const state_rows & rows : layout.rows) {
        value_check values(ggml_type(rows.type), rows.n_embd, !layout.v_trans);
        values.take(data, rows.row_bytes * n);
        if (!values.fits()) {
            return false;
        }
        data += rows.row_bytes * n;
    }
    return true;
}

void block_copy(const block_layout & layout, const uint8_t * src, size_t n_src, size_t first, size_t count, uint8_t * dst,
                size_t n_dst, size_t at) noexcept {
    // Contiguous bytes per cell, or per value if transposed.
    const auto copy = [&](size_t bytes) {
        if (count * bytes > 0) {
            std::memcpy(dst + at * bytes, src + first * bytes, count * bytes);
        }
        src += n_src * bytes;
        dst += n_dst * bytes;
    };
    copy(layout.ext_bytes);
    for (const state_rows & rows : layout.rows) {
        const size_t n = rows.kind == BLOCK_V_TRANS ? rows.n_embd : 1;
        for (size_t i = 0; i < n; ++i) {
            copy(rows.row_bytes / n);
        }
    }
}

int32_t blocks_write(const memory * m, bool v_trans, memory_part part, llama_seq_id seq, llama_pos first, uint32_t n,
                     uint32_t last, const std::vector<uint8_t *> & dst, bool two) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        const llama_kv_cells & held = cache_of(m, part)->get_cells(seq);
        const size_t           n_blocks = dst.size(), n_wanted = n_blocks ? size_t(n) * (n_blocks - 1) + last : 0;
        const auto             cells = cells_from(held_cells(held, seq), first, n_wanted);
        if (cells.size() < n_wanted) {
            return int32_t(BLOCKS_MISSING);
        }
        if (part == PART_ATTENTION && m->index && held_cells(*m->index, seq) != held_cells(*m->base, seq)) {
            throw std::logic_error("the index of a memory has other cells than what it is an index of");
        }
        const auto n_of = [&](size_t b) { return b + 1 == n_blocks ? last : n; };
        std::vector<std::vector<cell_run>> runs;  // per block
        for (size_t b = 0; b < n_blocks; ++b) {
            runs.push_back(runs_of(cells.data() + b * n, n_of(b)));
        }
        // Extensions come first.
        const size_t ext_bytes = ext_bytes_of(m, part);
        for (size_t i = 0; ext_bytes && i < cells.size(); ++i) {
            const auto ext = held.ext_get(cells[i].cell);
            std::memcpy(dst[i / n] + i % n * ext_bytes, &ext, ext_bytes);
        }
        std::vector<rows_copy> rows;
        size_t                 before = ext_bytes;
        for (const state_rows & one : block_rows(m, v_trans, part)) {
            rows.push_back({tensor_at(m, one.part, one.layer, which_of(one.kind), seq), one, before});
            two = two && rows.back().tensor.host;
            before += one.row_bytes;
        }
        std::atomic<bool> fit{true};
        const auto        look = [&](const rows_copy & row, size_t b) {
            // Checked here, so that restoring the block need not check again.
            value_check values(ggml_type(row.rows.type), row.rows.n_embd, !v_trans);
            values.take(dst[b] + row.before * n_of(b), row.rows.row_bytes * n_of(b));
            if (!values.fits()) {
                fit.store(false, std::memory_order_relaxed);
            }
        };
        counter jobs(n_blocks * (1 + rows.size()));
        share(jobs, two && before * n_wanted >= WORTH_A_THREAD ? 2 : 1, [&](int) {
            tensor_reads reads;
            for (size_t k; fit.load(std::memory_order_relaxed) && jobs.take(k);) {
                const size_t b = k % n_blocks;
                if (k < n_blocks) {
                    populate(dst[b], before * n_of(b));
                    continue;
                }
                const rows_copy & row = rows[k / n_blocks - 1];
                add_rows(reads, row.tensor, runs[b], dst[b] + row.before * n_of(b));
                // Host rows are copied by now, and checked while in the CPU's cache. Device rows are read for all blocks
                // together, on one thread.
                if (row.tensor.host) {
                    look(row, b);
                } else if (b + 1 == n_blocks) {
                    reads.run();
                    for (size_t i = 0; i < n_blocks; ++i) {
                        look(row, i);
                    }
                }
            }
            reads.run();
        });
        return int32_t(fit ? BLOCKS_WRITTEN : BLOCKS_VALUES);
    });
}

size_t n_cells(const block_run & run) {
    size_t n = 0;
    for (const block_span & block : run.blocks) {
        n += block.used;
    }
    return n;
}

int32_t block_join(const memory * m, bool v_trans, part_set which, const block_run & attention, const block_run & window,
                   state_piece state, joined_state & out) noexcept {
    return guarded_void([&] {
        const block_run none;
        block_writer    writer(out);
        visit_head(writer, 0, nullptr);
        for (const state_part & part : state_parts(m, v_trans, which)) {
            if (part.part == PART_RECURRENT && state.size > 0) {
                writer.refer(state.data, state.size);
                continue;
            }
            writer.begin_run(part.part == PART_RECURRENT ? none : part.part == PART_WINDOW ? window : attention);
            visit_part(writer, part, state_rows_of(m, v_trans, part.part));
        }
        writer.finish();
    });
}

}  // namespace pykv
