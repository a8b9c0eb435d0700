// Connections to remote devices (rpc/), which can be lost during a call.
//
// ggml continues with fabricated replies. guarded.h turns such a call's result into an error.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace pykv {

// Whether a connection was ever made; otherwise calls skip the check.
inline std::atomic<bool> any_device_link{false};

struct device_link {
    explicit device_link(std::string where) : endpoint(std::move(where)) { any_device_link = true; }
    device_link(const device_link &) = delete;
    device_link & operator=(const device_link &) = delete;

    const std::string endpoint;  // host:port, as the user gave it
    std::atomic<bool> is_lost{false};

    // Keeps the first reason.
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

// Connections of the context whose lock this thread holds; NULL if none.
inline thread_local const device_links * watched_links = nullptr;

}  // namespace pykv
