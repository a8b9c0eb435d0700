// Finds NaN, infinity and values that overflow in attention, in rows of numbers, in one pass at memory speed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "ggml.h"

namespace pykv {

// First index of NaN or infinity, or -1. In logits, minus infinity is valid: it excludes a token.
int64_t first_not_finite(const float * row, size_t n, bool is_logits) noexcept;

// Largest allowed value in rows of n values: multiplied by the largest f16, which bounds the other factor, and summed over
// a row it is a finite float32. (Even a masked cell counts, as 0 times its value.) `as_f16`: flash attention converts the
// float32 to f16, where it must be finite too.
float largest_value(uint64_t n, bool as_f16);

// Checks rows of one type, passed as bytes in pieces of any size.
class value_check {
  public:
    value_check(ggml_type type, uint64_t n, bool flash);

    void take(const uint8_t * data, size_t size);
    bool fits() const { return !above; }

  private:
    void look(const uint8_t * data, size_t n_units);

    ggml_type                type;
    size_t                   unit;       // bytes of a value or block
    uint32_t                 limit = 0;  // maximum of the bits without sign, of values or block scales
    bool                     above = false;  // whether one exceeds the limit
    std::array<uint8_t, 256> rest{};  // a unit split between two pieces
    size_t                   n_rest = 0;
};

}  // namespace pykv
