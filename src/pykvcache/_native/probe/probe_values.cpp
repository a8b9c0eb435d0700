// Finds values that are too large by comparing bits: without the sign, a float's bits sort like its value, with
// infinity and NaN on top.
#include "probe_values.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "finite.h"

namespace pykv {

namespace {

constexpr uint32_t LARGEST_F16 = 0x7bff;

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
