// What ggml's RPC says on the wire (version 7): how long each answer is, and whether it can be true.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "link.h"

namespace pykv {

constexpr uint8_t RPC_MAJOR = 7, RPC_MINOR = 0;

enum rpc_command : uint8_t {
    RPC_ALLOC_BUFFER = 0,
    RPC_GET_ALIGNMENT,
    RPC_GET_MAX_SIZE,
    RPC_BUFFER_GET_BASE,
    RPC_FREE_BUFFER,
    RPC_BUFFER_CLEAR,
    RPC_SET_TENSOR,
    RPC_SET_TENSOR_HASH,
    RPC_GET_TENSOR,
    RPC_COPY_TENSOR,
    RPC_GRAPH_COMPUTE,
    RPC_GET_DEVICE_MEMORY,
    RPC_INIT_TENSOR,
    RPC_GET_ALLOC_SIZE,
    RPC_HELLO,
    RPC_DEVICE_COUNT,
    RPC_GRAPH_RECOMPUTE,
    RPC_MEMSET_TENSOR,
    RPC_COMMANDS,
};

inline const char * rpc_doing(uint8_t command) {
    static const char * const names[RPC_COMMANDS] = {
        "allocating a buffer", "asking for the alignment", "asking for the largest buffer", "asking where a buffer is",
        "freeing a buffer", "clearing a buffer", "writing a tensor", "asking for known weights", "reading a tensor",
        "copying a tensor", "computing", "asking for free memory", "preparing a tensor", "asking for a tensor's size",
        "greeting", "asking for the devices", "computing again", "filling a tensor",
    };
    return command < RPC_COMMANDS ? names[command] : "an unknown command";
}

constexpr size_t   RPC_DEVICES_MAX = 16;
constexpr uint64_t RPC_BYTES_MAX   = uint64_t(1) << 48;
constexpr size_t   RPC_NO_ANSWER   = SIZE_MAX;

// What was asked that the answer depends on.
struct rpc_request {
    uint8_t  command = RPC_COMMANDS;
    uint32_t device  = 0;
    uint64_t size    = 0;  // of a buffer, or of what is read

    void read(const void * data, size_t n) {
        device = 0;
        size   = 0;
        if (n >= sizeof(device)) {
            std::memcpy(&device, data, sizeof(device));
        }
        if (n >= sizeof(size)) {
            std::memcpy(&size, static_cast<const char *>(data) + n - sizeof(size), sizeof(size));
        }
    }

    size_t answer_size() const {
        switch (command) {
            case RPC_ALLOC_BUFFER:
            case RPC_GET_DEVICE_MEMORY: return 16;
            case RPC_GET_ALIGNMENT:
            case RPC_GET_MAX_SIZE:
            case RPC_BUFFER_GET_BASE:
            case RPC_GET_ALLOC_SIZE:    return 8;
            case RPC_SET_TENSOR_HASH:
            case RPC_COPY_TENSOR:       return 1;
            case RPC_GET_TENSOR:        return static_cast<size_t>(size);
            case RPC_HELLO:             return 28;
            case RPC_DEVICE_COUNT:      return 4;
            default:                    return RPC_NO_ANSWER;
        }
    }
};

template <class T> T rpc_value(const void * data, size_t at = 0) {
    T value;
    std::memcpy(&value, static_cast<const char *>(data) + at, sizeof(value));
    return value;
}

// Why an answer cannot be true, or NULL. What a server computes cannot be checked.
inline const char * rpc_lie(const rpc_request & request, const void * data) {
    switch (request.command) {
        case RPC_ALLOC_BUFFER: {
            const auto where = rpc_value<uint64_t>(data), size = rpc_value<uint64_t>(data, 8);
            return where != 0 && (size < request.size || size > RPC_BYTES_MAX) ? "a buffer of another size than asked for" : nullptr;
        }
        case RPC_GET_DEVICE_MEMORY: {
            const auto free = rpc_value<uint64_t>(data), total = rpc_value<uint64_t>(data, 8);
            return free > total || total > RPC_BYTES_MAX ? "more memory than there can be" : nullptr;
        }
        case RPC_GET_ALIGNMENT: {
            const auto alignment = rpc_value<uint64_t>(data);
            return alignment == 0 || (alignment & (alignment - 1)) || alignment > (1u << 20) ? "no alignment" : nullptr;
        }
        case RPC_GET_MAX_SIZE:
            return rpc_value<uint64_t>(data) < (1u << 20) ? "buffers below 1 MiB" : nullptr;
        case RPC_BUFFER_GET_BASE: {
            const auto base = rpc_value<uint64_t>(data);
            return base == 0 || base > UINT64_MAX - RPC_BYTES_MAX ? "no address" : nullptr;
        }
        case RPC_GET_ALLOC_SIZE:
            return rpc_value<uint64_t>(data) > RPC_BYTES_MAX ? "a tensor larger than there can be" : nullptr;
        case RPC_SET_TENSOR_HASH:
        case RPC_COPY_TENSOR:
            return rpc_value<uint8_t>(data) > 1 ? "neither yes nor no" : nullptr;
        case RPC_HELLO: {
            const auto major = rpc_value<uint8_t>(data), minor = rpc_value<uint8_t>(data, 1);
            return major != RPC_MAJOR || minor > RPC_MINOR ? "another version of the protocol" : nullptr;
        }
        case RPC_DEVICE_COUNT: {
            const auto n = rpc_value<uint32_t>(data);
            return n == 0 || n > RPC_DEVICES_MAX ? "not 1 to 16 devices" : nullptr;
        }
        default: return nullptr;
    }
}

// What ggml is told where a server no longer answers: what it can go on with until the call that waits is over.
inline void rpc_stand_in(const rpc_request & request, void * data, size_t n) {
    std::memset(data, 0, n);
    const auto set = [&](uint64_t value, size_t at) { std::memcpy(static_cast<char *>(data) + at, &value, sizeof(value)); };
    switch (request.command) {
        case RPC_GET_DEVICE_MEMORY: set(1, 0); set(1, 8); break;
        case RPC_GET_ALIGNMENT:     set(128, 0); break;
        case RPC_GET_MAX_SIZE:      set(RPC_BYTES_MAX, 0); break;
        case RPC_BUFFER_GET_BASE:   set(uint64_t(1) << 20, 0); break;
        case RPC_SET_TENSOR_HASH:
        case RPC_COPY_TENSOR:       std::memset(data, 1, n); break;
        case RPC_DEVICE_COUNT:      std::memset(data, 0, n); std::memset(data, 1, 1); break;
        case RPC_HELLO:             std::memset(data, RPC_MAJOR, 1); break;
        default:                    break;
    }
}

}  // namespace pykv
