// What the system can do for a file that the C library and Python have no plain call for.
#pragma once

#include <cerrno>
#include <cstdint>

#ifdef __linux__
#include <fcntl.h>
#endif

namespace pykv {

// Claim the blocks of a new file; 0, or the error where there is no room. A file system that cannot
// do it does nothing, rather than posix_fallocate(), which would write into every block.
inline int claim_blocks(int fd, int64_t size) noexcept {
#ifdef __linux__
    // Not again after EINTR: where signals undo it (tmpfs of older kernels), a timer's would for ever.
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
