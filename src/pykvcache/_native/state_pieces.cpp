// A state's bytes around arrays, and arrays out of a state's records.
#include "state_pieces.h"

#include "guarded.h"
#include "probe_memory.h"

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

}  // namespace

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
