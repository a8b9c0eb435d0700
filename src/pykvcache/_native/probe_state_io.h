// Bytes out of llama.cpp's own writer of states.
#pragma once

#include <cstring>

#include "ggml-backend.h"
#include "llama-io.h"

namespace pykv {

// Copies what is written; with NULL it only counts.
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
            ggml_backend_tensor_get(tensor, dst + done, offset, size);
        }
        done += size;
    }
    size_t n_bytes() override { return done; }

  private:
    uint8_t * dst;
    size_t    done = 0;
};

}  // namespace pykv
