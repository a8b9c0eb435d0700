#include "team.h"

#include "guarded.h"
#include "system.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>
#include <thread>

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pykv {

namespace {

// As fast as endless spinning on an idle machine (benchmarks/waiting.py), and short on a busy one.
constexpr int64_t BARRIER_SPIN_NS = 20'000;
// Covers the choice of tokens between two decodes: a sleeping worker makes the next decode 6 to 25 % longer.
constexpr int64_t IDLE_SPIN_NS = 1'000'000;
constexpr int64_t SPIN_STEP_NS = 500;
constexpr int     FULL_SPIN_EVERY = 32;

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void pause_processor() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield" ::: "memory");
#endif
}

// OpenMP's variable OMP_WAIT_POLICY: "passive" threads do not spin.
bool may_spin() {
    const char * policy = std::getenv("OMP_WAIT_POLICY");
    return !policy || strcasecmp(policy, "passive") != 0;
}

}  // namespace

// A failed spin takes a processor that the awaited thread may need. So a thread spins for less time after
// each failure and longer after a success.
struct spinner {
    int64_t  ns = BARRIER_SPIN_NS;
    uint32_t n_waits = 0;

    // Returns whether the number changed in time.
    bool spin(const generation & number, uint32_t old, int64_t max_ns) {
        if (max_ns <= 0) {
            return number.now() != old;
        }
        if (++n_waits % FULL_SPIN_EVERY == 0 || ns > max_ns) {
            ns = max_ns;
        }
        int64_t end = 0;
        for (int i = 0;; ++i) {
            if (number.now() != old) {
                ns += ns + SPIN_STEP_NS;
                return true;
            }
            if (i % 16 == 0) {  // the clock costs as much as a pause
                const int64_t now = now_ns();
                end = end ? end : now + ns;
                if (now >= end) {
                    ns -= ns / 4;
                    return false;
                }
            }
            pause_processor();
        }
    }
};

struct worker {
    generation offers;  // advances with each offer
    generation done;    // advances when an accepted offer is done
    // Taken by the worker, or withdrawn by a caller that does not wait for a late worker.
    std::atomic<team *>  offer{nullptr};
    int                  index = 0;       // in the offered team
    uint32_t             done_before = 0; // `done` at the last offer
    std::atomic<int64_t> spin_ns{0};      // until the next offer
    worker *             next_idle = nullptr;

    void serve();
    void take(team & work) {
        work.wake_children(index);
        work.take_part(index);
    }
};

namespace {

thread_local spinner at_barriers;

struct pool {
    std::mutex       mutex;
    worker *         idle = nullptr;
    std::atomic<int> n_busy{0};  // threads in teams
};

// Never destroyed: workers may wait while the process exits.
pool & workers() {
    static pool * one = [] {
        // A forked child has no workers, and its lock may be held by a thread that does not exist there.
        pthread_atfork(nullptr, nullptr, [] { one = new pool; });
        return new pool;
    }();
    return *one;
}

worker * hire() noexcept {
    try {
        auto one = std::make_unique<worker>();
        std::thread(&worker::serve, one.get()).detach();
        return one.release();
    } catch (const std::exception &) {
        return nullptr;
    }
}

}  // namespace

void worker::serve() {
    const assertions_throw in_ggml;
    rest_x87();
    spinner  between;
    uint32_t seen = 0;
    while (true) {
        if (!between.spin(offers, seen, spin_ns.load(std::memory_order_relaxed))) {
            offers.sleep_while(seen);
        }
        seen = offers.now();
        if (team * accepted = offer.exchange(nullptr, std::memory_order_acq_rel)) {
            take(*accepted);
            done.advance();  // from here on the team may be gone
            done.wake();
        }
    }
}

void generation::wait_while(uint32_t old, int64_t spin_ns) {
    if (!at_barriers.spin(*this, old, spin_ns)) {
        sleep_while(old);
    }
}

void generation::sleep_while(uint32_t old) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (value.load(std::memory_order_seq_cst) == old) {
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&value), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void generation::wake() {
    if (sleepers.load(std::memory_order_seq_cst) > 0) {
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
}

void barrier::wait(int n_threads, int64_t spin_ns) {
    // Read before `is_broken`, which break_up() writes first.
    const uint32_t here = gate.now();
    if (!is_broken.load(std::memory_order_acquire)) {
        if (n_arrived.fetch_add(1, std::memory_order_acq_rel) == n_threads - 1) {
            n_arrived.store(0, std::memory_order_relaxed);
            gate.advance();
            gate.wake();
        } else {
            gate.wait_while(here, spin_ns);
        }
    }
    if (is_broken.load(std::memory_order_acquire)) {
        throw team_failed();
    }
}

void barrier::break_up() {
    is_broken.store(true, std::memory_order_seq_cst);
    gate.advance();
    gate.wake();
}

// Wake sleeping workers as a tree: a single thread would wake the last ones late.
void team::wake_children(int index) {
    for (int child = 2 * index + 1; child <= 2 * index + 2 && child < n; ++child) {
        members[child]->offers.wake();
    }
}

void team::take_part(int index) noexcept {
    try {
        work(index);
    } catch (const team_failed &) {
    } catch (...) {
        if (!has_failed.exchange(true)) {
            error = std::current_exception();
            meeting.break_up();
        }
    }
}

void team::run(int max_threads) {
    if (max_threads <= 1) {
        n = 1;
        return work(0);
    }
    static const bool spins = may_spin();
    static const int  n_processors = usable_processors();
    pool &            all = workers();
    const int         limit = std::min(max_threads, MAX_TEAM);
    n = 1;
    {
        std::lock_guard<std::mutex> lock(all.mutex);
        for (; n < limit && all.idle; ++n) {
            members[n] = all.idle;
            all.idle = all.idle->next_idle;
        }
    }
    while (n < limit && (members[n] = hire())) {
        ++n;
    }
    // With more threads than processors, a spinning thread blocks a working one.
    const bool is_crowded = all.n_busy.fetch_add(n, std::memory_order_relaxed) + n > n_processors;
    spin_ns = spins && !is_crowded ? BARRIER_SPIN_NS : 0;
    for (int i = 1; i < n; ++i) {
        worker & one = *members[i];
        one.index = i;
        one.done_before = one.done.now();
        one.spin_ns.store(spins && !is_crowded ? IDLE_SPIN_NS : 0, std::memory_order_relaxed);
        one.offer.store(this, std::memory_order_release);
        one.offers.advance();
    }
    wake_children(0);
    take_part(0);
    for (int i = 1; i < n; ++i) {
        worker & one = *members[i];
        if (!may_miss_workers || !one.offer.exchange(nullptr, std::memory_order_acq_rel)) {
            one.done.wait_while(one.done_before, spin_ns);
        }
    }
    all.n_busy.fetch_sub(n, std::memory_order_relaxed);
    {
        std::lock_guard<std::mutex> lock(all.mutex);
        for (int i = n - 1; i > 0; --i) {
            members[i]->next_idle = all.idle;
            all.idle = members[i];
        }
    }
    if (error) {
        std::rethrow_exception(error);
    }
}

int usable_processors() {
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof(mask), &mask) == 0) {
        return CPU_COUNT(&mask);
    }
    return std::max(1u, std::thread::hardware_concurrency());  // more processors than the mask holds
}

}  // namespace pykv
