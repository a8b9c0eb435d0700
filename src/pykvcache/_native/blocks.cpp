// Blocks out of the cells, and a state's bytes around blocks.
#include <cstring>

#include "blocks.h"
#include "guarded.h"
#include "probe_kv.h"
#include "probe_memory.h"
#include "probe_values.h"

namespace pykv {

namespace {

// The attention part, or null.
const state_part * attention_of(const std::vector<state_part> & parts) {
    return !parts.empty() && parts[0].part == PART_ATTENTION ? &parts[0] : nullptr;
}

class block_writer : public piece_writer {
  public:
    block_writer(joined_state & out, const std::vector<block_part> & blocks) : piece_writer(out), blocks(blocks) {}

    uint32_t cells(const state_part & part, uint32_t stream) {
        uint32_t n = 0;
        for (const block_part & block : blocks) {
            n += stream == 0 ? block.used : 0;
        }
        put(n);
        if (n > 0) {
            records(part, room(n * cell_bytes(part)));
            before = part.extended ? CELL_EXT_BYTES : 0;
        }
        return n;
    }

    void rows(const state_part &, uint32_t, const state_rows & rows, uint32_t) {
        if (rows.kind == BLOCK_V_TRANS) {
            columns(rows);
        } else {
            for (const block_part & block : blocks) {
                refer(block.data + before * block.n, rows.row_bytes * block.used);
            }
        }
        before += rows.row_bytes;
    }

  private:
    // All at once: field by field they take as long as copying a tenth of the rows.
    void records(const state_part & part, uint8_t * to) {
        const uint32_t     n_ids = 1;
        const llama_seq_id seq = 0;
        llama_pos          pos = 0;
        const auto         put = [&to](const void * from, size_t n) {
            std::memcpy(to, from, n);
            to += n;
        };
        for (const block_part & block : blocks) {
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
            for (const block_part & block : blocks) {
                bytes(block.data + before * block.n + value * element * block.n, element * block.used);
            }
        }
    }

    const std::vector<block_part> & blocks;
    size_t                          before = 0;  // bytes of one cell in a block that come before these rows
};

}  // namespace

size_t block_cell_bytes(const memory * m, bool v_trans) {
    const auto parts = state_parts(m, v_trans, false);
    const state_part * part = attention_of(parts);
    if (!part) {
        return 0;
    }
    size_t size = part->extended ? CELL_EXT_BYTES : 0;
    for (const state_rows & rows : state_rows_of(m, v_trans, PART_ATTENTION)) {
        size += rows.row_bytes;
    }
    return size;
}

int32_t blocks_write(const memory * m, bool v_trans, llama_seq_id seq, llama_pos first, uint32_t n,
                     const std::vector<uint8_t *> & dst) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        const llama_kv_cells & held = m->base->get_cells(seq);
        const auto &           all = held_cells(held, seq);
        const auto             kinds = state_rows_of(m, v_trans, PART_ATTENTION);
        const bool             extended = has_extended(m);
        std::vector<live_cell> cells(n);
        auto                   next = all.lower_bound({first, 0});
        for (uint8_t * to : dst) {
            for (live_cell & cell : cells) {
                if (next == all.end() || next->first != first++) {
                    return int32_t(BLOCKS_MISSING);
                }
                cell = {next->first, next->second};
                ++next;
            }
            for (size_t i = 0; extended && i < cells.size(); ++i) {
                const auto ext = held.ext_get(cells[i].cell);
                std::memcpy(to, &ext, CELL_EXT_BYTES);
                to += CELL_EXT_BYTES;
            }
            for (const state_rows & rows : kinds) {
                const int which = rows.kind == BLOCK_K ? 0 : 1;
                if (read_rows(m, rows.part, rows.layer, which, seq, cells, to) == CAUGHT) {
                    return CAUGHT;
                }
                // Now, while they are at hand: whoever puts the block back need not look again.
                value_check values(ggml_type(rows.type), rows.n_embd, !v_trans);
                values.take(to, rows.row_bytes * n);
                if (!values.fits()) {
                    return int32_t(BLOCKS_VALUES);
                }
                to += rows.row_bytes * n;
            }
        }
        return int32_t(BLOCKS_WRITTEN);
    });
}

int32_t block_join(const memory * m, bool v_trans, const std::vector<block_part> & blocks, state_piece rest,
                   joined_state & out) noexcept {
    return guarded_void([&] {
        block_writer writer(out, blocks);
        visit_head(writer, 0, nullptr);
        const auto parts = state_parts(m, v_trans, false);
        if (const state_part * part = attention_of(parts)) {
            visit_part(writer, *part, state_rows_of(m, v_trans, PART_ATTENTION));
        }
        if (rest.size > SEQ_HEAD_BYTES) {  // a partial state has a head, too
            writer.refer(rest.data + SEQ_HEAD_BYTES, rest.size - SEQ_HEAD_BYTES);
        }
        writer.finish();
    });
}

}  // namespace pykv
