// The threads that compute: teams of a calling thread and workers that wait for it.
//
// parallel.cpp runs ggml's OpenMP regions on them. A thread that the system refuses makes a smaller
// team, no more. A thread that waits spins for some microseconds and then sleeps, so that
// other programs get the processor.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pykv {

// A line of the processor's caches: what one thread writes all the time must not share one with what
// the others read.
constexpr size_t LINE = 64;
constexpr int    MAX_TEAM = 512;

// A number that threads wait on until it changes.
class alignas(LINE) turnstile {
  public:
    uint32_t now() const { return value.load(std::memory_order_acquire); }
    // Spin for `spin_ns`, then sleep.
    void wait_while(uint32_t old, int64_t spin_ns);
    // The same of a worker that waits for its next team, which takes longer than what a team waits for.
    void wait_for_work(uint32_t old, int64_t spin_ns);
    // Wake the threads that wait.
    void set(uint32_t next) {
        set_quietly(next);
        wake();
    }
    // The same for those that spin; those that sleep need wake().
    void set_quietly(uint32_t next) { value.store(next, std::memory_order_seq_cst); }
    void wake();

  private:
    void sleep_while(uint32_t old);

    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};
};

// A barrier for all threads of a team; once it is broken, no thread waits at it.
class barrier {
  public:
    // False if it is broken.
    bool wait(int n_threads, int64_t spin_ns);
    void break_up();
    bool is_broken() const { return broken.load(std::memory_order_acquire); }

  private:
    alignas(LINE) std::atomic<int> arrived{0};
    turnstile         gate;
    std::atomic<bool> broken{false};
};

// What a team runs: run(part, index) on each thread, 0 being the caller's. It must not throw.
struct team_work {
    void (*run)(team_work & work, int index);
    int     n_threads = 0;  // how many there are: set before the first run
    int64_t spin_ns = 0;    // how long a thread of this team spins before it sleeps
    // Whether a worker that has not begun when the caller has ended is let go: for work that is taken piece by piece.
    // Waking one that sleeps may take longer than all of it: on virtual machines near a millisecond.
    bool may_miss = false;
};

// Run `work` on up to `n_threads` threads, this one included, and return when all that have begun have ended.
void run_team(team_work & work, int n_threads);

// The processors that this process may use.
int usable_processors();

}  // namespace pykv
