// Blocks out of the cells, and a state's bytes around blocks.
#include <cstring>

#include "blocks.h"
#include "guarded.h"
#include "probe_kv.h"
#include "probe_memory.h"

namespace pykv {

namespace {

constexpr size_t EXT_BYTES = sizeof(llama_kv_cell_ext);

// The attention part, or null.
const state_part * attention_of(const std::vector<state_part> & parts) {
    return !parts.empty() && parts[0].part == PART_ATTENTION ? &parts[0] : nullptr;
}

// Pieces that are made here are only counted first: `own` moves while it grows.
class joiner {
  public:
    explicit joiner(joined_state & out) : out(out) {}

    void bytes(const void * data, size_t n) {
        if (!run) {
            run = true;
            parts.push_back({nullptr, 0});
        }
        const auto * from = static_cast<const uint8_t *>(data);
        out.own.insert(out.own.end(), from, from + n);
        parts.back().size += n;
    }
    template <class T> void put(T value) { bytes(&value, sizeof(value)); }

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

void put_cells(joiner & out, const state_part & part, const std::vector<block_part> & blocks) {
    llama_pos pos = 0;
    for (const block_part & block : blocks) {
        for (uint32_t i = 0; i < block.used; ++i) {
            out.put<llama_pos>(pos++);
            out.put<uint32_t>(1);
            if (part.extended) {
                out.bytes(block.data + i * EXT_BYTES, EXT_BYTES);
            }
            out.put<llama_seq_id>(0);
        }
    }
}

// `at`: bytes of one cell in a block before these rows.
void put_rows(joiner & out, const state_rows & rows, size_t at, const std::vector<block_part> & blocks) {
    out.put<int32_t>(rows.type);
    if (rows.kind != BLOCK_V_TRANS) {
        out.put<uint64_t>(rows.row_bytes);
        for (const block_part & block : blocks) {
            out.refer(block.data + at * block.n, rows.row_bytes * block.used);
        }
        return;
    }
    const size_t element = rows.row_bytes / rows.n_embd;
    out.put<uint32_t>(uint32_t(element));
    out.put<uint32_t>(rows.n_embd);
    for (size_t value = 0; value < rows.n_embd; ++value) {
        for (const block_part & block : blocks) {
            out.bytes(block.data + at * block.n + value * element * block.n, element * block.used);
        }
    }
}

void put_part(joiner & out, const state_part & part, const std::vector<state_rows> & rows,
              const std::vector<block_part> & blocks) {
    uint32_t n = 0;
    for (const block_part & block : blocks) {
        n += block.used;
    }
    out.put<uint32_t>(part.n_stream);
    out.put<uint32_t>(n);
    if (n > 0) {
        put_cells(out, part, blocks);
        out.put<uint32_t>(part.v_trans);
        out.put<uint32_t>(part.n_layer);
        size_t at = part.extended ? EXT_BYTES : 0;
        for (const state_rows & one : rows) {
            put_rows(out, one, at, blocks);
            at += one.row_bytes;
        }
    }
    for (uint32_t stream = 1; stream < part.n_stream; ++stream) {
        out.put<uint32_t>(0);
    }
}

}  // namespace

size_t block_cell_bytes(const memory * m, bool v_trans) {
    const auto parts = state_parts(m, v_trans, false);
    const state_part * part = attention_of(parts);
    if (!part) {
        return 0;
    }
    size_t size = part->extended ? EXT_BYTES : 0;
    for (const state_rows & rows : state_rows_of(m, v_trans, PART_ATTENTION)) {
        size += rows.row_bytes;
    }
    return size;
}

int32_t block_write(const memory * m, bool v_trans, llama_seq_id seq, llama_pos first, uint32_t n, uint8_t * dst) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        const llama_kv_cells & held = m->base->get_cells(seq);
        std::vector<live_cell> cells;
        cells.reserve(n);
        const auto & all = held.seq_pos_get(seq);
        for (auto it = all.lower_bound({first, 0}); it != all.end() && cells.size() < n; ++it) {
            if (it->first != first + llama_pos(cells.size())) {
                return 0;
            }
            cells.push_back({it->first, it->second});
        }
        if (cells.size() < n) {
            return 0;
        }
        if (has_extended(m)) {
            for (const live_cell & cell : cells) {
                const auto ext = held.ext_get(cell.cell);
                std::memcpy(dst, &ext, EXT_BYTES);
                dst += EXT_BYTES;
            }
        }
        for (const state_rows & rows : state_rows_of(m, v_trans, PART_ATTENTION)) {
            const int which = rows.kind == BLOCK_K ? 0 : 1;
            if (read_rows(m, PART_ATTENTION, rows.layer, which, seq, cells, dst) == CAUGHT) {
                return CAUGHT;
            }
            dst += rows.row_bytes * n;
        }
        return 1;
    });
}

int32_t block_join(const memory * m, bool v_trans, const std::vector<block_part> & blocks, state_piece rest,
                   joined_state & out) noexcept {
    return guarded_void([&] {
        joiner writer(out);
        writer.put<uint32_t>(SEQ_MAGIC);
        writer.put<llama_seq_id>(0);
        const auto parts = state_parts(m, v_trans, false);
        if (const state_part * part = attention_of(parts)) {
            put_part(writer, *part, state_rows_of(m, v_trans, PART_ATTENTION), blocks);
        }
        const size_t head = sizeof(uint32_t) + sizeof(llama_seq_id);  // a partial state has one, too
        if (rest.size > head) {
            writer.refer(rest.data + head, rest.size - head);
        }
        writer.finish();
    });
}

}  // namespace pykv
