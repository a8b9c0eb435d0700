// Copies between tensors and main memory, asked for one by one and carried out together: a device takes as
// long to answer for one cell as for thousands of bytes. What the CPU can reach is copied at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ggml-backend.h"

namespace pykv {

// Whether the CPU may follow a tensor's pointer.
bool is_host(const ggml_tensor * t);
// For tests: let no tensor count as one that the CPU may reach; `even`: of a device that copies runs at even
// distances by one request.
void hide_host(bool hidden, bool even) noexcept;

// What was asked of devices since the process began.
struct transfer_counts {
    uint64_t reads, writes, bytes_read, bytes_written;
};
transfer_counts transfers() noexcept;

// `Bytes` is where the bytes of a tensor go to, or come from. What overlaps nothing may come in any order.
template <class Bytes> class tensor_copies {
  public:
    void add(const ggml_tensor * t, size_t offset, size_t size, Bytes bytes);
    // Carry out what is left; without it nothing of that happens.
    void run();

  private:
    struct part {
        size_t offset, size;
        Bytes  bytes;
    };
    using parts_end = typename std::vector<part>::const_iterator;

    bool as_one();
    void together(parts_end begin, parts_end end);

    const ggml_tensor *  owner = nullptr;  // no view
    bool                 host = false;
    std::vector<part>    parts;
    std::vector<uint8_t> staging;
};

using tensor_reads = tensor_copies<uint8_t *>;

class edit_key;  // edit.h

// What writes into tensors needs the key of what changes a memory.
class tensor_writes : public tensor_copies<const uint8_t *> {
  public:
    explicit tensor_writes(const edit_key &) {}
};

}  // namespace pykv
