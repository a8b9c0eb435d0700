// States through llama.cpp's own writer and reader.
#include "edit.h"
#include "guarded.h"
#include "llama-arch.h"
#include "probe_memory.h"
#include "probe_state_io.h"
#include "state_cursor.h"
#include "state_layout.h"

namespace pykv {

namespace {

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

class head_output : public state_output<head_output> {
  public:
    explicit head_output(llama_io_write_i & io) : io(io) {}

    void bytes(const void * data, size_t n) { io.write(data, n); }

  private:
    llama_io_write_i & io;
};

// A state by llama.cpp's writer: of a memory, with the head of a state, or of its recurrent part, without.
class written_state : public seq_state {
  public:
    written_state(const memory * m, llama_seq_id seq, llama_state_seq_flags flags, bool is_part)
        : m(m), seq(seq), flags(flags), is_part(is_part) {
        size = put(nullptr);
    }

    void write(uint8_t * dst, bool) const override { put(dst); }

  private:
    size_t put(uint8_t * dst) const {
        state_writer io(dst);
        if (is_part) {
            m->recurrent->state_write(io, seq, flags);
        } else {
            head_output head(io);
            visit_head(head, seq, llm_arch_name(m->arch));
            m->mem->state_write(io, seq, flags);
        }
        io.finish();
        return io.n_bytes();
    }

    const memory *        m;
    llama_seq_id          seq;
    llama_state_seq_flags flags;
    bool                  is_part;
};

llama_state_seq_flags flags_of(bool partial) { return partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : 0; }

}  // namespace

seq_state * recurrent_state_new(const memory * m, llama_seq_id seq) noexcept {
    return guarded<seq_state *>(nullptr, [&] { return new written_state(m, seq, 0, true); });
}

seq_state * written_state_new(const memory * m, llama_seq_id seq, bool partial) noexcept {
    return guarded<seq_state *>(nullptr, [&] { return new written_state(m, seq, flags_of(partial), false); });
}

int32_t seq_state_write(const seq_state * state, uint8_t * dst, bool two) noexcept {
    return guarded_void([&] { state->write(dst, two); });
}

int32_t state_read(edit_key key, memory * m, llama_seq_id seq, bool partial, const std::vector<state_piece> & pieces) noexcept {
    return guarded_void([&] {
        piece_reader io(key, pieces);
        if (seq >= 0) {
            io.in.skip(SEQ_HEAD_BYTES);
        } else {
            io.in.skip(io.in.get<uint32_t>());
        }
        m->mem->state_read(io, seq, flags_of(partial));
        io.writes.run();
    });
}

}  // namespace pykv
