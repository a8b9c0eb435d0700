// Return the allocator's free memory to the system.
#pragma once

#include <cstdlib>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace pykv {

// glibc only; other allocators do so themselves or cannot.
inline void trim_memory() noexcept {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

}  // namespace pykv
