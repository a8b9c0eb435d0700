// Resets the x87 unit, which NumPy's import leaves in use: AVX-512 kernels then take 2 % longer on AMD
// (docs/decisions.md).
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
    // Whether XGETBV reports the units in use.
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
    // Keeps a thread's rounding mode. The unit's stack is empty between calls.
    if ((in_use & X87) && control == DEFAULT_CONTROL) {
        // Nothing in this save area is marked valid, so XRSTOR resets each requested part.
        alignas(64) static const uint8_t nothing[512 + 64] = {};
        __asm__ volatile("xrstor %0" : : "m"(nothing), "a"(X87), "d"(0) : "memory");
    }
#endif
}

}  // namespace pykv
