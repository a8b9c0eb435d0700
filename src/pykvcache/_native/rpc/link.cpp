// The socket of a connection: every wait has an end.
#include "protocol.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace pykv {

namespace {

using clock = std::chrono::steady_clock;

// A message that comes drop by drop ends, too.
constexpr int64_t BYTES_PER_MS = 64;

#ifdef MSG_NOSIGNAL
constexpr int NO_SIGNAL = MSG_NOSIGNAL;
#else
constexpr int NO_SIGNAL = 0;
#endif

// 0: ready. Otherwise what errno would be.
int wait_for(int fd, short events, clock::time_point end) {
    for (;;) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - clock::now()).count();
        if (left <= 0) {
            return ETIMEDOUT;
        }
        pollfd one = {fd, events, 0};
        const int n = poll(&one, 1, static_cast<int>(std::min<int64_t>(left + 1, 60000)));
        if (n > 0) {
            return 0;
        }
        if (n < 0 && errno != EINTR) {
            return errno;
        }
    }
}

clock::time_point end_of(const rpc_link & link, size_t size) {
    return clock::now() + std::chrono::milliseconds(link.timeout_ms + static_cast<int64_t>(size) / BYTES_PER_MS);
}

std::string said(const rpc_link & link, int code) {
    if (code != ETIMEDOUT) {
        return std::strerror(code);
    }
    const int64_t ms = link.timeout_ms;
    return "nothing for " + std::to_string(ms / 1000) + "." + std::to_string(ms % 1000 / 100) + " s";
}

int open_socket(const addrinfo & to, clock::time_point end, int & fd) {
    fd = socket(to.ai_family, SOCK_STREAM, 0);
    if (fd < 0) {
        return errno;
    }
    const int on = 1;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
#ifdef SO_NOSIGPIPE
    setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof(on));
#endif
    int code = ::connect(fd, to.ai_addr, to.ai_addrlen) == 0 ? 0 : errno;
    if (code == EINPROGRESS || code == EINTR) {
        code = wait_for(fd, POLLOUT, end);
        if (code == 0) {
            socklen_t size = sizeof(code);
            if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &size) != 0) {
                code = errno;
            }
        }
    }
    if (code != 0) {
        close(fd);
        fd = -1;
    }
    return code;
}

}  // namespace

void rpc_link::lose(const std::string & why) noexcept {
    std::lock_guard<std::mutex> lock(mutex);
    if (is_lost) {
        return;
    }
    try {
        reason = why;
    } catch (...) {
    }
    is_lost.store(true, std::memory_order_release);
    if (fd >= 0 && process == getpid()) {
        shutdown(fd, SHUT_RDWR);  // closed by its owner, who may be in a call
    }
}

void rpc_link::give_up(const char * doing, int code) noexcept {
    try {
        lose(std::string(doing) + ": " + (code == 0 ? "the server closed the connection" : said(*this, code)));
    } catch (...) {
        lose({});  // ggml's thread would end the process
    }
}

std::string rpc_link::why() const {
    std::lock_guard<std::mutex> lock(mutex);
    return is_lost && reason.empty() ? "there is no memory to say why" : reason;
}

bool rpc_link::connect() noexcept {
    try {
        const size_t colon = endpoint.rfind(':');
        addrinfo     hints = {}, *found = nullptr;
        hints.ai_socktype = SOCK_STREAM;
        const int answer = getaddrinfo(endpoint.substr(0, colon).c_str(), endpoint.substr(colon + 1).c_str(), &hints, &found);
        if (answer != 0) {
            lose(std::string("the host's name leads nowhere: ") + gai_strerror(answer));
            return false;
        }
        const auto end  = end_of(*this, 0);
        int        code = EHOSTUNREACH;
        for (const addrinfo * to = found; to && code != 0; to = to->ai_next) {
            code = open_socket(*to, end, fd);
        }
        freeaddrinfo(found);
        process = getpid();
        if (code != 0) {
            lose("connecting: " + said(*this, code));
        }
        return code == 0;
    } catch (...) {
        lose({});
        return false;
    }
}

bool rpc_link::send(const void * head, size_t head_size, const void * data, size_t size, const char * doing) noexcept {
    const auto end  = end_of(*this, head_size + size);
    size_t     done = 0;
    int        code = 0;
    while (!is_lost && code == 0 && done < head_size + size) {
        iovec pieces[2];
        int   n = 0;
        if (done < head_size) {
            pieces[n++] = {const_cast<char *>(static_cast<const char *>(head)) + done, head_size - done};
        }
        const size_t of_data = done < head_size ? 0 : done - head_size;
        if (of_data < size) {
            // No system takes more at once.
            pieces[n++] = {const_cast<char *>(static_cast<const char *>(data)) + of_data,
                           std::min<size_t>(size - of_data, size_t(1) << 30)};
        }
        msghdr message     = {};
        message.msg_iov    = pieces;
        message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(n);
        const ssize_t sent = sendmsg(fd, &message, NO_SIGNAL);
        if (sent >= 0) {
            done += static_cast<size_t>(sent);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            code = wait_for(fd, POLLOUT, end);
        } else if (errno != EINTR) {
            code = errno;
        }
    }
    if (code != 0) {
        give_up(doing, code);
    }
    return !is_lost;
}

bool rpc_link::receive(void * data, size_t size, const char * doing) noexcept {
    const auto end  = end_of(*this, size);
    size_t     done = 0;
    int        code = 0;
    while (!is_lost && code == 0 && done < size) {
        const ssize_t got = recv(fd, static_cast<char *>(data) + done, std::min<size_t>(size - done, size_t(1) << 30), 0);
        if (got > 0) {
            done += static_cast<size_t>(got);
            if (done < size && clock::now() > end) {
                code = ETIMEDOUT;
            }
        } else if (got == 0) {
            give_up(doing, 0);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            code = wait_for(fd, POLLIN, end);
        } else if (errno != EINTR) {
            code = errno;
        }
    }
    if (code != 0) {
        give_up(doing, code);
    }
    return !is_lost;
}

bool rpc_link::receive_answer(const rpc_request & request, void * data, size_t size, const char * doing) noexcept {
    uint64_t length = 0;
    if (is_lost || !receive(&length, sizeof(length), doing)) {
        return false;
    }
    try {
        if (length != size) {
            lose(std::string(doing) + ": an answer of " + std::to_string(length) + " bytes instead of " + std::to_string(size));
            return false;
        }
        if (!receive(data, size, doing)) {
            return false;
        }
        if (const char * lie = rpc_lie(request, data)) {
            lose(std::string(doing) + ": the server says " + lie);
        }
    } catch (...) {
        lose({});
    }
    return !is_lost;
}

bool rpc_link::known(const rpc_request & request) const {
    switch (request.command) {
        case RPC_DEVICE_COUNT:  return !alignments.empty();
        case RPC_GET_ALIGNMENT:
        case RPC_GET_MAX_SIZE:  return request.device < alignments.size();
        default:                return false;
    }
}

void rpc_link::tell(const rpc_request & request, void * data, size_t size) const {
    rpc_stand_in(request, data, size);
    uint64_t value = 0;
    switch (request.command) {
        case RPC_DEVICE_COUNT:  value = alignments.size(); break;
        case RPC_GET_ALIGNMENT: value = alignments[request.device]; break;
        case RPC_GET_MAX_SIZE:  value = max_sizes[request.device]; break;
        default:                return;
    }
    std::memcpy(data, &value, std::min(size, sizeof(value)));
}

void rpc_link::hang_up() noexcept {
    std::lock_guard<std::mutex> lock(mutex);
    if (fd >= 0) {
        if (process == getpid()) {
            shutdown(fd, SHUT_RDWR);  // a fork's copy would hold the server's other end open
        }
        close(fd);
        fd = -1;
    }
    if (!is_lost) {
        is_lost = true;
        try {
            reason = "the connection was closed";
        } catch (...) {
        }
    }
}

}  // namespace pykv
