// Servers of ggml's RPC that models lie on: opened, shared by the models of a process, and closed with the last.
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

using rpc_servers = std::vector<std::shared_ptr<rpc_server>>;

enum rpc_outcome : int32_t {
    RPC_OPEN,
    RPC_NO_BUILD,  // without ggml's RPC, or with one whose protocol is not known here
    RPC_LOST,
    RPC_FORKED,    // the parent's connections have no thread here, and its locks may be held
};

// CAUGHT or an rpc_outcome; `why` says what is lost.
int32_t rpc_open(const char * endpoint, int64_t timeout_ms, std::shared_ptr<rpc_server> & out, std::string & why) noexcept;

// In a fork's child, where servers' devices have no connection, and asking one would wait for ever.
bool rpc_is_forked() noexcept;

// Let every model that is loaded from now on use its devices: for tests.
void rpc_register(const rpc_server & server) noexcept;

// Those under a model's devices.
rpc_links rpc_links_of(const llama_model * model);

// A model with its servers: freed with its last owner, not in a fork's child, where freeing would wait for ever.
std::shared_ptr<llama_model> own_model_on(llama_model * model, const rpc_servers & servers);

// Serve devices, their names with a comma between, until the process ends. CAUGHT, RPC_NO_BUILD, or, when it could not begin, RPC_LOST with errno.
int32_t rpc_serve(const char * endpoint, int n_threads, const char * devices, int & error) noexcept;

// For transport.cpp: the link that was opened under this name, or one that is lost.
std::shared_ptr<rpc_link> rpc_take_link(const std::string & host, int port);
void                      rpc_note_server_error(int code) noexcept;

}  // namespace pykv
