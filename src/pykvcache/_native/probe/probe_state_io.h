// Output for llama.cpp's state writer.
#pragma once

#include <cstring>

#include "llama-io.h"
#include "transfers.h"

namespace pykv {

// Copies written bytes, or only counts them if NULL. llama.cpp's own class reads tensors in its destructor, where an
// exception from a device ends the process.
class state_writer : public llama_io_write_i {
  public:
    explicit state_writer(uint8_t * dst) : dst(dst) {}

    void write(const void * src, size_t size) override {
        if (dst) {
            std::memcpy(dst + done, src, size);
        }
        done += size;
    }
    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        if (dst) {
            reads.add(tensor, offset, size, dst + done);
        }
        done += size;
    }
    size_t n_bytes() override { return done; }

    // Completes reads from devices; before it their rows may be missing.
    void finish() { reads.run(); }

  private:
    uint8_t *    dst;
    size_t       done = 0;
    tensor_reads reads;
};

}  // namespace pykv
