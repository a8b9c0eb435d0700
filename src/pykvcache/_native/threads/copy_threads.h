// Large copies on two threads: one core alone cannot use the memory's bandwidth.
#pragma once

#include <atomic>
#include <cstddef>

#include "team.h"

namespace pykv {

// Smaller copies are done before a second thread has begun. A thread of the team that has just computed still spins.
constexpr size_t WORTH_A_THREAD = size_t(512) << 10;

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

// Call `first` and then `copy` on this thread and, if `two`, `copy` on another one at the same time. `copy` takes
// numbers from `jobs` until none is left. An exception of either thread is thrown here after both have ended.
template <class First, class Copy> void with_copy_threads(bool two, counter & jobs, First && first, Copy && copy) {
    struct copying final : team {
        counter & jobs;
        First &   first;
        Copy &    copy;

        copying(counter & j, First & f, Copy & c) : jobs(j), first(f), copy(c) { may_miss_workers = true; }
        void work(int index) override {
            try {
                if (index == 0) {
                    first();
                }
                copy();
            } catch (...) {
                jobs.stop();
                throw;
            }
        }
    };
    copying(jobs, first, copy).run(two ? 2 : 1);
}

}  // namespace pykv
