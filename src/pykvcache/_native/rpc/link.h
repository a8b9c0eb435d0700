// A client's connection to an RPC server: a socket with timeouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device_link.h"

namespace pykv {

// Blocking calls that return 0 or an errno; -1 if the peer closed the connection.
int send_all(int fd, const void * data, size_t size);
int receive_all(int fd, void * data, size_t size);

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

}  // namespace pykv
