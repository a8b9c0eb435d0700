// What llama.cpp's compute threads throw, raised where it can be caught.
//
// ggml computes in OpenMP regions. An exception that leaves one ends the process: on a worker
// nobody catches it, and the calling thread would leave a team behind that still runs on its
// stack. So the linker puts these two functions between ggml and libgomp (--wrap): each thread
// catches what it throws, the others stop at their next barrier, and the caller throws it on.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "guarded.h"

extern "C" {
int  omp_get_num_threads(void);
int  omp_get_thread_num(void);
void __real_GOMP_parallel(void (*work)(void *), void * data, unsigned n_threads, unsigned flags);
void __real_GOMP_barrier(void);
void __wrap_GOMP_parallel(void (*work)(void *), void * data, unsigned n_threads, unsigned flags);
void __wrap_GOMP_barrier(void);
}

namespace {

// A line of the processor's caches: what one thread writes all the time must not share one with what
// the others read.
constexpr size_t LINE = 64;
constexpr int    N_SLOTS = 16;

struct region {
    void (*work)(void *);
    void *           data;
    std::atomic<int> ended{0};  // threads that have left the work, one way or the other
    struct alignas(LINE) slot {
        std::atomic<int> at{0};  // number of the latest barrier that one of its threads has come to
    } slots[N_SLOTS];
    alignas(LINE) std::atomic<bool> failed{false};
    std::mutex        mutex;
    std::string       what;
    bool              memory = false;

    int at_barrier() const {
        int latest = 0;
        for (const slot & s : slots) {
            latest = std::max(latest, s.at.load(std::memory_order_acquire));
        }
        return latest;
    }

    void fail(const char * text, bool out_of_memory) noexcept {
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
};

// Where this thread is; one variable, because each costs a call of the linker's.
struct place {
    region * current = nullptr;
    int      barriers = 0;  // of this region that this thread has come to
    int      slot = 0;
};
thread_local place here;

struct another_thread_failed {};

// All threads come to the same barriers in the same order: whoever has left the work early goes
// on to those that others wait at, until everybody has left.
void wait_for_the_others(region & r) {
    place &   me = here;
    const int team = omp_get_num_threads();
    while (true) {
        if (r.at_barrier() > me.barriers) {
            ++me.barriers;
            __real_GOMP_barrier();
        } else if (r.ended.load(std::memory_order_acquire) == team) {
            return;
        } else {
            std::this_thread::yield();
        }
    }
}

void take_part(void * data) {
    region & r = *static_cast<region *>(data);
    here = {&r, 0, omp_get_thread_num() % N_SLOTS};
    ++pykv::guard.depth;
    pykv::rest_x87();
    bool left_early = true;
    try {
        r.work(r.data);
        left_early = false;
    } catch (const another_thread_failed &) {
    } catch (const std::bad_alloc &) {
        r.fail("out of memory", true);
    } catch (const std::exception & error) {
        r.fail(error.what(), false);
    } catch (...) {
        r.fail("unknown C++ exception", false);
    }
    --pykv::guard.depth;
    here.current = nullptr;
    r.ended.fetch_add(1, std::memory_order_acq_rel);
    if (left_early) {
        wait_for_the_others(r);
    }
}

}  // namespace

void __wrap_GOMP_parallel(void (*work)(void *), void * data, unsigned n_threads, unsigned flags) {
    if (pykv::guard.depth == 0 || here.current) {
        __real_GOMP_parallel(work, data, n_threads, flags);
        return;
    }
    region r;
    r.work = work;
    r.data = data;
    __real_GOMP_parallel(take_part, &r, n_threads, flags);
    if (r.memory) {
        throw std::bad_alloc();
    }
    if (r.failed) {
        throw std::runtime_error(r.what);
    }
}

void __wrap_GOMP_barrier(void) {
    place &        me = here;
    region * const r = me.current;
    if (!r) {
        __real_GOMP_barrier();
        return;
    }
    ++me.barriers;
    // Nobody comes to the next barrier before all have come to this one: numbers of threads that
    // share a slot never go back.
    r->slots[me.slot].at.store(me.barriers, std::memory_order_release);
    __real_GOMP_barrier();
    if (r->failed.load(std::memory_order_acquire)) {
        throw another_thread_failed();
    }
}
