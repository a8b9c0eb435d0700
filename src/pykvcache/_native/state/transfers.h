// Batched copies between tensors and host memory: for a device, one cell costs as much as thousands of bytes. Host
// tensors are copied immediately.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ggml-backend.h"

namespace pykv {

// Whether a tensor's data is in host memory.
bool is_host(const ggml_tensor * t);
// For tests: treat all tensors as device memory; `even`: of a device that copies evenly spaced runs in one
// request.
void hide_host(bool hidden, bool even) noexcept;

// Transfers since the process began.
struct transfer_counts {
    uint64_t reads, writes, bytes_read, bytes_written;
};
transfer_counts transfers() noexcept;

// `Bytes` is the host side: destination or source. Copies that do not overlap may be added in any order.
template <class Bytes> class tensor_copies {
  public:
    void add(const ggml_tensor * t, size_t offset, size_t size, Bytes bytes);
    // Perform queued copies.
    void run();

  private:
    struct part {
        size_t offset, size;
        Bytes  bytes;
    };
    using parts_end = typename std::vector<part>::const_iterator;

    bool as_one();
    void together(parts_end begin, parts_end end);

    const ggml_tensor *  owner = nullptr;  // not a view
    bool                 host = false;
    std::vector<part>    parts;
    std::vector<uint8_t> staging;
};

using tensor_reads = tensor_copies<uint8_t *>;

class edit_key;  // edit.h

// Writing to tensors requires the key for changing a memory.
class tensor_writes : public tensor_copies<const uint8_t *> {
  public:
    explicit tensor_writes(const edit_key &) {}
};

}  // namespace pykv
