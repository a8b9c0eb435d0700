// Numbers of blocks: of the path up to each, the same whenever it returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pykv::shadow {

// The number of a block by that of the block before it, and its tokens. No cryptography: whoever wants two blocks with one
// number finds them, and gains that a policy takes one for the other.
inline uint32_t next_key(uint32_t key, const unsigned char * tokens, size_t size) noexcept {
    uint64_t mixed = key + 0x9E3779B97F4A7C15ull;
    for (size_t at = 0; at < size; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, tokens + at, size - at < 8 ? size - at : 8);
        mixed = (mixed ^ word) * 0xFF51AFD7ED558CCDull;
        mixed ^= mixed >> 32;
    }
    mixed *= 0xC4CEB9FE1A85EC53ull;
    return static_cast<uint32_t>(mixed >> 32);
}

}  // namespace pykv::shadow
