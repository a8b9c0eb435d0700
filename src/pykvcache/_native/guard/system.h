// Functions of the system and the processor that neither the C library nor Python provides everywhere.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdlib>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif
#ifdef __GLIBC__
#include <malloc.h>
#endif
#ifdef __linux__
#include <fcntl.h>
#endif

namespace pykv {

// Return the allocator's free memory to the system. glibc only; other allocators do so themselves or cannot.
inline void trim_memory() noexcept {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

// Reserve the blocks of a new file; returns 0 or an errno if the disk is full. Does nothing if the file system cannot
// reserve; posix_fallocate() would write to every block instead.
inline int claim_blocks(int fd, int64_t size) noexcept {
#ifdef __linux__
    // No retry after EINTR: where a signal undoes the work (tmpfs on older kernels), a timer would cause an endless loop.
    const int code = fallocate(fd, 0, 0, off_t(size));
    if (code != 0 && (errno == ENOSPC || errno == EFBIG || errno == EDQUOT || errno == EIO)) {
        return errno;
    }
#else
    (void) fd;
    (void) size;
#endif
    return 0;
}

// Resets the x87 unit, which NumPy's import leaves in use: AVX-512 kernels then take 2 % longer on AMD
// (docs/decisions.md).
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
