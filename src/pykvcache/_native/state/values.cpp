// Finds values that are too large by comparing bits: without the sign, a float's bits sort like its value, with
// infinity and NaN on top.
#include "values.h"

#include <algorithm>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__GNUC__)
#define PYKV_AVX2
#define PYKV_INLINE inline __attribute__((always_inline))
#else
#define PYKV_INLINE inline
#endif

namespace pykv {

namespace {

constexpr uint32_t FLOAT_SIGN = 0x80000000, FLOAT_INFINITE = 0x7f800000, LARGEST_F16 = 0x7bff;

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

bool any_scale_above(const uint8_t * data, size_t n, size_t unit, uint32_t limit) {
    bool above = false;
    for (size_t i = 0; i < n; ++i) {
        uint16_t bits;
        std::memcpy(&bits, data + i * unit, sizeof(bits));
        above |= uint32_t(bits & 0x7fff) > limit;
    }
    return above;
}

// Blocks begin with an f16 scale, in some types followed by a minimum.
bool has_minimum(ggml_type type) { return type == GGML_TYPE_Q4_1 || type == GGML_TYPE_Q5_1; }

}  // namespace

int64_t first_not_finite(const float * row, size_t n, bool is_logits) noexcept {
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

float largest_value(uint64_t n, bool as_f16) {
    const double largest = double(std::numeric_limits<float>::max()) / (65504.0 * double(std::max<uint64_t>(n, 1)));
    return float(as_f16 ? std::min(largest, 65504.0) : largest);
}

value_check::value_check(ggml_type type, uint64_t n, bool flash) : type(type), unit(ggml_type_size(type)) {
    const float largest = largest_value(n, flash && type == GGML_TYPE_F32);
    std::memcpy(&limit, &largest, sizeof(limit));
    if (type == GGML_TYPE_BF16) {
        limit >>= 16;
    } else if (type != GGML_TYPE_F32) {
        limit = LARGEST_F16;
    }
}

void value_check::look(const uint8_t * data, size_t n) {
    switch (type) {
        case GGML_TYPE_F32:
            above |= any_above<uint32_t>(data, n, limit);
            break;
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
            above |= any_above<uint16_t>(data, n, uint16_t(limit));
            break;
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_IQ4_NL:
            above |= any_scale_above(data, n, unit, limit);
            if (has_minimum(type)) {
                above |= any_scale_above(data + sizeof(uint16_t), n, unit, limit);
            }
            break;
        default:
            break;  // integers
    }
}

void value_check::take(const uint8_t * data, size_t size) {
    if (size == 0) {
        return;  // empty data may have no address
    }
    if (n_rest > 0) {
        const size_t more = std::min(unit - n_rest, size);
        std::memcpy(rest.data() + n_rest, data, more);
        n_rest += more;
        data += more;
        size -= more;
        if (n_rest < unit) {
            return;
        }
        look(rest.data(), 1);
        n_rest = 0;
    }
    look(data, size / unit);
    n_rest = size % unit;
    std::memcpy(rest.data(), data + size - n_rest, n_rest);
}

}  // namespace pykv
