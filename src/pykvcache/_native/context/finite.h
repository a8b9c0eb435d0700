// Finds NaN and infinity in a row of outputs, in one vectorised pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define PYKV_AVX2
#define PYKV_INLINE inline __attribute__((always_inline))
#else
#define PYKV_INLINE inline
#endif

namespace pykv {

constexpr uint32_t FLOAT_SIGN = 0x80000000, FLOAT_INFINITE = 0x7f800000;

// Returns whether any float has all exponent bits set.
PYKV_INLINE bool has_not_finite(const float * row, size_t n) noexcept {
    constexpr uint32_t LOWEST_EXPONENT = 0x00800000;
    constexpr size_t   WIDTH = 32;  // independent sums that keep a core busy
    const auto exponent_of = [row](size_t i) {
        uint32_t bits;
        std::memcpy(&bits, row + i, sizeof bits);
        return bits & FLOAT_INFINITE;
    };
    // Adding one to a full exponent carries into the sign.
    uint32_t found[WIDTH] = {};
    size_t   i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        for (size_t k = 0; k < WIDTH; ++k) {
            found[k] |= exponent_of(i + k) + LOWEST_EXPONENT;
        }
    }
    for (; i < n; ++i) {
        found[0] |= exponent_of(i) + LOWEST_EXPONENT;
    }
    uint32_t any = 0;
    for (const uint32_t f : found) {
        any |= f;
    }
    return (any & FLOAT_SIGN) != 0;
}

#ifdef PYKV_AVX2
// The same in half the time. Portable builds contain it and check the processor first.
__attribute__((target("avx2"))) inline bool has_not_finite_avx2(const float * row, size_t n) noexcept {
    return has_not_finite(row, n);
}
#endif

inline bool may_be_not_finite(const float * row, size_t n) noexcept {
#ifdef PYKV_AVX2
    static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
    if (has_avx2) {
        return has_not_finite_avx2(row, n);
    }
#endif
    return has_not_finite(row, n);
}

// First index of NaN or infinity, or -1. In logits, minus infinity is valid: it excludes a token.
inline int64_t first_not_finite(const float * row, size_t n, bool is_logits) noexcept {
    if (!may_be_not_finite(row, n)) {
        return -1;
    }
    for (size_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, row + i, sizeof bits);
        if ((bits & FLOAT_INFINITE) == FLOAT_INFINITE && !(is_logits && bits == (FLOAT_SIGN | FLOAT_INFINITE))) {
            return static_cast<int64_t>(i);
        }
    }
    return -1;
}

}  // namespace pykv
