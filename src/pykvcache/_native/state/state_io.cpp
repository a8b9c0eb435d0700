// Writes and reads states: a sequence's cells directly, the rest through llama.cpp's own writer and reader.
#include <algorithm>

#include "edit.h"
#include "guarded.h"
#include "probe_kv.h"
#include "probe_memory.h"
#include "state_layout.h"
#include "state_pieces.h"
#include "team.h"

namespace pykv {

namespace {

// Output for a state: copies its bytes, or only counts them if NULL. llama.cpp's own class reads tensors in its
// destructor, where an exception from a device ends the process.
class state_writer : public llama_io_write_i, public state_output<state_writer> {
  public:
    explicit state_writer(uint8_t * dst) : dst(dst) {}

    void bytes(const void * src, size_t size) {
        if (dst) {
            std::memcpy(dst + done, src, size);
        }
        done += size;
    }
    void write(const void * src, size_t size) override { bytes(src, size); }
    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        if (dst) {
            reads.add(tensor, offset, size, dst + done);
        }
        done += size;
    }
    size_t n_bytes() override { return done; }

    // Completes reads from devices; before it their rows may be missing.
    size_t finish() {
        reads.run();
        return done;
    }

  protected:
    uint8_t * dst;
    size_t    done = 0;

  private:
    tensor_reads reads;
};

// A state by llama.cpp's writer: of a memory, with the head of a state, or of its recurrent part, without.
class written_state : public seq_state {
  public:
    written_state(const memory * m, llama_seq_id seq, part_set which) : m(m), seq(seq), which(which) { size = put(nullptr); }

    void write(uint8_t * dst, bool) const override { put(dst); }

  private:
    size_t put(uint8_t * dst) const {
        state_writer io(dst);
        if (which == RECURRENT_PARTS) {
            m->recurrent->state_write(io, seq, 0);
        } else {
            visit_head(io, seq, llm_arch_name(m->arch));
            m->mem->state_write(io, seq, which == PARTIAL_PARTS ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : 0);
        }
        return io.finish();
    }

    const memory * m;
    llama_seq_id   seq;
    part_set       which;
};

// A part of a sequence's state, with its cells in cache order; none of a recurrent part.
struct walked_part {
    state_part             part;
    uint32_t               stream = 0;
    std::vector<live_cell> cells = {};
};

// Rows of one tensor, and their destination.
struct rows_job {
    live_tensor tensor;
    size_t      part;
    uint8_t *   dst;
};

// Writes everything but the rows of K and V, which are copied afterwards.
class cell_writer : public state_writer {
  public:
    cell_writer(uint8_t * dst, const memory * m, llama_seq_id seq, std::vector<rows_job> & jobs)
        : state_writer(dst), m(m), seq(seq), jobs(jobs) {}

    void visit(const walked_part & next, size_t number) {
        now = &next;
        i = number;
        visit_part(*this, next.part, state_rows_of(m, next.part.v_trans, next.part.part));
    }

    uint32_t cells(const state_part & part, uint32_t stream) {
        const auto n = stream == now->stream ? uint32_t(now->cells.size()) : 0;
        put(n);
        if (!dst) {
            done += n * cell_bytes(part);
            return n;
        }
        const llama_kv_cells & held = cache_of(m, part.part)->get_cells(seq);
        for (uint32_t k = 0; k < n; ++k) {
            const live_cell & cell = now->cells[k];
            const auto        ext = part.extended ? held.ext_get(cell.cell) : llama_kv_cell_ext();
            static_assert(sizeof(ext) == CELL_EXT_BYTES);
            put_cell(part, cell.pos, &ext, &seq, 1);
        }
        return n;
    }

    void rows(const state_part &, uint32_t, const state_rows & rows, uint32_t n) {
        if (dst) {
            jobs.push_back({tensor_at(m, rows.part, rows.layer, which_of(rows.kind), seq), i, dst + done});
        }
        done += rows.row_bytes * n;
    }

  private:
    const memory *          m;
    llama_seq_id            seq;
    std::vector<rows_job> & jobs;
    const walked_part *     now = nullptr;
    size_t                  i = 0;
};

// A sequence's state without llama.cpp's walk, which checks every cell for every sequence, twice.
class walked_state : public seq_state {
  public:
    walked_state(const memory * m, bool v_trans, llama_seq_id seq, llama_pos window_from) : m(m), seq(seq) {
        for (const state_part & part : state_parts(m, v_trans, ALL_PARTS)) {
            parts.push_back({part});
            if (part.part != PART_RECURRENT) {
                walked_part & walked = parts.back();
                walked.stream = stream_of(*cache_of(m, part.part), seq);
                walked.cells = cells_to_write(part.part, window_from);
            }
        }
        std::vector<rows_job> none;
        size = put(nullptr, none);
    }

    void write(uint8_t * dst, bool two) const override {
        std::vector<rows_job> rows;
        if (put(dst, rows) != size) {
            throw std::logic_error("a state has another size than was counted");
        }
        std::vector<std::vector<cell_run>> runs;
        for (const walked_part & part : parts) {
            runs.push_back(runs_of(part.cells.data(), part.cells.size()));
        }
        // Device reads are issued by one thread.
        two = two && std::all_of(rows.begin(), rows.end(), [](const rows_job & job) { return job.tensor.host; });
        counter jobs(rows.size());
        share(jobs, two && size >= WORTH_A_THREAD ? 2 : 1, [&](int) {
            for (size_t k; jobs.take(k);) {
                tensor_reads reads;
                add_rows(reads, rows[k].tensor, runs[rows[k].part], rows[k].dst);
                reads.run();
            }
        });
    }

  private:
    std::vector<live_cell> cells_to_write(memory_part part, llama_pos window_from) const {
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

    size_t put(uint8_t * dst, std::vector<rows_job> & jobs) const {
        cell_writer out(dst, m, seq, jobs);
        visit_head(out, seq, nullptr);
        for (size_t i = 0; i < parts.size(); ++i) {
            if (parts[i].part.part == PART_RECURRENT) {
                m->recurrent->state_write(out, seq, 0);
            } else {
                out.visit(parts[i], i);
            }
        }
        return out.finish();
    }

    const memory *           m;
    llama_seq_id             seq;
    std::vector<walked_part> parts;
};

// Input for llama.cpp's state reader. Like llama.cpp's own class, it copies tensors last.
class piece_reader : public llama_io_read_i {
  public:
    piece_reader(const edit_key & key, const std::vector<state_piece> & pieces) : in(pieces), writes(key) {}

    void read(void * dst, size_t size) override { in.read(dst, size); }

    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        in.take(size, [&](const uint8_t * from, uint64_t step) {
            writes.add(tensor, offset, step, from);
            offset += step;
        });
    }

    size_t n_bytes() override { return in.tell(); }

    cursor        in;
    tensor_writes writes;
};

}  // namespace

seq_state * seq_state_new(const memory * m, bool v_trans, llama_seq_id seq, part_set which, llama_pos window_from) noexcept {
    return guarded<seq_state *>(nullptr, [&]() -> seq_state * {
        const bool walks = !is_plain() || window_from != POS_END;
        if (seq >= 0 && which == ALL_PARTS && m->has_layout && walks) {
            return new walked_state(m, v_trans, seq, window_from);
        }
        return new written_state(m, seq, m->has_layout ? which : ALL_PARTS);
    });
}

int32_t seq_state_write(const seq_state * state, uint8_t * dst, bool two) noexcept {
    return guarded_void([&] { state->write(dst, two); });
}

int32_t state_read(edit_key key, memory * m, llama_seq_id seq, bool partial, const std::vector<state_piece> & pieces) noexcept {
    return guarded_void([&] {
        piece_reader io(key, pieces);
        io.in.skip(seq >= 0 ? SEQ_HEAD_BYTES : io.in.get<uint32_t>());
        m->mem->state_read(io, seq, partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : 0);
        io.writes.run();
    });
}

}  // namespace pykv
