// Replaces ggml's transport.cpp, whose client ends the process if a message fails. Here the connection is marked as lost
// (sync.h) and ggml gets a fabricated reply. The server side behaves as ggml's.
#include "transport.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "ggml-rpc.h"
#include "protocol.h"
#include "servers.h"

static_assert(RPC_PROTO_MAJOR_VERSION == pykv::RPC_MAJOR && RPC_PROTO_MINOR_VERSION == pykv::RPC_MINOR,
              "protocol.h knows another version");

struct socket_t::impl {
    int                             fd = -1;  // server side
    std::shared_ptr<pykv::rpc_link> link;     // client side

    explicit impl(int socket) : fd(socket) {}
    explicit impl(std::shared_ptr<pykv::rpc_link> to) : link(std::move(to)) {}
    ~impl() {
        if (fd >= 0) {
            close(fd);
        }
        if (link) {
            link->close();
        }
    }

    // A client's message has five pieces: command, length, data; reply length, reply.
    enum { COMMAND, LENGTH, DATA, ANSWER_LENGTH, ANSWER } next = COMMAND;
    uint8_t  head[9];  // command and length
    uint64_t answer_size = 0;

    void request(const void * data, size_t size);
    void answer(void * data, size_t size);
};

void socket_t::impl::request(const void * data, size_t size) {
    const auto * bytes = static_cast<const uint8_t *>(data);
    if (next == COMMAND) {
        head[0] = *bytes;
        next = LENGTH;
    } else if (next == LENGTH) {
        std::copy_n(bytes, sizeof(uint64_t), head + 1);
        next = DATA;
    } else {
        uint64_t last = 0;
        if (size >= sizeof(last)) {
            std::memcpy(&last, bytes + size - sizeof(last), sizeof(last));
        }
        answer_size = pykv::rpc_answer_size(head[0], last);
        next = answer_size ? ANSWER_LENGTH : COMMAND;
        // Send a small message as one packet.
        const size_t joined = size <= 65536 ? size : 0;
        std::string  message(head, head + sizeof(head));
        message.append(static_cast<const char *>(data), joined);
        if (link->send(message.data(), message.size()) && joined < size) {
            link->send(data, size);
        }
    }
}

void socket_t::impl::answer(void * data, size_t size) {
    if (next == ANSWER_LENGTH) {
        uint64_t length = 0;
        if (link->receive(&length, sizeof(length)) && length != answer_size) {
            link->lose("an answer of " + std::to_string(length) + " bytes instead of " + std::to_string(answer_size) +
                       ": this is no server of ggml's RPC, or of another version");
        }
        std::memcpy(data, &answer_size, sizeof(answer_size));
        next = ANSWER;
        return;
    }
    next = COMMAND;
    const auto * bytes = static_cast<const uint8_t *>(data);
    if (link->receive(data, size) && head[0] == pykv::RPC_HELLO && (bytes[0] != pykv::RPC_MAJOR || bytes[1] > pykv::RPC_MINOR)) {
        link->lose("the server speaks version " + std::to_string(bytes[0]) + "." + std::to_string(bytes[1]) + " of ggml's RPC, not " +
                   std::to_string(pykv::RPC_MAJOR) + "." + std::to_string(pykv::RPC_MINOR));
    }
    if (link->is_lost) {
        pykv::rpc_stand_in(head[0], data, size);
    }
}

socket_t::socket_t(std::unique_ptr<impl> p) : pimpl(std::move(p)) {}
socket_t::~socket_t() = default;

bool socket_t::send_data(const void * data, size_t size) {
    if (pimpl->link) {
        pimpl->request(data, size);
        return true;
    }
    return pykv::send_all(pimpl->fd, data, size) == 0;
}

bool socket_t::recv_data(void * data, size_t size) {
    if (pimpl->link) {
        pimpl->answer(data, size);
        return true;
    }
    return pykv::receive_all(pimpl->fd, data, size) == 0;
}

bool socket_t::flush() { return true; }
void socket_t::get_caps(uint8_t * caps) { std::fill_n(caps, RPC_CONN_CAPS_SIZE, uint8_t(0)); }
void socket_t::update_caps(const uint8_t *) {}

// rpc_open() has already connected.
socket_ptr socket_t::connect(const char *, int) {
    return socket_ptr(new socket_t(std::make_unique<impl>(pykv::rpc_take_link())));
}

socket_ptr socket_t::create_server(const char * host, int port) {
    sockaddr_in where = {};
    where.sin_family = AF_INET;
    where.sin_port = htons(static_cast<uint16_t>(port));
    const int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (fd < 0) {
        return nullptr;
    }
    socket_ptr server(new socket_t(std::make_unique<impl>(fd)));
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    const bool is_open = inet_pton(AF_INET, host, &where.sin_addr) == 1 &&
                         bind(fd, reinterpret_cast<sockaddr *>(&where), sizeof(where)) == 0 && listen(fd, 16) == 0;
    return is_open ? server : nullptr;
}

socket_ptr socket_t::accept() {
    int fd, on = 1;
    do {
        fd = ::accept(pimpl->fd, nullptr, nullptr);
    } while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
    if (fd < 0) {
        return nullptr;
    }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));  // detects clients that disappeared
    return socket_ptr(new socket_t(std::make_unique<impl>(fd)));
}

bool rpc_transport_init() { return true; }
void rpc_transport_shutdown() {}
