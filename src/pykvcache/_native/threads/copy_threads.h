// Large copies on two threads, because one core cannot use the full memory bandwidth.
#pragma once

#include <atomic>
#include <cstddef>

#include "team.h"

namespace pykv {

// Smaller copies finish before a second thread starts. A compute thread still spins right after a decode.
constexpr size_t WORTH_A_THREAD = size_t(512) << 10;

// Distributes the numbers below n among threads.
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

// Call `first`, then `copy` on this thread; if `two`, call `copy` on a second thread at the same time. `copy` takes
// numbers from `jobs` until none is left. Rethrows an exception of either thread after both have ended.
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
