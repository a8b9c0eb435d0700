// Servers of ggml's RPC: a process has one connection to each, shared by its models and closed with the last.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "link.h"

struct llama_model;

namespace pykv {

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
    RPC_NO_BUILD,  // without ggml's RPC, or with another version of it
    RPC_LOST,
    RPC_FORKED,    // a fork's child has no thread for its parent's connections, and its locks may be held
};

// CAUGHT or an rpc_outcome; `why` says what is lost.
int32_t rpc_open(const char * endpoint, int64_t timeout_ms, std::shared_ptr<rpc_server> & out, std::string & why) noexcept;

// A model that keeps its servers open. A fork's child, which lacks the threads of its connections, does not free it.
std::shared_ptr<llama_model> own_model_on(llama_model * model, const std::vector<std::shared_ptr<rpc_server>> & servers);

// Let every model that is loaded from now on use its devices: for tests.
void rpc_register(const rpc_server & server) noexcept;

// The connections under a model's devices.
device_links rpc_links_of(const llama_model * model);

// Serve devices, their names with commas between, until the process ends: CAUGHT, RPC_NO_BUILD, or RPC_LOST where it cannot begin.
int32_t rpc_serve(const char * endpoint, int n_threads, const char * devices) noexcept;

// For transport.cpp: the connection that rpc_open() has made on this thread, or a lost one.
std::shared_ptr<rpc_link> rpc_take_link();

}  // namespace pykv
