#include "servers.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "ggml-rpc.h"
#include "guarded.h"
#include "devices.h"

namespace pykv {

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
