#include "link.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace pykv {

namespace {

constexpr size_t MAX_PIECE = size_t(1) << 30;  // below every system's limit per call

#ifdef MSG_NOSIGNAL
constexpr int SEND_FLAGS = MSG_NOSIGNAL;
#else
constexpr int SEND_FLAGS = 0;  // Python ignores SIGPIPE
#endif

// A connected socket in `fd`, or an error of errno.
int connect_to(const addrinfo & to, int64_t timeout_ms, int & fd) {
    fd = socket(to.ai_family, SOCK_STREAM, 0);
    if (fd < 0) {
        return errno;
    }
    const int on = 1, flags = fcntl(fd, F_GETFL);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    int error = ::connect(fd, to.ai_addr, to.ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
        pollfd    one = {fd, POLLOUT, 0};
        socklen_t size = sizeof(error);
        error = poll(&one, 1, int(std::min<int64_t>(timeout_ms, INT32_MAX))) > 0 ? 0 : ETIMEDOUT;
        if (error == 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
            error = errno;
        }
    }
    fcntl(fd, F_SETFL, flags);
    if (error != 0) {
        ::close(fd);
        fd = -1;
    }
    return error;
}

}  // namespace

int send_all(int fd, const void * data, size_t size) {
    for (size_t done = 0; done < size;) {
        const ssize_t n = ::send(fd, static_cast<const char *>(data) + done, std::min(size - done, MAX_PIECE), SEND_FLAGS);
        if (n < 0 && errno != EINTR) {
            return errno;
        }
        done += size_t(std::max<ssize_t>(n, 0));
    }
    return 0;
}

int receive_all(int fd, void * data, size_t size) {
    for (size_t done = 0; done < size;) {
        const ssize_t n = recv(fd, static_cast<char *>(data) + done, std::min(size - done, MAX_PIECE), 0);
        if (n == 0) {
            return -1;
        }
        if (n < 0 && errno != EINTR) {
            return errno;
        }
        done += size_t(std::max<ssize_t>(n, 0));
    }
    return 0;
}

bool rpc_link::check(int error) {
    if (error == 0) {
        return true;
    }
    if (error < 0) {
        lose("the server closed the connection");
    } else if (error == EAGAIN || error == EWOULDBLOCK || error == ETIMEDOUT) {
        const int64_t ms = timeout_ms;
        lose("no answer for " + std::to_string(ms / 1000) + "." + std::to_string(ms % 1000 / 100) + " s");
    } else {
        lose(std::strerror(error));
    }
    return false;
}

bool rpc_link::connect(int64_t ms) {
    timeout_ms = ms;
    process = getpid();
    const size_t colon = endpoint.rfind(':');
    addrinfo     hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int code = getaddrinfo(endpoint.substr(0, colon).c_str(), endpoint.substr(colon + 1).c_str(), &hints, &found)) {
        lose(std::string("cannot resolve the host's name: ") + gai_strerror(code));
        return false;
    }
    int error = EHOSTUNREACH;
    for (const addrinfo * to = found; to && error != 0; to = to->ai_next) {
        error = connect_to(*to, ms, fd);
    }
    freeaddrinfo(found);
    set_timeout(ms);
    return check(error);
}

void rpc_link::set_timeout(int64_t ms) {
    timeout_ms = ms;
    timeval limit;
    limit.tv_sec = decltype(limit.tv_sec)(ms / 1000);
    limit.tv_usec = decltype(limit.tv_usec)(ms % 1000 * 1000);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

bool rpc_link::send(const void * data, size_t size) { return !is_lost && check(send_all(fd, data, size)); }
bool rpc_link::receive(void * data, size_t size) { return !is_lost && check(receive_all(fd, data, size)); }

void rpc_link::close() {
    if (fd >= 0) {
        if (process == getpid()) {
            shutdown(fd, SHUT_RDWR);  // a forked child's copy would keep the connection open
        }
        ::close(fd);
        fd = -1;
    }
    lose("the connection was closed");
}

}  // namespace pykv
