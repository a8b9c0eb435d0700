// What the allocator keeps after many small pieces were freed.
#pragma once

#include <cstdlib>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace pykv {

// Give it back to the system; other allocators do so by themselves, or cannot.
inline void trim_memory() noexcept {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

}  // namespace pykv
