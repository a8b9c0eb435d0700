// A sequence's state, written without llama.cpp's walk: that one asks every cell for every
// sequence, twice, which costs as much as copying the cells of a small model.
#include <cstring>

#include "fast/copy_threads.h"
#include "guarded.h"
#include "probe_kv.h"
#include "probe_memory.h"
#include "probe_state.h"
#include "probe_state_io.h"

namespace pykv {

namespace {

// The cells that a state of this sequence holds, in their order in the cache.
std::vector<live_cell> cells_to_write(const memory * m, memory_part part, llama_seq_id seq) {
    const llama_kv_cache * cache = part == PART_WINDOW ? m->swa : m->base;
    const llama_kv_cells & cells = cache->get_cells(seq);
    const llama_pos last = cells.seq_pos_max(seq);
    std::vector<live_cell> result;
    for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
        if (cells.is_empty(i) || !cells.seq_has(i, seq)) {
            continue;
        }
        const llama_pos pos = cells.pos_get(i);
        // What no later query can see stays behind.
        if (part != PART_WINDOW || !llama_hparams::is_masked_swa(m->hparams->n_swa, m->hparams->swa_type, pos, last)) {
            result.push_back({pos, i});
        }
    }
    return result;
}

struct writer {
    uint8_t * at;

    void bytes(const void * from, size_t n) {
        std::memcpy(at, from, n);
        at += n;
    }
    template <class T> void put(T value) { bytes(&value, sizeof(value)); }
};

void write_cells(writer & out, const memory * m, const state_part & part, llama_seq_id seq,
                 const std::vector<live_cell> & cells) {
    const llama_kv_cells & held = (part.part == PART_WINDOW ? m->swa : m->base)->get_cells(seq);
    for (const live_cell & cell : cells) {
        out.put<llama_pos>(cell.pos);
        out.put<uint32_t>(1);
        if (part.extended) {
            out.put<llama_kv_cell_ext>(held.ext_get(cell.cell));
        }
        out.put<llama_seq_id>(seq);
    }
}

int which_of(const state_rows & rows) { return rows.kind == BLOCK_K ? 0 : 1; }

size_t part_bytes(const memory * m, const state_part & part, size_t n) {
    size_t size = 4 + 4 * size_t(part.n_stream);
    if (n == 0) {
        return size;
    }
    size += n * (12 + (part.extended ? sizeof(llama_kv_cell_ext) : 0)) + 8;
    for (const state_rows & rows : state_rows_of(m, part.v_trans, part.part)) {
        size += 12 + rows.row_bytes * n;
    }
    return size;
}

class walked_state : public seq_state {
  public:
    walked_state(const memory * m, bool v_trans, llama_seq_id seq);
    void write(uint8_t * dst, bool two) const override;

  private:
    // Rows of one tensor, and where they go.
    struct rows_job {
        size_t     part;
        state_rows rows;
        uint8_t *  dst;
    };
    uint8_t * write_heads(size_t i, uint8_t * dst, std::vector<rows_job> & jobs) const;

    const memory *                      m;
    llama_seq_id                        seq;
    std::vector<state_part>             parts;
    std::vector<std::vector<live_cell>> cells;  // of each part; empty for the recurrent one
};

walked_state::walked_state(const memory * m, bool v_trans, llama_seq_id seq) : m(m), seq(seq) {
    size = 8;
    for (const state_part & part : state_parts(m, v_trans, false)) {
        parts.push_back(part);
        if (part.part == PART_RECURRENT) {
            state_writer io(nullptr);
            m->recurrent->state_write(io, seq, 0);
            cells.emplace_back();
            size += io.n_bytes();
        } else {
            cells.push_back(cells_to_write(m, part.part, seq));
            size += part_bytes(m, part, cells.back().size());
        }
    }
}

// All but the rows of K and V, which are to be copied then.
uint8_t * walked_state::write_heads(size_t i, uint8_t * dst, std::vector<rows_job> & jobs) const {
    const state_part &     part = parts[i];
    const llama_kv_cache * cache = part.part == PART_WINDOW ? m->swa : m->base;
    const uint32_t         own = cache->get_stream(seq);
    writer                 out{dst};
    out.put<uint32_t>(part.n_stream);
    for (uint32_t s = 0; s < part.n_stream; ++s) {
        out.put<uint32_t>(s == own ? uint32_t(cells[i].size()) : 0);
        if (s != own || cells[i].empty()) {
            continue;
        }
        write_cells(out, m, part, seq, cells[i]);
        out.put<uint32_t>(part.v_trans);
        out.put<uint32_t>(part.n_layer);
        for (const state_rows & rows : state_rows_of(m, part.v_trans, part.part)) {
            out.put<int32_t>(rows.type);
            if (rows.kind == BLOCK_V_TRANS) {
                out.put<uint32_t>(uint32_t(ggml_type_size(ggml_type(rows.type))));
                out.put<uint32_t>(rows.n_embd);
            } else {
                out.put<uint64_t>(rows.row_bytes);
            }
            jobs.push_back({i, rows, out.at});
            out.at += rows.row_bytes * cells[i].size();
        }
    }
    return out.at;
}

void walked_state::write(uint8_t * dst, bool two) const {
    std::vector<rows_job> rows;
    writer                out{dst};
    out.put<uint32_t>(SEQ_MAGIC);
    out.put<llama_seq_id>(seq);
    for (size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].part == PART_RECURRENT) {
            state_writer io(out.at);
            m->recurrent->state_write(io, seq, 0);
            out.at += io.n_bytes();
        } else {
            out.at = write_heads(i, out.at, rows);
        }
    }
    for (const rows_job & job : rows) {
        // What a device has to be asked for is asked by one thread.
        two = two && tensor_at(m, parts[job.part].part, job.rows.layer, which_of(job.rows), seq).host;
    }
    counter jobs(rows.size());
    with_copy_threads(two && size >= WORTH_A_THREAD, jobs, [] {}, [&] {
        for (size_t k; jobs.take(k);) {
            const rows_job & job = rows[k];
            const auto &     held = cells[job.part];
            if (read_rows(m, parts[job.part].part, job.rows.layer, which_of(job.rows), seq, held, job.dst) == CAUGHT) {
                throw std::runtime_error(caught());
            }
        }
    });
    if (size_t(out.at - dst) != size) {
        throw std::logic_error("a state has another size than was counted");
    }
}

}  // namespace

seq_state * seq_state_new(const memory * m, bool v_trans, llama_seq_id seq) noexcept {
    return guarded<seq_state *>(nullptr, [&] { return new walked_state(m, v_trans, seq); });
}

}  // namespace pykv
