// State shared by threads: connections to remote devices, the context's lock, the abort flag.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace pykv {

// Whether a connection was ever made; otherwise calls skip the check.
inline std::atomic<bool> any_device_link{false};

// A connection to a remote device (rpc/), which can be lost during a call. ggml continues with fabricated replies;
// guarded.h turns such a call's result into an error.
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

// A mutex that knows its owner, so that a call from one of the context's callbacks
// is refused instead of deadlocking.
class owned_mutex {
  public:
    bool try_lock() {
        if (!mutex.try_lock()) {
            return false;
        }
        begin();
        return true;
    }
    void lock() {
        mutex.lock();
        begin();
    }
    // At process exit: nothing may run under it any more. Does not watch `links`, which may be destroyed before.
    void lock_for_good() {
        mutex.lock();
        owner.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    void unlock() {
        if (any_device_link.load(std::memory_order_relaxed)) {
            watched_links = before;
        }
        owner.store(std::thread::id(), std::memory_order_relaxed);
        mutex.unlock();
    }
    bool is_mine() const { return owner.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

    // Set the connections that calls under this lock depend on; once, before the first call.
    void watch(const device_links & servers) noexcept { links = servers.empty() ? nullptr : &servers; }

  private:
    std::mutex                   mutex;
    std::atomic<std::thread::id> owner{};
    const device_links *         links = nullptr;
    const device_links *         before = nullptr;  // of the lock that this thread already holds; null for none

    void begin() {
        owner.store(std::this_thread::get_id(), std::memory_order_relaxed);
        if (any_device_link.load(std::memory_order_relaxed)) {
            before        = watched_links;
            watched_links = links;
        }
    }
};

// Unlocks at the end of its scope.
class scoped_lock {
  public:
    scoped_lock() = default;
    scoped_lock(const scoped_lock &) = delete;
    scoped_lock & operator=(const scoped_lock &) = delete;
    ~scoped_lock() {
        if (mutex) {
            mutex->unlock();
        }
    }
    // Take over a mutex that this thread has locked.
    void adopt(owned_mutex & locked) noexcept { mutex = &locked; }

  private:
    owned_mutex * mutex = nullptr;
};

// abort() from another thread stops the running decode, in any of its parts, but no later one.
struct abort_flag {
    std::atomic<bool> running{false};
    std::atomic<bool> wanted{false};
    std::atomic<bool> armed{false};  // off while a pending shift is applied, which must not stop half-way
    std::atomic<int64_t> countdown{0};  // for tests: polls until an abort; 0 for never

    void begin() {
        wanted = false;
        running = true;
    }
    void arm(bool on) { armed = on; }
    void end() {
        running = false;
        armed = false;
    }
    bool is_wanted() const { return wanted; }
    bool ask() {
        if (running) {
            wanted = true;
        }
        return running;
    }
    // Abort at a poll counted from now, 0 for never; returns the remaining polls of the previous call.
    int64_t ask_at(int64_t poll) noexcept { return countdown.exchange(poll); }
    static bool poll(void * self) {
        auto * flag = static_cast<abort_flag *>(self);
        if (flag->countdown.load(std::memory_order_relaxed) > 0 && flag->armed && --flag->countdown == 0) {
            flag->wanted = true;
        }
        return flag->wanted.load(std::memory_order_relaxed) && flag->armed.load(std::memory_order_relaxed);
    }
};

// At interpreter exit a load may no longer call back: taking the GIL would end its
// thread inside C++. So it is cancelled and waited for.
struct load_gate {
    std::atomic<int>  running{0};
    std::atomic<bool> exiting{false};

    void begin() { ++running; }
    void end() { --running; }
    bool is_exiting() const { return exiting; }
    void finish() {
        exiting = true;
        for (int i = 0; i < 5000 && running > 0; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
};

inline load_gate loads;

}  // namespace pykv
