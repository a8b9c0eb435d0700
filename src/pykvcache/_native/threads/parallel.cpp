// Runs ggml's OpenMP regions on the threads of team.h: defines the functions that GCC calls, in place of libgomp
// (docs/decisions.md has the reasons).
#include <mutex>

#include "team.h"

namespace {

struct region;

// Thread-local state in one variable, because each access computes an address by a call.
struct place {
    region * current = nullptr;
    int      index = 0;
    uint32_t n_singles = 0;  // reached by this thread
};
thread_local place here;

struct region final : pykv::team {
    region(void (*body)(void *), void * data) : body(body), data(data) {}

    // Whether this thread is the first to reach its next `single`.
    bool is_first() {
        uint32_t mine = here.n_singles++;
        return n_singles.compare_exchange_strong(mine, mine + 1, std::memory_order_acq_rel);
    }

  private:
    void work(int index) override {
        struct visit {
            place before = here;
            ~visit() { here = before; }
        } restores;
        here = {this, index};
        body(data);
    }

    void (*body)(void *);
    void * data;
    alignas(pykv::CACHE_LINE) std::atomic<uint32_t> n_singles{0};  // already claimed by a thread
};

std::mutex atomic_updates;

}  // namespace

extern "C" {

int omp_get_num_threads(void) { return here.current ? here.current->n_threads() : 1; }
int omp_get_thread_num(void) { return here.index; }

// #pragma omp parallel
void GOMP_parallel(void (*body)(void *), void * data, unsigned n_threads, unsigned) {
    const bool is_nested = here.current;  // nested regions run on one thread
    region(body, data).run(is_nested ? 1 : n_threads ? int(n_threads) : pykv::usable_processors());
}

void GOMP_barrier(void) {
    if (here.current) {
        here.current->wait_at_barrier();
    }
}

// #pragma omp single
bool GOMP_single_start(void) { return !here.current || here.current->is_first(); }

// #pragma omp for schedule(dynamic): the first thread does the whole loop. ggml has such loops only in the
// preparation of i-quants.
bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long, long, long * from, long * to) {
    *from = start;
    *to = end;
    return GOMP_single_start() && start != end;
}
bool GOMP_loop_nonmonotonic_dynamic_next(long *, long *) { return false; }
void GOMP_loop_end(void) { GOMP_barrier(); }

// #pragma omp atomic, and reductions
void GOMP_atomic_start(void) { atomic_updates.lock(); }
void GOMP_atomic_end(void) { atomic_updates.unlock(); }

}  // extern "C"
