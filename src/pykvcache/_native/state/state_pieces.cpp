// Builds a state's bytes around arrays, and reads arrays from a state's records.
#include <algorithm>

#include "guarded.h"
#include "probe_memory.h"
#include "state_pieces.h"

namespace pykv {

namespace {

class array_writer : public piece_writer {
  public:
    array_writer(joined_state & out, bool whole) : piece_writer(out), whole(whole) {}

    void begin_part(const std::vector<cell_arrays> & of_part) { streams = &of_part; }

    uint32_t cells(const state_part & part, uint32_t stream) {
        const uint32_t n = stream < streams->size() ? (*streams)[stream].n : 0;
        put(n);
        if (n > 0) {
            records(part, (*streams)[stream]);
        }
        kind = 0;
        return n;
    }

    void rows(const state_part &, uint32_t stream, const state_rows & rows, uint32_t n) {
        refer((*streams)[stream].rows[kind++], rows.row_bytes * n);
    }

  private:
    void records(const state_part & part, const cell_arrays & from) {
        const llama_seq_id only = 0;
        for (uint32_t i = 0; i < from.n; ++i) {
            const int32_t * ext = part.extended ? from.ext + 3 * size_t(i) : nullptr;
            if (whole) {
                const int32_t at = from.offsets[i];
                put_cell(part, from.positions[i], ext, from.ids + at, uint32_t(from.offsets[i + 1] - at));
            } else {
                put_cell(part, from.positions[i], ext, &only, n_ids_of_one(part));
            }
        }
    }

    const std::vector<cell_arrays> * streams = nullptr;
    bool                             whole;
    size_t                           kind = 0;
};

// Rewrites the window part of a state with its cells from a position on.
class window_writer : public piece_writer {
  public:
    window_writer(joined_state & out, const std::vector<state_piece> & from, const std::vector<state_block> & blocks)
        : piece_writer(out), all(from), blocks(blocks) {}

    // Bytes as they are.
    void pass(uint64_t begin, uint64_t end) {
        all.from(begin).take(end - begin, [&](const uint8_t * from, uint64_t n) { refer(from, n); });
    }

    uint32_t cells(const state_part & part, uint32_t stream) {
        const bool is_own = stream == blocks.front().stream;
        put(is_own ? uint32_t(kept.size()) : 0);
        next = 1;
        const size_t size = cell_bytes(part);
        copy(is_own ? blocks.front().offset : 0, size, is_own ? kept.size() : 0);
        return is_own ? uint32_t(kept.size()) : 0;
    }

    void rows(const state_part &, uint32_t, const state_rows & rows, uint32_t n) {
        const state_block & block = blocks[next++];
        const size_t        n_rows = block.kind == BLOCK_V_TRANS ? rows.n_embd : 1, size = rows.row_bytes / n_rows;
        for (size_t i = 0; i < n_rows; ++i) {
            copy(block.offset + i * size * block.n_cells, size, n);
        }
    }

    std::vector<uint32_t> kept = {};  // kept cells, ascending

  private:
    // Of consecutive pieces of `size` bytes, one per cell, write those of kept cells.
    void copy(uint64_t begin, size_t size, size_t n) {
        uint8_t * to = n * size > 0 ? room(n * size) : nullptr;
        cursor    in = all.from(begin);
        uint32_t  at = 0;
        for (size_t k = 0; to && k < n; ++k, to += size) {
            in.skip((kept[k] - at) * size);
            in.read(to, size);
            at = kept[k] + 1;
        }
    }

    cursor                           all;
    const std::vector<state_block> & blocks;
    size_t                           next = 0;
};

// Positions of the cells of one sequence.
std::vector<llama_pos> positions_of(const cursor & all, const state_block & block, size_t size) {
    std::vector<llama_pos> positions(block.n_cells);
    cursor                 in = all.from(block.offset);
    for (llama_pos & pos : positions) {
        pos = in.get<llama_pos>();
        in.skip(size - sizeof(pos));
    }
    return positions;
}

// First window cell to keep: at most `room` cells, but at least those that the next token sees.
llama_pos fitting(const memory * m, std::vector<llama_pos> positions, size_t room) {
    std::sort(positions.rbegin(), positions.rend());
    const llama_pos needed = window_start(m, positions.front() + 1);
    size_t          n = std::max<size_t>(1, std::min(room, positions.size()));
    while (n < positions.size() && (positions[n] >= needed || positions[n] == positions[n - 1])) {
        ++n;
    }
    return positions[n - 1];
}

}  // namespace

int32_t state_fit(const memory * m, bool v_trans, llama_seq_id seq, uint32_t n_seq_max,
                  const std::vector<state_block> & blocks, const std::vector<state_piece> & pieces, joined_state & out) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        std::vector<state_block> of_window;
        std::copy_if(blocks.begin(), blocks.end(), std::back_inserter(of_window),
                     [](const state_block & block) { return block.part == PART_WINDOW; });
        if (of_window.size() < 2 || of_window.front().n_cells <= window_room(m, seq, n_seq_max)) {
            return 0;
        }
        const state_part    part = state_parts(m, v_trans, WINDOW_PARTS).front();
        const state_block & cells = of_window.front();
        const auto          positions = positions_of(cursor(pieces), cells, cell_bytes(part));
        const llama_pos     from = fitting(m, positions, window_room(m, seq, n_seq_max));
        window_writer       writer(out, pieces, of_window);
        for (uint32_t i = 0; i < cells.n_cells; ++i) {
            if (positions[i] >= from) {
                writer.kept.push_back(i);
            }
        }
        // The number of streams, and a number of cells for each: 0 for streams that are not given.
        const uint64_t begin = cells.offset - (2 + cells.stream) * sizeof(uint32_t);
        const uint64_t end = of_window.back().offset + of_window.back().size + (part.n_stream - 1 - cells.stream) * sizeof(uint32_t);
        if (writer.kept.size() == cells.n_cells) {
            return 0;
        }
        writer.pass(0, begin);
        visit_part(writer, part, state_rows_of(m, v_trans, PART_WINDOW));
        writer.pass(end, end + cursor(pieces).from(end).left());
        writer.finish();
        return 1;
    });
}

int32_t state_join(const memory * m, bool v_trans, llama_seq_id seq, const std::vector<std::vector<cell_arrays>> & parts,
                   joined_state & out) noexcept {
    return guarded_void([&] {
        array_writer writer(out, seq < 0);
        visit_head(writer, seq < 0 ? -1 : 0, llm_arch_name(m->arch));
        size_t i = 0;
        for (const state_part & part : state_parts(m, v_trans, ALL_PARTS)) {
            writer.begin_part(parts.at(i++));
            visit_part(writer, part, state_rows_of(m, v_trans, part.part));
        }
        writer.finish();
    });
}

void read_cells(const uint8_t * at, uint32_t n, bool extended, int32_t * positions, int32_t * ext, int32_t * offsets,
                llama_seq_id * ids) noexcept {
    int32_t n_ids = 0;
    for (uint32_t i = 0; i < n; ++i) {
        const cell_head head = read_cell_head(at, extended);
        positions[i] = head.pos;
        if (extended) {
            std::memcpy(ext + 3 * size_t(i), head.ext, CELL_EXT_BYTES);
        }
        at += cell_head_bytes(extended);
        if (ids) {
            offsets[i] = n_ids;
            std::memcpy(ids + n_ids, at, head.n_ids * sizeof(*ids));
        }
        at += head.n_ids * sizeof(*ids);
        n_ids += int32_t(head.n_ids);
    }
    if (ids) {
        offsets[n] = n_ids;
    }
}

}  // namespace pykv
