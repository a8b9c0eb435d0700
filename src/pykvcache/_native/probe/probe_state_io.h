// Bytes out of llama.cpp's own writer of states.
#pragma once

#include <cstring>

#include "llama-io.h"
#include "transfers.h"

namespace pykv {

// Copies what is written; with NULL it only counts. llama.cpp's own one reads the tensors in its destructor,
// where what a device throws ends the process.
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

    // Before this, rows that lie in the memory of a device may be missing.
    void finish() { reads.run(); }

  private:
    uint8_t *    dst;
    size_t       done = 0;
    tensor_reads reads;
};

}  // namespace pykv
