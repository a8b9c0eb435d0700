// Messages of ggml's RPC, version 7: reply sizes, and the replies fabricated after a loss.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

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
};

// Size of a reply in bytes, 0 for none. RPC_GET_TENSOR's request ends with the requested size (8 bytes).
inline uint64_t rpc_answer_size(uint8_t command, uint64_t last_of_request) {
    switch (command) {
        case RPC_ALLOC_BUFFER:
        case RPC_GET_DEVICE_MEMORY: return 16;
        case RPC_GET_ALIGNMENT:
        case RPC_GET_MAX_SIZE:
        case RPC_BUFFER_GET_BASE:
        case RPC_GET_ALLOC_SIZE:    return 8;
        case RPC_SET_TENSOR_HASH:
        case RPC_COPY_TENSOR:       return 1;
        case RPC_GET_TENSOR:        return last_of_request;
        case RPC_HELLO:             return 28;
        case RPC_DEVICE_COUNT:      return 4;
        default:                    return 0;
    }
}

// Write a reply with which ggml's client can finish its call: failed allocation, successful copy, zero
// tensors.
inline void rpc_stand_in(uint8_t command, void * answer, size_t size) {
    const auto set = [&](uint64_t value) { std::memcpy(answer, &value, size < sizeof(value) ? size : sizeof(value)); };
    std::memset(answer, 0, size);
    switch (command) {
        case RPC_GET_ALIGNMENT:     return set(128);
        case RPC_GET_MAX_SIZE:      return set(uint64_t(1) << 48);
        case RPC_BUFFER_GET_BASE:   return set(uint64_t(1) << 20);
        case RPC_GET_DEVICE_MEMORY:
        case RPC_SET_TENSOR_HASH:
        case RPC_COPY_TENSOR:
        case RPC_DEVICE_COUNT:      return set(1);
        case RPC_HELLO:             return set(RPC_MAJOR);
        default:                    return;
    }
}

}  // namespace pykv
