// The largest number among values, as bits: those of floats of one sign are in the order of the
// numbers, with infinity and NaN above all.
#include "probe_values.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace pykv {

namespace {

constexpr uint32_t LARGEST_F16 = 0x7bff;

// What the compiler makes vectors of: no early end, one type.
template <class T> uint32_t largest_bits(const uint8_t * data, size_t n) {
    constexpr T magnitude = std::numeric_limits<T>::max() >> 1;
    T           top = 0;
    for (size_t i = 0; i < n; ++i) {
        T bits;
        std::memcpy(&bits, data + i * sizeof(T), sizeof(T));
        top = std::max<T>(top, bits & magnitude);
    }
    return top;
}

uint32_t largest_scale(const uint8_t * data, size_t n, size_t unit) {
    uint32_t top = 0;
    for (size_t i = 0; i < n; ++i) {
        top = std::max(top, largest_bits<uint16_t>(data + i * unit, 1));
    }
    return top;
}

// Blocks begin with a scale in f16, and those of some types go on with a minimum.
bool has_minimum(ggml_type type) { return type == GGML_TYPE_Q4_1 || type == GGML_TYPE_Q5_1; }

}  // namespace

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
            top = std::max(top, largest_bits<uint32_t>(data, n));
            break;
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
            top = std::max(top, largest_bits<uint16_t>(data, n));
            break;
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_IQ4_NL:
            top = std::max(top, largest_scale(data, n, unit));
            if (has_minimum(type)) {
                top = std::max(top, largest_scale(data + sizeof(uint16_t), n, unit));
            }
            break;
        default:
            break;  // integers
    }
}

void value_check::take(const uint8_t * data, size_t size) {
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
