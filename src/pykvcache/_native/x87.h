// A processor's unused unit, put back to rest before it computes.
//
// NumPy's import leaves values in the x87 unit's registers, in its thread and in those that start
// from it. AMD's cores have eight registers less to rename then, and AVX-512 kernels take 2 % longer:
// llama.cpp was slower in a Python process than in a C program by just that (benchmarks/x87.py).
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#define PYKV_HAS_X87 1
#include <cpuid.h>
#endif

namespace pykv {

#ifdef PYKV_HAS_X87

// Whether XGETBV tells which units are in use.
inline bool tells_use() noexcept {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !__get_cpuid_count(0xd, 1, &a, &b, &c, &d)) {
        return false;
    }
    return a & 4;
}

// Between two calls the unit's stack is empty, so that nothing is lost but flags that nobody reads.
inline void rest_x87() noexcept {
    constexpr uint16_t DEFAULT_CONTROL = 0x37f;
    constexpr uint32_t X87 = 1;
    static const bool  can = tells_use();
    if (!can) {
        return;
    }
    uint32_t in_use, upper;
    __asm__ volatile("xgetbv" : "=a"(in_use), "=d"(upper) : "c"(1));
    if (!(in_use & X87)) {
        return;
    }
    // How it rounds is the thread's own choice, and stays.
    uint16_t control;
    __asm__ volatile("fnstcw %0" : "=m"(control));
    if (control != DEFAULT_CONTROL) {
        return;
    }
    // An area of which no part is said to be valid: each that is asked for becomes as at power-on.
    alignas(64) static const uint8_t nothing[512 + 64] = {};
    __asm__ volatile("xrstor %0" : : "m"(nothing), "a"(X87), "d"(0) : "memory");
}

#else

inline void rest_x87() noexcept {}

#endif

}  // namespace pykv
