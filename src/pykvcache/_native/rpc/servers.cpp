#include "servers.h"

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
#include <map>
#include <sstream>

#include "devices.h"
#include "ggml-rpc.h"
#include "guarded.h"

namespace pykv {

// Connections -----------------------------------------------------------------------------------------

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

// Servers ---------------------------------------------------------------------------------------------

namespace {

struct server_table {
    std::mutex       opening;  // held while connecting
    std::atomic<int> process{0};

    std::mutex                                       mutex;
    std::map<std::string, std::weak_ptr<rpc_server>> servers;   // by endpoint
    std::map<std::string, std::weak_ptr<rpc_link>>   links;     // by ggml's name of the connection
    std::map<std::string, int>                       n_opened;  // by endpoint
};

// Never destroyed: threads may use it while the process exits.
server_table & table = *new server_table;

thread_local std::shared_ptr<rpc_link> new_link;

// ggml caches facts about a server by name forever, so each connection gets its own name.
std::string name_of_next(const std::string & endpoint) {
    const int    n = ++table.n_opened[endpoint];
    const size_t colon = endpoint.rfind(':');
    return n == 1 ? endpoint : endpoint.substr(0, colon) + "#" + std::to_string(n) + endpoint.substr(colon);
}

std::shared_ptr<rpc_server> find_open(const std::string & endpoint) {
    std::lock_guard<std::mutex> lock(table.mutex);
    auto                        server = table.servers[endpoint].lock();
    return server && !server->link->is_lost ? server : nullptr;
}

}  // namespace

rpc_server::~rpc_server() {
    if (backend && process == getpid()) {
        guarded_void([&] { ggml_backend_free(backend); });
    }
}

int32_t rpc_open(const char * where, int64_t timeout_ms, std::shared_ptr<rpc_server> & out, std::string & why) noexcept {
    return guarded<int32_t>(CAUGHT, [&]() -> int32_t {
        const std::string endpoint = where;
        int               owner = 0;
        if (!table.process.compare_exchange_strong(owner, getpid()) && owner != getpid()) {
            return RPC_FORKED;
        }
        std::lock_guard<std::mutex> opening(table.opening);
        if ((out = find_open(endpoint))) {
            out->link->set_timeout(timeout_ms);
            return RPC_OPEN;
        }
        const auto link = std::make_shared<rpc_link>(endpoint);
        if (!link->connect(timeout_ms)) {
            why = link->why();
            return RPC_LOST;
        }
        const std::string name = name_of_next(endpoint);
        auto              server = std::make_shared<rpc_server>();
        server->link = new_link = link;
        server->process = getpid();
        server->backend = ggml_backend_rpc_init(name.c_str(), 0);
        ggml_backend_reg_t found = ggml_backend_rpc_add_server(name.c_str());
        for (size_t i = 0; i < ggml_backend_reg_dev_count(found); ++i) {
            server->devices.push_back(ggml_backend_reg_dev_get(found, i));
        }
        if (link->is_lost) {
            why = link->why();
            return RPC_LOST;
        }
        std::lock_guard<std::mutex> lock(table.mutex);
        table.links[name] = link;
        table.servers[endpoint] = out = server;
        return RPC_OPEN;
    });
}

void rpc_register(const rpc_server & server) noexcept {
    guarded_void([&] {
        for (ggml_backend_dev_t device : server.devices) {
            ggml_backend_device_register(device);
        }
    });
}

device_links rpc_links_of(const llama_model * model) {
    device_links                found;
    std::lock_guard<std::mutex> lock(table.mutex);
    for (ggml_backend_dev_t device : model_devices(model)) {
        const auto at = table.links.find(ggml_backend_dev_description(device));
        const auto link = at == table.links.end() ? nullptr : at->second.lock();
        if (link && std::find(found.begin(), found.end(), link) == found.end()) {
            found.push_back(link);
        }
    }
    return found;
}

std::shared_ptr<llama_model> own_model_on(llama_model * model, const std::vector<std::shared_ptr<rpc_server>> & servers) {
    const bool is_here = rpc_links_of(model).empty();
    return std::shared_ptr<llama_model>(model, [servers, is_here, process = getpid()](llama_model * last) {
        if (is_here || process == getpid()) {
            model_free(last);
        }
    });
}

int32_t rpc_serve(const char * endpoint, int n_threads, const char * devices) noexcept {
    return guarded<int32_t>(CAUGHT, [&]() -> int32_t {
        std::vector<ggml_backend_dev_t> found;
        std::istringstream              names(devices);
        for (std::string name; std::getline(names, name, ',');) {
            found.push_back(ggml_backend_dev_by_name(name.c_str()));
            if (!found.back()) {
                throw std::runtime_error("there is no device " + name);
            }
        }
        ggml_backend_rpc_start_server(endpoint, nullptr, static_cast<size_t>(n_threads), found.size(), found.data());
        return RPC_LOST;
    });
}

std::shared_ptr<rpc_link> rpc_take_link() {
    if (auto link = std::exchange(new_link, nullptr)) {
        return link;
    }
    // ggml reconnects to a server whose connection was closed.
    auto lost = std::make_shared<rpc_link>("");
    lost->lose("the connection was closed");
    return lost;
}

}  // namespace pykv
