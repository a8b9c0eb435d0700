// Finds large values, NaN and infinity in rows of numbers, in one vectorised pass.
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

// Written to be vectorised: no early exit, one type, and enough independent sums to keep a core busy.
template <class T> PYKV_INLINE bool any_above_plain(const uint8_t * data, size_t n, T limit) noexcept {
    constexpr T      SIGN = T(T(1) << (8 * sizeof(T) - 1)), MAGNITUDE = T(~SIGN);
    constexpr size_t WIDTH = 128 / sizeof(T);
    const auto excess_of = [=](size_t i) {
        T bits;
        std::memcpy(&bits, data + i * sizeof(T), sizeof(T));
        return T(limit - T(bits & MAGNITUDE));  // negative if larger
    };
    T      found[WIDTH] = {};
    size_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        for (size_t k = 0; k < WIDTH; ++k) {
            found[k] |= excess_of(i + k);
        }
    }
    for (; i < n; ++i) {
        found[0] |= excess_of(i);
    }
    T any = 0;
    for (const T f : found) {
        any |= f;
    }
    return (any & SIGN) != 0;
}

#ifdef PYKV_AVX2
// The same in half the time. Portable builds contain it and check the processor first.
template <class T> __attribute__((target("avx2"))) bool any_above_avx2(const uint8_t * data, size_t n, T limit) noexcept {
    return any_above_plain(data, n, limit);
}
#endif

// Whether any of n floats of this width is above a limit in magnitude; both as bits.
template <class T> bool any_above(const void * data, size_t n, T limit) noexcept {
    const auto * const bytes = static_cast<const uint8_t *>(data);
#ifdef PYKV_AVX2
    static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
    if (has_avx2) {
        return any_above_avx2(bytes, n, limit);
    }
#endif
    return any_above_plain(bytes, n, limit);
}

// First index of NaN or infinity, or -1. In logits, minus infinity is valid: it excludes a token.
inline int64_t first_not_finite(const float * row, size_t n, bool is_logits) noexcept {
    if (!any_above(row, n, FLOAT_INFINITE - 1)) {
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
