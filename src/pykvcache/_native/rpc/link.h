// The client's connection to a server of ggml's RPC: a socket whose waits end after a timeout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device_link.h"

namespace pykv {

// Blocking calls that return 0 or an error of errno; -1 where the other end closed the connection.
int send_all(int fd, const void * data, size_t size);
int receive_all(int fd, void * data, size_t size);

struct rpc_link : device_link {
    explicit rpc_link(std::string where) : device_link(std::move(where)) {}
    ~rpc_link() { close(); }

    // Each returns false where the connection is lost.
    bool connect(int64_t timeout_ms);
    bool send(const void * data, size_t size);
    bool receive(void * data, size_t size);
    // How long a message may make no progress.
    void set_timeout(int64_t ms);
    void close();

  private:
    bool check(int error);  // loses the connection unless it is 0

    std::atomic<int64_t> timeout_ms{0};
    int                  fd = -1;
    int                  process = 0;  // that opened it: a fork's copy of the socket is only closed
};

}  // namespace pykv
