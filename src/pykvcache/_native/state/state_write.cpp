// Writes a sequence's state without llama.cpp's walk, which checks every cell for every sequence, twice.
#include <algorithm>

#include "guarded.h"
#include "probe_kv.h"
#include "probe_memory.h"
#include "probe_state_io.h"
#include "state_layout.h"
#include "team.h"

namespace pykv {

namespace {

// The cells of this sequence's state, in cache order.
std::vector<live_cell> cells_to_write(const memory * m, memory_part part, llama_seq_id seq, llama_pos window_from) {
    const llama_kv_cells & cells = cache_of(m, part)->get_cells(seq);
    // Omits cells that no later query sees, like llama.cpp.
    const llama_pos first = part == PART_WINDOW ? std::min(window_from, window_start(m, cells.seq_pos_max(seq))) : 0;
    std::vector<live_cell> result;
    for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
        if (!cells.is_empty(i) && cells.seq_has(i, seq) && cells.pos_get(i) >= first) {
            result.push_back({cells.pos_get(i), i});
        }
    }
    return result;
}

// Counts the bytes to be written.
class byte_counter : public state_output<byte_counter> {
  public:
    void bytes(const void *, size_t n) { size += n; }

    uint32_t cells(const state_part & part, uint32_t stream) {
        const uint32_t n = stream == own ? n_cells : 0;
        put(n);
        size += n * cell_bytes(part);
        return n;
    }

    void rows(const state_part &, uint32_t, const state_rows & rows, uint32_t n) { size += rows.row_bytes * n; }

    uint32_t own = 0, n_cells = 0;  // of the current part
    size_t   size = 0;
};

// Rows of one tensor, and their destination.
struct rows_job {
    size_t     part;
    state_rows rows;
    uint8_t *  dst;
};

// Writes everything but the rows of K and V, which are copied afterwards.
class head_writer : public state_output<head_writer> {
  public:
    head_writer(uint8_t * dst, llama_seq_id seq, std::vector<rows_job> & jobs) : at(dst), seq(seq), jobs(jobs) {}

    void bytes(const void * from, size_t n) {
        std::memcpy(at, from, n);
        at += n;
    }

    uint32_t cells(const state_part & part, uint32_t stream) {
        const bool is_own = stream == own;
        put(is_own ? uint32_t(held->size()) : 0);
        for (size_t i = 0; is_own && i < held->size(); ++i) {
            const live_cell & cell = (*held)[i];
            const auto        ext = part.extended ? cache->ext_get(cell.cell) : llama_kv_cell_ext();
            static_assert(sizeof(ext) == CELL_EXT_BYTES);
            put_cell(part, cell.pos, &ext, &seq, 1);
        }
        return is_own ? uint32_t(held->size()) : 0;
    }

    void rows(const state_part &, uint32_t, const state_rows & rows, uint32_t n) {
        jobs.push_back({i, rows, at});
        at += rows.row_bytes * n;
    }

    uint8_t * at;
    // The current part.
    size_t                         i = 0;
    uint32_t                       own = 0;
    const llama_kv_cells *         cache = nullptr;
    const std::vector<live_cell> * held = nullptr;

  private:
    llama_seq_id            seq;
    std::vector<rows_job> & jobs;
};

class walked_state : public seq_state {
  public:
    walked_state(const memory * m, bool v_trans, llama_seq_id seq, llama_pos window_from);
    void write(uint8_t * dst, bool two) const override;

  private:
    const memory *                      m;
    llama_seq_id                        seq;
    std::vector<state_part>             parts;
    std::vector<std::vector<live_cell>> cells;  // per part; empty for the recurrent one
};

walked_state::walked_state(const memory * m, bool v_trans, llama_seq_id seq, llama_pos window_from) : m(m), seq(seq) {
    byte_counter out;
    visit_head(out, seq, nullptr);
    for (const state_part & part : state_parts(m, v_trans, ALL_PARTS)) {
        parts.push_back(part);
        if (part.part == PART_RECURRENT) {
            state_writer io(nullptr);
            m->recurrent->state_write(io, seq, 0);
            cells.emplace_back();
            out.size += io.n_bytes();
        } else {
            cells.push_back(cells_to_write(m, part.part, seq, window_from));
            out.own = stream_of(*cache_of(m, part.part), seq);
            out.n_cells = uint32_t(cells.back().size());
            visit_part(out, part, state_rows_of(m, part.v_trans, part.part));
        }
    }
    size = out.size;
}

void walked_state::write(uint8_t * dst, bool two) const {
    std::vector<rows_job> rows;
    head_writer           out(dst, seq, rows);
    visit_head(out, seq, nullptr);
    for (size_t i = 0; i < parts.size(); ++i) {
        const state_part & part = parts[i];
        if (part.part == PART_RECURRENT) {
            state_writer io(out.at);
            m->recurrent->state_write(io, seq, 0);
            io.finish();
            out.at += io.n_bytes();
            continue;
        }
        out.i = i;
        out.own = stream_of(*cache_of(m, part.part), seq);
        out.cache = &cache_of(m, part.part)->get_cells(seq);
        out.held = &cells[i];
        visit_part(out, part, state_rows_of(m, part.v_trans, part.part));
    }
    for (const rows_job & job : rows) {
        // Device reads are issued by one thread.
        two = two && tensor_at(m, parts[job.part].part, job.rows.layer, which_of(job.rows.kind), seq).host;
    }
    counter jobs(rows.size());
    share(jobs, two && size >= WORTH_A_THREAD ? 2 : 1, [&](int) {
        for (size_t k; jobs.take(k);) {
            const rows_job & job = rows[k];
            const auto &     held = cells[job.part];
            tensor_reads     reads;
            add_rows(reads, tensor_at(m, parts[job.part].part, job.rows.layer, which_of(job.rows.kind), seq),
                     runs_of(held.data(), held.size()), job.dst);
            reads.run();
        }
    });
    if (size_t(out.at - dst) != size) {
        throw std::logic_error("a state has another size than was counted");
    }
}

}  // namespace

seq_state * seq_state_new(const memory * m, bool v_trans, llama_seq_id seq, llama_pos window_from) noexcept {
    if (is_plain() && window_from == POS_END) {
        return written_state_new(m, seq, false);
    }
    return guarded<seq_state *>(nullptr, [&] { return new walked_state(m, v_trans, seq, window_from); });
}

}  // namespace pykv
