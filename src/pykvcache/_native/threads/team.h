// The compute threads: ggml's OpenMP regions (parallel.cpp), large copies and token choices run on them.
//
// A team is the calling thread and workers from the process's pool. docs/decisions.md has the reasons.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>

namespace pykv {

// Keeps frequently written fields on separate cache lines.
constexpr size_t CACHE_LINE = 64;
constexpr int    MAX_TEAM = 512;

struct worker;

// A number on which threads wait for a change.
class alignas(CACHE_LINE) generation {
  public:
    uint32_t now() const { return value.load(std::memory_order_acquire); }
    // Visible to spinning threads; wake() reaches sleeping ones.
    void advance() { value.fetch_add(1, std::memory_order_seq_cst); }
    void wake();
    // Spin for at most `spin_ns`, then sleep.
    void wait_while(uint32_t old, int64_t spin_ns);
    void sleep_while(uint32_t old);

  private:
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};
};

// Thrown at a barrier after another thread of the team has failed.
struct team_failed {};

class barrier {
  public:
    void wait(int n_threads, int64_t spin_ns);
    // Stop all waits: wait() throws team_failed.
    void break_up();

  private:
    alignas(CACHE_LINE) std::atomic<int> n_arrived{0};
    generation        gate;
    std::atomic<bool> is_broken{false};
};

#ifdef PYKVCACHE_TEAM

class team {
  public:
    // Set by work that is taken in pieces: the caller does not wait for workers that have not started when it
    // finishes. Waking a thread takes up to a millisecond on virtual machines.
    bool may_miss_workers = false;

    // Run work() on up to `max_threads` threads and rethrow the first exception. If the system refuses a thread, the
    // team is smaller.
    void run(int max_threads);
    int  n_threads() const { return n; }
    void wait_at_barrier() { meeting.wait(n, spin_ns); }

  protected:
    ~team() = default;
    // Called once on each thread; the caller's `index` is 0.
    virtual void work(int index) = 0;

  private:
    friend struct worker;
    void take_part(int index) noexcept;
    void wake_children(int index);

    int                n = 0;
    int64_t            spin_ns = 0;
    barrier            meeting;
    std::atomic<bool>  has_failed{false};
    std::exception_ptr error;
    worker *           members[MAX_TEAM];  // from 1 on
};

// Number of processors that this process may use.
int usable_processors();

#else

// Without GCC's OpenMP on Linux the caller works alone, and ggml uses its own threads.
class team {
  public:
    bool may_miss_workers = false;

    void run(int) { work(0); }

  protected:
    ~team() = default;
    virtual void work(int index) = 0;
};

#endif

// One core cannot use the full memory bandwidth, so two copy. Smaller copies finish before a second thread starts. (A
// compute thread still spins right after a decode.)
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

// Call `work(index)` on up to `n_threads` threads; the caller's index is 0. It takes numbers from `jobs` until none is
// left. Rethrows the first exception after all threads have ended.
template <class Work> void share(counter & jobs, int n_threads, Work && work) {
    struct sharing final : team {
        counter & jobs;
        Work &    call;

        sharing(counter & j, Work & w) : jobs(j), call(w) { may_miss_workers = true; }
        void work(int index) override {
            try {
                call(index);
            } catch (...) {
                jobs.stop();
                throw;
            }
        }
    };
    sharing(jobs, work).run(n_threads);
}

}  // namespace pykv
