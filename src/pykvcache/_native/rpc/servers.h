// RPC servers: one connection per server and process, shared by its models and closed with the last one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "sync.h"

struct llama_model;

namespace pykv {

// Blocking calls that return 0 or an errno; -1 if the peer closed the connection.
int send_all(int fd, const void * data, size_t size);
int receive_all(int fd, void * data, size_t size);

// A client's connection to a server: a socket with timeouts.
struct rpc_link : device_link {
    explicit rpc_link(std::string where) : device_link(std::move(where)) {}
    ~rpc_link() { close(); }

    // Each returns false if the connection is lost.
    bool connect(int64_t timeout_ms);
    bool send(const void * data, size_t size);
    bool receive(void * data, size_t size);
    // Timeout without progress.
    void set_timeout(int64_t ms);
    void close();

  private:
    bool check(int error);  // marks the connection as lost unless 0

    std::atomic<int64_t> timeout_ms{0};
    int                  fd = -1;
    int                  process = 0;  // the process that opened it; a forked child only closes its copy
};

struct rpc_server {
    std::shared_ptr<rpc_link>       link;
    ggml_backend_t                  backend = nullptr;  // keeps ggml's connection open
    std::vector<ggml_backend_dev_t> devices;
    int                             process = 0;

    rpc_server() = default;
    ~rpc_server();
    rpc_server(const rpc_server &) = delete;
    rpc_server & operator=(const rpc_server &) = delete;
};

enum rpc_outcome : int32_t {
    RPC_OPEN,
    RPC_NO_BUILD,  // the build has no RPC
    RPC_LOST,
    RPC_FORKED,    // in a forked child, whose locks may be held by threads that do not exist there
};

// Returns CAUGHT or an rpc_outcome; `why` is the reason of RPC_LOST.
int32_t rpc_open(const char * endpoint, int64_t timeout_ms, std::shared_ptr<rpc_server> & out, std::string & why) noexcept;

// Owns a model and keeps its servers open. Not freed in a forked child, which lacks the connections' threads.
std::shared_ptr<llama_model> own_model_on(llama_model * model, const std::vector<std::shared_ptr<rpc_server>> & servers);

// Let all models loaded from now on use its devices; for tests.
void rpc_register(const rpc_server & server) noexcept;

// Connections of a model's devices.
device_links rpc_links_of(const llama_model * model);

// Serve devices (names separated by commas) until the process ends. CAUGHT, RPC_NO_BUILD, or RPC_LOST if it cannot
// listen.
int32_t rpc_serve(const char * endpoint, int n_threads, const char * devices) noexcept;

// For transport.cpp: the connection that rpc_open() made on this thread, or a lost one.
std::shared_ptr<rpc_link> rpc_take_link();

}  // namespace pykv
