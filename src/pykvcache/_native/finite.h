// Whether a row of outputs is one of numbers: one pass, which the compiler makes vectors of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pykv {

// The first place of NaN or infinity, or -1. Of logits, minus infinity says that a token cannot come.
inline int64_t first_not_finite(const float * row, size_t n, bool is_logits) noexcept {
    constexpr uint32_t SIGN = 0x80000000, INFINITE = 0x7f800000;
    const auto bits_of = [&](size_t i) {
        uint32_t bits;
        std::memcpy(&bits, row + i, sizeof bits);
        return bits;
    };
    const uint32_t good = is_logits ? SIGN | INFINITE : 0;
    uint32_t       bad  = 0;
    for (size_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(i);
        bad |= uint32_t((bits & ~SIGN) >= INFINITE) & uint32_t(bits != good);
    }
    for (size_t i = 0; bad && i < n; ++i) {
        const uint32_t bits = bits_of(i);
        if ((bits & ~SIGN) >= INFINITE && bits != good) {
            return static_cast<int64_t>(i);
        }
    }
    return -1;
}

}  // namespace pykv
