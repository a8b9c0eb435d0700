// Connections to devices of other machines (rpc/), which can be lost in the middle of a call.
//
// ggml cannot be told of a loss: it goes on with made-up answers. guarded.h turns the result of such a call
// into an error, and no context that used the connection computes again.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace pykv {

// Whether there ever was a connection: without one no call has anything to check.
inline std::atomic<bool> any_device_link{false};

struct device_link {
    explicit device_link(std::string where) : endpoint(std::move(where)) { any_device_link = true; }
    device_link(const device_link &) = delete;
    device_link & operator=(const device_link &) = delete;

    const std::string endpoint;  // host:port, as the user gave it
    std::atomic<bool> is_lost{false};

    // The first reason stays.
    void lose(std::string why) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!is_lost) {
            reason = std::move(why);
            is_lost.store(true, std::memory_order_release);
        }
    }
    std::string why() const {
        std::lock_guard<std::mutex> lock(mutex);
        return reason;
    }

  private:
    mutable std::mutex mutex;
    std::string        reason;
};

using device_links = std::vector<std::shared_ptr<device_link>>;

inline bool is_remote(const device_links & links) noexcept { return !links.empty(); }
inline const device_link * lost_link(const device_links & links) noexcept {
    for (const auto & link : links) {
        if (link->is_lost.load(std::memory_order_acquire)) {
            return link.get();
        }
    }
    return nullptr;
}

// Those of the context whose lock this thread holds; NULL where it has none.
inline thread_local const device_links * watched_links = nullptr;

}  // namespace pykv
