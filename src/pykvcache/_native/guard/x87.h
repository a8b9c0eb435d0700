// Clears the x87 unit, which computes nothing here.
//
// NumPy's import leaves values in its registers, in the importing thread and in those that start from it. AMD's cores
// then have eight registers fewer to rename, and AVX-512 kernels take 2 % longer (benchmarks/x87.py).
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace pykv {

inline void rest_x87() noexcept {
#if defined(__x86_64__) && defined(__GNUC__)
    constexpr uint32_t X87 = 1;
    constexpr uint16_t DEFAULT_CONTROL = 0x37f;
    // Whether XGETBV tells which units are in use.
    static const bool can_ask = [] {
        unsigned a, b, c, d;
        return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE) && __get_cpuid_count(0xd, 1, &a, &b, &c, &d) && (a & 4);
    }();
    if (!can_ask) {
        return;
    }
    uint32_t in_use, upper;
    uint16_t control;
    __asm__ volatile("xgetbv" : "=a"(in_use), "=d"(upper) : "c"(1));
    __asm__ volatile("fnstcw %0" : "=m"(control));
    // A thread that has set another rounding keeps it. The unit's stack is empty between two calls.
    if ((in_use & X87) && control == DEFAULT_CONTROL) {
        // No part of this save area is marked as valid: XRSTOR resets each part that it is asked for.
        alignas(64) static const uint8_t nothing[512 + 64] = {};
        __asm__ volatile("xrstor %0" : : "m"(nothing), "a"(X87), "d"(0) : "memory");
    }
#endif
}

}  // namespace pykv
