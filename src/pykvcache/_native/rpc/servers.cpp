// Opening servers of ggml's RPC, in builds that have it.
#include "servers.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <sstream>

#include "ggml-rpc.h"
#include "guarded.h"
#include "probe_buffers.h"
#include "protocol.h"

namespace pykv {

namespace {

struct server_table {
    std::mutex                                       mutex;
    std::map<std::string, std::weak_ptr<rpc_server>> servers;  // by endpoint
    std::map<std::string, uint64_t>                  counts;
    std::atomic<int>                                 process{0};
    // By the name that ggml has. It keeps what it once learned under a name, so each connection has its own.
    // ggml asks for links under a lock of its own, which is taken under `mutex` and before `of_links`.
    std::mutex                                     of_links;
    std::map<std::string, std::weak_ptr<rpc_link>> links;
};

// Never destroyed: a thread may still look while the process ends.
server_table & table = *new server_table;
int            server_error = 0;

bool ask(rpc_link & link, uint8_t command, const void * data, size_t size, void * out, size_t out_size) {
    rpc_request request;
    request.command = command;
    request.read(data, size);
    uint8_t        head[9] = {command};
    const uint64_t length  = size;
    std::memcpy(head + 1, &length, sizeof(length));
    const char * doing = rpc_doing(command);
    return link.send(head, sizeof(head), data, size, doing) && link.receive_answer(request, out, out_size, doing);
}

// Before ggml asks, which does it under locks of all servers.
bool greet(rpc_link & link) {
    uint8_t  nothing[24] = {}, hello[28];
    uint32_t n           = 0;
    if (!link.connect() || !ask(link, RPC_HELLO, nothing, sizeof(nothing), hello, sizeof(hello)) ||
        !ask(link, RPC_DEVICE_COUNT, nullptr, 0, &n, sizeof(n))) {
        return false;
    }
    std::vector<uint64_t> alignments(n), max_sizes(n);
    for (uint32_t i = 0; i < n; ++i) {
        if (!ask(link, RPC_GET_ALIGNMENT, &i, sizeof(i), &alignments[i], sizeof(uint64_t)) ||
            !ask(link, RPC_GET_MAX_SIZE, &i, sizeof(i), &max_sizes[i], sizeof(uint64_t))) {
            return false;
        }
    }
    link.max_sizes  = std::move(max_sizes);
    link.alignments = std::move(alignments);
    return true;
}

std::string name_for(const std::string & endpoint, uint64_t n) {
    const size_t colon = endpoint.rfind(':');
    return n == 1 ? endpoint : endpoint.substr(0, colon) + "#" + std::to_string(n) + endpoint.substr(colon);
}

}  // namespace

rpc_server::~rpc_server() {
    if (backend && process == getpid()) {
        guarded_void([&] { ggml_backend_free(backend); });
    }
}

bool rpc_is_forked() noexcept { return table.process && table.process != getpid(); }

int32_t rpc_open(const char * where, int64_t timeout_ms, std::shared_ptr<rpc_server> & out, std::string & why) noexcept {
    return guarded<int32_t>(CAUGHT, [&]() -> int32_t {
        const std::string endpoint = where;
        if (rpc_is_forked()) {
            return RPC_FORKED;  // before the lock, which nobody may be left to give back
        }
        const auto is_open = [&] {
            out = table.servers[endpoint].lock();
            if (out && !out->link->is_lost) {
                out->link->timeout_ms = timeout_ms;
                return true;
            }
            return false;
        };
        {
            std::lock_guard<std::mutex> lock(table.mutex);
            table.process = getpid();
            if (is_open()) {
                return RPC_OPEN;
            }
        }
        auto link = std::make_shared<rpc_link>(endpoint, timeout_ms);
        if (!greet(*link)) {
            why = link->why();
            return RPC_LOST;
        }
        std::lock_guard<std::mutex> lock(table.mutex);
        if (is_open()) {
            return RPC_OPEN;  // another thread was faster
        }
        const std::string name = name_for(endpoint, ++table.counts[endpoint]);
        {
            std::lock_guard<std::mutex> of_links(table.of_links);
            table.links[name] = link;
        }
        auto server            = std::make_shared<rpc_server>();
        server->process        = getpid();
        server->link           = link;
        server->backend        = ggml_backend_rpc_init(name.c_str(), 0);
        ggml_backend_reg_t reg = ggml_backend_rpc_add_server(name.c_str());
        for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); ++i) {
            server->devices.push_back(ggml_backend_reg_dev_get(reg, i));
        }
        table.servers[endpoint] = server;
        out                     = server;
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

rpc_links rpc_links_of(const llama_model * model) {
    rpc_links                   found;
    std::lock_guard<std::mutex> lock(table.of_links);
    for (ggml_backend_dev_t device : model_devices(model)) {
        if (ggml_backend_dev_backend_reg(device) != ggml_backend_rpc_reg()) {
            continue;
        }
        const auto link = table.links[ggml_backend_dev_description(device)].lock();
        if (link && std::find(found.begin(), found.end(), link) == found.end()) {
            found.push_back(link);
        }
    }
    return found;
}

std::shared_ptr<llama_model> own_model_on(llama_model * model, const rpc_servers & servers) {
    const bool is_remote = !rpc_links_of(model).empty();
    return std::shared_ptr<llama_model>(model, [servers, is_remote, process = getpid()](llama_model * last) {
        if (!is_remote || process == getpid()) {
            model_free(last);
        }
    });
}

int32_t rpc_serve(const char * endpoint, int n_threads, const char * devices, int & error) noexcept {
    return guarded<int32_t>(CAUGHT, [&]() -> int32_t {
        std::vector<ggml_backend_dev_t> found;
        std::istringstream names(devices);
        for (std::string name; std::getline(names, name, ',');) {
            found.push_back(ggml_backend_dev_by_name(name.c_str()));
            if (!found.back()) {
                throw std::runtime_error("there is no device " + name);
            }
        }
        server_error = 0;
        ggml_backend_rpc_start_server(endpoint, nullptr, static_cast<size_t>(n_threads), found.size(), found.data());
        error = server_error;
        return RPC_LOST;
    });
}

std::shared_ptr<rpc_link> rpc_take_link(const std::string & host, int port) {
    const std::string           name = host + ":" + std::to_string(port);
    std::unique_lock<std::mutex> lock(table.of_links);
    auto                         found = table.links.find(name);
    auto                         link  = found == table.links.end() ? nullptr : found->second.lock();
    if (!link || link->is_taken.exchange(true)) {
        link = std::make_shared<rpc_link>(name, 0);
        link->lose("the connection was closed");
    }
    return link;
}

void rpc_note_server_error(int code) noexcept { server_error = code; }

}  // namespace pykv
