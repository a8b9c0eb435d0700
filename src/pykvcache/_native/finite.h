// Whether a row of outputs is finite: one pass over it, which the compiler vectorises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pykv {

// The first place of NaN or infinity, or -1. Of logits, minus infinity says that a token cannot come.
inline int64_t first_not_finite(const float * row, size_t n, bool is_logits) noexcept {
    constexpr uint32_t SIGN = 0x80000000, INFINITE = 0x7f800000, LOWEST_EXPONENT = 0x00800000;
    constexpr size_t   WIDTH = 16;  // as many sums as keep a core busy
    const auto bits_of = [&](size_t i) {
        uint32_t bits;
        std::memcpy(&bits, row + i, sizeof bits);
        return bits;
    };
    // Where all bits of the exponent are set, one more carries into the sign.
    uint32_t found[WIDTH] = {};
    size_t   i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        for (size_t k = 0; k < WIDTH; ++k) {
            found[k] |= (bits_of(i + k) & INFINITE) + LOWEST_EXPONENT;
        }
    }
    for (; i < n; ++i) {
        found[0] |= (bits_of(i) & INFINITE) + LOWEST_EXPONENT;
    }
    uint32_t any = 0;
    for (const uint32_t f : found) {
        any |= f;
    }
    for (i = 0; (any & SIGN) && i < n; ++i) {
        const uint32_t bits = bits_of(i);
        if ((bits & INFINITE) == INFINITE && !(is_logits && bits == (SIGN | INFINITE))) {
            return static_cast<int64_t>(i);
        }
    }
    return -1;
}

}  // namespace pykv
