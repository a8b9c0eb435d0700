// What several threads touch: the context's lock, the abort flag, the fork counter.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

#include "device_link.h"

namespace pykv {

// A mutex that knows its owner, so that a call from one of the context's own
// callbacks is refused instead of a deadlock.
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
    // At the end of the process: nothing runs under it any more, and it may be gone before its owner's last call.
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

    // Connections that the calls under this lock depend on; once, before the first of them.
    void watch(const device_links & servers) noexcept { links = servers.empty() ? nullptr : &servers; }

  private:
    std::mutex                   mutex;
    std::atomic<std::thread::id> owner{};
    const device_links *         links = nullptr;
    const device_links *         before = nullptr;  // of the lock that this thread holds already; null before there is any

    void begin() {
        owner.store(std::this_thread::get_id(), std::memory_order_relaxed);
        if (any_device_link.load(std::memory_order_relaxed)) {
            before        = watched_links;
            watched_links = links;
        }
    }
};

// abort() from another thread concerns a decode that runs, in whatever part, and no later one.
struct abort_flag {
    std::atomic<bool> running{false};
    std::atomic<bool> wanted{false};
    std::atomic<bool> armed{false};  // off while a pending shift is applied: a part of one is damage
    std::atomic<int64_t> countdown{0};  // for tests: polls until abort() is asked for; 0 for never

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
    // Ask at a poll from now on, 0 for none; how many of the last such wish have not come yet.
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
// thread inside C++. It is cancelled instead, and waited for.
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
