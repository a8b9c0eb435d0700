// Batches transfers to and from devices, and counts them.
#include "transfers.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>

#include "ggml-backend-impl.h"

namespace pykv {

namespace {

// Gaps up to this size are transferred along, because one more request costs as much as this many bytes. A write has
// to read the gap first.
constexpr size_t REACH = size_t(128) << 10, REACH_OVER = size_t(16) << 10;
// Limits of staged bytes and of queued requests.
constexpr size_t MOST_STAGED = size_t(16) << 20, MOST_PARTS = size_t(1) << 16;

std::atomic<bool>     hidden{false}, hidden_even{false};
std::atomic<uint64_t> n_reads{0}, n_writes{0}, read_bytes{0}, written_bytes{0};

void note(std::atomic<uint64_t> & count, std::atomic<uint64_t> & bytes, size_t size) {
    count.fetch_add(1, std::memory_order_relaxed);
    bytes.fetch_add(size, std::memory_order_relaxed);
}

void copy(const ggml_tensor * t, size_t offset, size_t size, uint8_t * to) {
    note(n_reads, read_bytes, size);
    ggml_backend_tensor_get(t, to, offset, size);
}

void copy(const ggml_tensor * t, size_t offset, size_t size, const uint8_t * from) {
    note(n_writes, written_bytes, size);
    ggml_backend_tensor_set(const_cast<ggml_tensor *>(t), from, offset, size);
}

#ifdef PYKVCACHE_HAS_GGML_BACKEND_TENSOR_GET_2D
// Copy n evenly spaced runs of `size` bytes in one request; false if the backend would need n requests.
bool copy_even(const ggml_tensor * t, size_t offset, size_t size, size_t n, size_t stride, uint8_t * to, size_t to_stride) {
    if (!t->buffer->iface.get_tensor_2d && !hidden_even) {
        return false;
    }
    note(n_reads, read_bytes, n * size);
    ggml_backend_tensor_get_2d(t, to, offset, size, n, stride, to_stride);
    return true;
}

bool copy_even(const ggml_tensor * t, size_t offset, size_t size, size_t n, size_t stride, const uint8_t * from,
               size_t from_stride) {
    if (!t->buffer->iface.set_tensor_2d && !hidden_even) {
        return false;
    }
    note(n_writes, written_bytes, n * size);
    ggml_backend_tensor_set_2d(const_cast<ggml_tensor *>(t), from, offset, size, n, stride, from_stride);
    return true;
}
#else
template <class... Any> bool copy_even(Any...) { return false; }
#endif

const ggml_tensor * owner_of(const ggml_tensor * t) { return t->view_src ? t->view_src : t; }

}  // namespace

bool is_host(const ggml_tensor * t) {
    const ggml_tensor * owner = owner_of(t);
    return owner->buffer && ggml_backend_buffer_is_host(owner->buffer) && !hidden.load(std::memory_order_relaxed);
}

void hide_host(bool yes, bool even) noexcept {
    hidden = yes;
    hidden_even = even;
}

transfer_counts transfers() noexcept { return {n_reads, n_writes, read_bytes, written_bytes}; }

template <class Bytes> void tensor_copies<Bytes>::add(const ggml_tensor * t, size_t offset, size_t size, Bytes bytes) {
    if (owner_of(t) != owner) {
        run();
        owner = owner_of(t);
        host = is_host(owner);
    }
    offset += t->view_src ? t->view_offs : 0;
    if (host) {
        if constexpr (std::is_same_v<Bytes, uint8_t *>) {
            ggml_backend_tensor_get(owner, bytes, offset, size);
        } else {
            ggml_backend_tensor_set(const_cast<ggml_tensor *>(owner), bytes, offset, size);
        }
        return;
    }
    if (!parts.empty() && parts.back().offset + parts.back().size == offset && parts.back().bytes + parts.back().size == bytes) {
        parts.back().size += size;
        return;
    }
    if (parts.size() == MOST_PARTS) {
        run();
    }
    parts.push_back({offset, size, bytes});
}

// Evenly spaced runs of equal size on both sides, as with transposed values.
template <class Bytes> bool tensor_copies<Bytes>::as_one() {
    if (parts.size() < 2 || parts[1].offset < parts[0].offset + parts[0].size || parts[1].bytes < parts[0].bytes + parts[0].size) {
        return false;
    }
    const size_t stride = parts[1].offset - parts[0].offset;
    const auto   apart = parts[1].bytes - parts[0].bytes;
    for (size_t i = 1; i < parts.size(); ++i) {
        if (parts[i].size != parts[0].size || parts[i].offset != parts[0].offset + i * stride ||
            parts[i].bytes != parts[0].bytes + ptrdiff_t(i) * apart) {
            return false;
        }
    }
    return copy_even(owner, parts[0].offset, parts[0].size, parts.size(), stride, parts[0].bytes, size_t(apart));
}

// One request for parts, sorted by offset, and the gaps between them.
template <class Bytes> void tensor_copies<Bytes>::together(parts_end begin, parts_end end) {
    const size_t first = begin->offset, size = (end - 1)->offset + (end - 1)->size - first;
    staging.resize(size);
    size_t wanted = 0;
    for (auto it = begin; it != end; ++it) {
        wanted += it->size;
    }
    constexpr bool reading = std::is_same_v<Bytes, uint8_t *>;
    if (reading || wanted < size) {
        copy(owner, first, size, staging.data());
    }
    for (auto it = begin; it != end; ++it) {
        if constexpr (reading) {
            std::memcpy(it->bytes, staging.data() + (it->offset - first), it->size);
        } else {
            std::memcpy(staging.data() + (it->offset - first), it->bytes, it->size);
        }
    }
    if constexpr (!reading) {
        copy(owner, first, size, static_cast<const uint8_t *>(staging.data()));
    }
}

template <class Bytes> void tensor_copies<Bytes>::run() {
    const auto before = [](const part & a, const part & b) { return a.offset < b.offset; };
    if (!std::is_sorted(parts.begin(), parts.end(), before)) {
        std::sort(parts.begin(), parts.end(), before);
    }
    constexpr bool   reading = std::is_same_v<Bytes, uint8_t *>;
    const auto       goes_along = [](size_t gap, size_t size) {
        return gap + size <= (reading || gap == 0 ? REACH : REACH_OVER);
    };
    const bool       done = as_one();
    for (auto it = parts.cbegin(); !done && it != parts.cend();) {
        auto   next = it + 1;
        size_t end = it->offset + it->size;
        while (it->size <= REACH && next != parts.cend() && next->offset >= end && goes_along(next->offset - end, next->size) &&
               next->offset + next->size - it->offset <= MOST_STAGED) {
            end = next->offset + next->size;
            ++next;
        }
        // At least three parts if the gaps must be read first.
        if (!reading && next - it == 2 && end - it->offset > it->size + (it + 1)->size) {
            --next;
        }
        if (next - it == 1) {
            copy(owner, it->offset, it->size, it->bytes);
        } else {
            together(it, next);
        }
        it = next;
    }
    parts.clear();
}

template class tensor_copies<uint8_t *>;
template class tensor_copies<const uint8_t *>;

}  // namespace pykv
