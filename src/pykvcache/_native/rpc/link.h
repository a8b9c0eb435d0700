// One connection to a server of ggml's RPC, and whether it was lost.
//
// ggml's client ends the process when a server does not answer. Here a connection that fails is lost for good
// instead: transport.cpp answers in the server's place, guarded.h turns the call into an error, and what the
// context holds is never used again.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace pykv {

struct rpc_request;

// Whether there ever was a connection: where there was none, no call has anything to watch.
inline std::atomic<bool> any_rpc_link{false};

struct rpc_link {
    rpc_link(std::string where, int64_t ms) : endpoint(std::move(where)), timeout_ms(ms) { any_rpc_link = true; }
    ~rpc_link() { hang_up(); }
    rpc_link(const rpc_link &) = delete;
    rpc_link & operator=(const rpc_link &) = delete;

    const std::string    endpoint;    // host:port, as it was given
    std::atomic<int64_t> timeout_ms;  // how long a message may take, beside its bytes
    std::atomic<bool>    is_lost{false};
    std::atomic<bool>    is_taken{false};  // by ggml's client: a connection serves one
    // What the server said when it was opened; ggml asks again, under locks of all servers.
    std::vector<uint64_t> alignments, max_sizes;

    // The first reason stays.
    void        lose(const std::string & why) noexcept;
    // `code`: what errno would be; 0 where the server closed the connection.
    void        give_up(const char * doing, int code) noexcept;
    std::string why() const;

    // False, and lost: it failed, or took longer than the time limit and 16 s for each MiB.
    bool connect() noexcept;
    bool send(const void * head, size_t head_size, const void * data, size_t size, const char * doing) noexcept;
    bool receive(void * data, size_t size, const char * doing) noexcept;
    // Receives an answer and checks it: false, and lost, where it is cut, of another length, or cannot be true.
    bool receive_answer(const rpc_request & request, void * data, size_t size, const char * doing) noexcept;
    // Whether this was asked when the server was opened, and the answer again.
    bool known(const rpc_request & request) const;
    void tell(const rpc_request & request, void * data, size_t size) const;
    void hang_up() noexcept;

  private:
    mutable std::mutex mutex;
    std::string        reason;
    int                fd      = -1;
    int                process = 0;
};

using rpc_links = std::vector<std::shared_ptr<rpc_link>>;

inline bool is_remote(const rpc_links & links) noexcept { return !links.empty(); }
inline const rpc_link * lost_link(const rpc_links & links) noexcept {
    for (const auto & link : links) {
        if (link->is_lost.load(std::memory_order_acquire)) {
            return link.get();
        }
    }
    return nullptr;
}

// Those of the context whose lock this thread holds; NULL where it has none.
inline thread_local const rpc_links * watched_links = nullptr;

}  // namespace pykv
