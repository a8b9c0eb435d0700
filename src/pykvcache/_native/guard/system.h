// Functions of the system that neither the C library nor Python provides everywhere.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdlib>

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

}  // namespace pykv
