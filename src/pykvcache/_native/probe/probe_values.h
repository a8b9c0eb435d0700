// Whether stored values are such as attention can multiply: one pass, at the speed of memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "ggml.h"

namespace pykv {

// The largest number that rows of n values may hold: its product with the largest f16, which bounds
// what stands on the other side, summed over a row, is still a finite float32. What is infinite makes
// every query NaN that only looks past it, and so does NaN: masked, it counts 0 times its value.
// `as_f16`: a float32 that flash attention takes as an f16 must be finite there, too.
float largest_value(uint64_t n, bool as_f16);

// Looks at the bytes of rows of one type as they come, in pieces of any size.
class value_check {
  public:
    value_check(ggml_type type, uint64_t n, bool flash);

    void take(const uint8_t * data, size_t size);
    bool fits() const { return !above; }

  private:
    void look(const uint8_t * data, size_t n_units);

    ggml_type                type;
    size_t                   unit;       // bytes of a value, or of a block of them
    uint32_t                 limit = 0;  // of the bits, without their sign, of values or of scales of blocks
    bool                     above = false;  // whether one is larger
    std::array<uint8_t, 256> rest{};  // a unit that lies in two pieces
    size_t                   n_rest = 0;
};

}  // namespace pykv
