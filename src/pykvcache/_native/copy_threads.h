// Work that two threads share: copying is faster than one core can wait for memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>

#include "guarded.h"

#ifdef PYKVCACHE_TEAM
#include "team.h"
#else
#include <system_error>
#include <thread>
#endif

namespace pykv {

// Less is done before another thread has begun: one of the team that has just computed looks for work all the time,
// and one that sleeps is not waited for.
#ifdef PYKVCACHE_TEAM
constexpr size_t WORTH_A_THREAD = size_t(512) << 10;
#else
constexpr size_t WORTH_A_THREAD = size_t(4) << 20;
#endif

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
    std::exception_ptr own, others;
    const auto         here = [&]() noexcept {
        try {
            first();
            work();
        } catch (...) {
            own = std::current_exception();
            jobs.stop();
        }
    };
    const auto there = [&]() noexcept {
        if (!ready_thread()) {
            return;  // there is no memory for what it might throw
        }
        const assertions_throw scope;
        try {
            work();
        } catch (...) {
            others = std::current_exception();
            jobs.stop();
        }
    };
    if (!two) {
        here();
    } else {
#ifdef PYKVCACHE_TEAM
        struct both : team_work {
            decltype(here) &  mine;
            decltype(there) & other;
            both(decltype(here) & h, decltype(there) & t) : mine(h), other(t) {
                run = [](team_work & self, int index) {
                    auto & it = static_cast<both &>(self);
                    index == 0 ? it.mine() : it.other();
                };
            }
        };
        both of_them(here, there);
        of_them.may_miss = true;
        run_team(of_them, 2);
#else
        std::thread other;
        try {
            other = std::thread(there);
        } catch (const std::system_error &) {
            // This thread does it all.
        }
        here();
        if (other.joinable()) {
            other.join();
        }
#endif
    }
    if (own || others) {
        std::rethrow_exception(own ? own : others);
    }
}

}  // namespace pykv
