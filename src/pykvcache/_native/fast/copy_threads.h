// Work that two threads share: copying is faster than one core can wait for memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <system_error>
#include <thread>

#include "guarded.h"

namespace pykv {

// Less is done before a thread has started.
constexpr size_t WORTH_A_THREAD = size_t(4) << 20;

// Hands out the numbers below n, each to one thread.
class counter {
  public:
    explicit counter(size_t n) : n(n) {}

    bool take(size_t & k) {
        k = next.fetch_add(1, std::memory_order_relaxed);
        return k < n;
    }
    void stop() { next.store(n, std::memory_order_relaxed); }

  private:
    const size_t        n;
    std::atomic<size_t> next{0};
};

// Call `work` on this thread after `first`, and meanwhile on another if there may be one and the
// system gives one. It takes numbers from `jobs` until all are taken. What either throws is thrown here,
// when both have ended.
template <class First, class Work> void with_copy_threads(bool two, counter & jobs, First && first, Work && work) {
    std::exception_ptr failed;
    std::thread        other;
    if (two) {
        try {
            other = std::thread([&] {
                if (!ready_thread()) {
                    return;  // there is no memory for what it might throw
                }
                try {
                    work();
                } catch (...) {
                    failed = std::current_exception();
                    jobs.stop();
                }
            });
        } catch (const std::system_error &) {
            // This thread does it all.
        }
    }
    try {
        first();
        work();
    } catch (...) {
        jobs.stop();
        if (other.joinable()) {
            other.join();
        }
        throw;
    }
    if (other.joinable()) {
        other.join();
    }
    if (failed) {
        std::rethrow_exception(failed);
    }
}

}  // namespace pykv
