// In the place of ggml's transport.cpp: sockets whose waits have an end, and a client that never fails.
//
// ggml's client ends the process where a message fails or an answer has another length. Here a message that
// fails makes the connection a lost one (link.h), and what ggml waits for is answered in the server's place; an
// answer that cannot be true is a failure, too. The server's end fails as ggml's own does.
#include "transport.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fcntl.h>

#include "ggml-rpc.h"
#include "protocol.h"
#include "servers.h"

static_assert(RPC_PROTO_MAJOR_VERSION == pykv::RPC_MAJOR && RPC_PROTO_MINOR_VERSION == pykv::RPC_MINOR,
              "protocol.h knows another version");

struct socket_t::impl {
    int                             fd = -1;  // of a server's end
    std::shared_ptr<pykv::rpc_link> link;     // of a client's

    explicit impl(int socket) : fd(socket) {}
    explicit impl(std::shared_ptr<pykv::rpc_link> to) : link(std::move(to)) {}
    ~impl() {
        if (fd >= 0) {
            close(fd);
        }
        if (link) {
            link->hang_up();
        }
    }

    // The client speaks in five pieces: a command, its length, its data; the answer's length, the answer.
    enum { COMMAND, LENGTH, DATA, ANSWER_LENGTH, ANSWER } next = COMMAND;
    pykv::rpc_request request;
    uint8_t           head[9];

    void ask(const void * data, size_t size);
    void answer(void * data, size_t size);
};

void socket_t::impl::ask(const void * data, size_t size) {
    if (next == COMMAND) {
        head[0]         = request.command = pykv::rpc_value<uint8_t>(data);
        next            = LENGTH;
    } else if (next == LENGTH) {
        std::copy_n(static_cast<const uint8_t *>(data), sizeof(uint64_t), head + 1);
        next = DATA;
    } else {
        request.read(data, size);
        if (request.command != pykv::RPC_HELLO && !link->known(request)) {
            link->send(head, sizeof(head), data, size, pykv::rpc_doing(request.command));
        }
        next = request.answer_size() == pykv::RPC_NO_ANSWER ? COMMAND : ANSWER_LENGTH;
    }
}

void socket_t::impl::answer(void * data, size_t size) {
    const char * doing = pykv::rpc_doing(request.command);
    if (next == ANSWER_LENGTH) {
        const uint64_t expected = request.answer_size();
        std::copy_n(reinterpret_cast<const uint8_t *>(&expected), sizeof(expected), static_cast<uint8_t *>(data));
        next = ANSWER;
        return;
    }
    next = COMMAND;
    if (request.command == pykv::RPC_HELLO || link->known(request)) {
        link->tell(request, data, size);
        return;
    }
    if (!link->receive_answer(request, data, size, doing)) {
        pykv::rpc_stand_in(request, data, size);
    }
}

socket_t::socket_t(std::unique_ptr<impl> p) : pimpl(std::move(p)) {}
socket_t::~socket_t() = default;

bool socket_t::send_data(const void * data, size_t size) {
    if (pimpl->link) {
        pimpl->ask(data, size);
        return true;
    }
    for (size_t done = 0; done < size;) {
#ifdef MSG_NOSIGNAL
        const ssize_t n = send(pimpl->fd, static_cast<const char *>(data) + done, std::min(size - done, MAX_CHUNK_SIZE), MSG_NOSIGNAL);
#else
        const ssize_t n = send(pimpl->fd, static_cast<const char *>(data) + done, std::min(size - done, MAX_CHUNK_SIZE), 0);
#endif
        if (n < 0 && errno != EINTR) {
            return false;
        }
        done += n < 0 ? 0 : static_cast<size_t>(n);
    }
    return true;
}

bool socket_t::recv_data(void * data, size_t size) {
    if (pimpl->link) {
        pimpl->answer(data, size);
        return true;
    }
    for (size_t done = 0; done < size;) {
        const ssize_t n = recv(pimpl->fd, static_cast<char *>(data) + done, std::min(size - done, MAX_CHUNK_SIZE), 0);
        if (n == 0 || (n < 0 && errno != EINTR)) {
            return false;
        }
        done += n < 0 ? 0 : static_cast<size_t>(n);
    }
    return true;
}

bool socket_t::flush() { return true; }
void socket_t::get_caps(uint8_t * caps) { std::fill_n(caps, RPC_CONN_CAPS_SIZE, uint8_t(0)); }
void socket_t::update_caps(const uint8_t *) {}

// Opened before ggml asks (servers.cpp): here nothing waits.
socket_ptr socket_t::connect(const char * host, int port) {
    return socket_ptr(new socket_t(std::make_unique<impl>(pykv::rpc_take_link(host, port))));
}

socket_ptr socket_t::create_server(const char * host, int port) {
    sockaddr_in where = {};
    where.sin_family  = AF_INET;
    where.sin_port    = htons(static_cast<uint16_t>(port));
    if (inet_pton(AF_INET, host, &where.sin_addr) != 1) {
        pykv::rpc_note_server_error(EADDRNOTAVAIL);
        return nullptr;
    }
    const int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (fd < 0) {
        pykv::rpc_note_server_error(errno);
        return nullptr;
    }
    socket_ptr server(new socket_t(std::make_unique<impl>(fd)));
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, reinterpret_cast<sockaddr *>(&where), sizeof(where)) != 0 || listen(fd, 16) != 0) {
        pykv::rpc_note_server_error(errno);
        return nullptr;
    }
    return server;
}

socket_ptr socket_t::accept() {
    for (;;) {
        const int fd = ::accept(pimpl->fd, nullptr, nullptr), on = 1;
        if (fd >= 0) {
            fcntl(fd, F_SETFD, FD_CLOEXEC);
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
            setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));  // of a machine that is gone
            return socket_ptr(new socket_t(std::make_unique<impl>(fd)));
        }
        if (errno != EINTR && errno != ECONNABORTED) {
            pykv::rpc_note_server_error(errno);
            return nullptr;
        }
    }
}

bool rpc_transport_init() { return true; }
void rpc_transport_shutdown() {}
