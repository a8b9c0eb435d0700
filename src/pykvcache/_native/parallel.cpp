// What ggml's OpenMP regions call, in libgomp's place.
//
// libgomp ends the process where the system refuses a thread, spins for milliseconds where others need
// the processor, hangs in the child of a fork, and an exception that leaves a region ends the process.
// Here a region runs on the threads of team.h: each thread catches what it throws, the others stop at
// their next barrier, and the caller throws it on.
#include <atomic>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "guarded.h"
#include "x87.h"
#include "team.h"

namespace pykv {

namespace {

struct another_thread_failed {};

struct region : team_work {
    void (*body)(void *);
    void *  data;
    barrier meet;

    // `#pragma omp single`: how many of them have found their thread.
    alignas(LINE) std::atomic<uint32_t> singles{0};
    // `#pragma omp for schedule(dynamic)`: one at a time, because each ends at a barrier.
    uint32_t          loops = 0;
    long              step = 1, chunk = 1, end = 0;
    std::atomic<long> next{0};

    std::mutex  mutex;
    bool        failed = false;
    bool        memory = false;
    std::string what;

    void fail(const char * text, bool out_of_memory) noexcept {
        {
            std::lock_guard<std::mutex> lock(mutex);
            if (failed) {
                return;
            }
            try {
                what = text;
            } catch (...) {
            }
            memory = out_of_memory;
            failed = true;
        }
        meet.break_up();
    }
};

// Where this thread is; one variable, because each costs a call of the linker's.
struct place {
    region * current = nullptr;
    int      index = 0;
    uint32_t singles = 0;  // of this region that this thread has come to
    uint32_t loops = 0;
};
thread_local place here;

void take_part(team_work & work, int index) {
    region &    r = static_cast<region &>(work);
    const place before = here;
    here = {&r, index, 0, 0};
    if (index > 0) {
        ++guard.depth;  // an assertion throws
    }
    rest_x87();
    try {
        r.body(r.data);
    } catch (const another_thread_failed &) {
    } catch (const std::bad_alloc &) {
        r.fail("out of memory", true);
    } catch (const std::exception & error) {
        r.fail(error.what(), false);
    } catch (...) {
        r.fail("unknown C++ exception", false);
    }
    if (index > 0) {
        --guard.depth;
    }
    here = before;
}

std::mutex atomic_updates;

}  // namespace

}  // namespace pykv

using pykv::here;

extern "C" {

int omp_get_num_threads(void) { return here.current ? here.current->n_threads : 1; }
int omp_get_thread_num(void) { return here.index; }
int omp_get_max_threads(void) { return pykv::usable_processors(); }
int omp_in_parallel(void) { return omp_get_num_threads() > 1; }

void GOMP_parallel(void (*body)(void *), void * data, unsigned n_threads, unsigned) {
    pykv::region r;
    r.run = pykv::take_part;
    r.body = body;
    r.data = data;
    // A region inside a region is its thread's own.
    const int n = here.current ? 1 : n_threads ? int(n_threads) : omp_get_max_threads();
    pykv::run_team(r, n);
    if (r.memory) {
        throw std::bad_alloc();
    }
    if (r.failed) {
        throw std::runtime_error(r.what);
    }
}

void GOMP_barrier(void) {
    pykv::region * const r = here.current;
    if (r && !r->meet.wait(r->n_threads, r->spin_ns)) {
        throw pykv::another_thread_failed();
    }
}

bool GOMP_single_start(void) {
    pykv::region * const r = here.current;
    if (!r) {
        return true;
    }
    uint32_t mine = here.singles++;
    return r->singles.compare_exchange_strong(mine, mine + 1, std::memory_order_acq_rel);
}

bool GOMP_loop_nonmonotonic_dynamic_next(long * from, long * to) {
    pykv::region & r = *here.current;
    const long     first = r.next.fetch_add(r.chunk * r.step, std::memory_order_relaxed);
    if (r.step > 0 ? first >= r.end : first <= r.end) {
        return false;
    }
    const long last = first + r.chunk * r.step;
    *from = first;
    *to = (r.step > 0 ? last > r.end : last < r.end) ? r.end : last;
    return true;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long * from, long * to) {
    pykv::region & r = *here.current;
    {
        std::lock_guard<std::mutex> lock(r.mutex);
        if (r.loops == here.loops++) {  // the first thread that comes to it
            ++r.loops;
            r.step = step;
            r.chunk = chunk;
            r.end = end;
            r.next.store(start, std::memory_order_relaxed);
        }
    }
    return GOMP_loop_nonmonotonic_dynamic_next(from, to);
}

void GOMP_loop_end(void) { GOMP_barrier(); }

void GOMP_atomic_start(void) { pykv::atomic_updates.lock(); }
void GOMP_atomic_end(void) { pykv::atomic_updates.unlock(); }

}  // extern "C"
