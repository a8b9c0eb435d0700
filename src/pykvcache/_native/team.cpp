// The workers behind team.h: one pool for the process, of threads that are detached and never end.
#include "team.h"

#include "guarded.h"

#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <new>

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pykv {

namespace {

// Measured by benchmarks/waiting.py: as fast as endless spinning on an idle machine, and a processor
// that others need is given up soon.
constexpr int64_t SPIN_NS = 20'000;
// Between two decodes, while tokens are chosen: a worker that sleeps then makes the next one 6 to 25 % longer.
constexpr int64_t BETWEEN_NS = 1'000'000;
constexpr int64_t STEP_NS = 500;
constexpr int     PROBE_EVERY = 32;
constexpr size_t  STACK = size_t(2) << 20;
// What libc takes for a new thread's own data at most, besides its stack, and ends the process without.
constexpr size_t  THREAD_DATA = size_t(4) << 20;
// So long after the system refused a thread none is asked for.
constexpr int64_t RETRY_NS = 1'000'000'000;

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void pause_a_little() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield" ::: "memory");
#endif
}

// OpenMP's word for it: "passive" threads sleep at once, "active" ones spin longer.
int64_t asked_spin_ns(int64_t usual) {
    if (const char * policy = std::getenv("OMP_WAIT_POLICY")) {
        if (strcasecmp(policy, "passive") == 0) {
            return 0;
        }
        if (strcasecmp(policy, "active") == 0) {
            return 100 * SPIN_NS;
        }
    }
    return usual;
}

// What a new thread says.
constexpr uint32_t BORN = 1, REFUSED = 2;

// How long a thread spins next time.
struct patience {
    int64_t  ns = SPIN_NS;
    uint32_t n_waits = 0;

    bool spin(const std::atomic<uint32_t> & value, uint32_t old, int64_t most_ns);
};
thread_local patience patient;
// In vain at the end of a text, which says nothing about barriers.
thread_local patience between;

struct worker {
    turnstile   job;   // the number of the last job that it was given
    turnstile   done;  // the last job that it has ended
    turnstile   born;  // says once whether it has what a thread needs
    // The number of a job that it has not begun, else 0: who takes it out has it, the worker or whom it would be late for.
    std::atomic<uint32_t> open{0};
    // Of that job: only who has it may look at these.
    team_work * work = nullptr;
    int         index = 0;
    worker **   team = nullptr;
    worker *    next = nullptr;  // in the pool
    std::atomic<int64_t> spin_ns{0};  // until its next team; read while it waits for that
};

struct pool {
    std::mutex           mutex;
    std::mutex           hiring;
    worker *             idle = nullptr;
    std::atomic<int>     busy{0};  // threads in teams
    std::atomic<int64_t> retry_at{0};
    int64_t              spin_ns = asked_spin_ns(SPIN_NS);
    int64_t              between_ns = asked_spin_ns(BETWEEN_NS);
};

// Never destroyed: workers may wait in it while the process ends.
alignas(pool) unsigned char storage[sizeof(pool)];

// In the child of a fork there are no workers, and a lock may be held by a thread that is not there.
void renew_pool() { new (storage) pool; }

pool & workers() {
    static const bool made = [] {
        renew_pool();
        pthread_atfork(nullptr, nullptr, renew_pool);
        return true;
    }();
    (void) made;
    return *std::launder(reinterpret_cast<pool *>(storage));
}

// Sleeping workers are woken as a tree: one thread alone would be late with the last of many.
void wake_next(worker ** team, int n_threads, int index) {
    for (int child = 2 * index + 1; child <= 2 * index + 2 && child < n_threads; ++child) {
        team[child]->job.wake();
    }
}

void * serve(void * data) {
    worker & me = *static_cast<worker *>(data);
    // Thread-local data is made now: libc ends the process where it cannot be made when it is used.
    const bool is_ready = ready_thread();
    me.born.set(is_ready ? BORN : REFUSED);
    if (!is_ready) {
        return nullptr;
    }
    uint32_t last = 0;
    while (true) {
        me.job.wait_for_work(last, me.spin_ns.load(std::memory_order_relaxed));
        last = me.job.now();
        const uint32_t mine = me.open.exchange(0, std::memory_order_acq_rel);
        if (mine == 0) {
            continue;  // it was late
        }
        wake_next(me.team, me.work->n_threads, me.index);
        me.work->run(*me.work, me.index);
        me.done.set(mine);
    }
}

// Whether there is address space for one more thread, under RLIMIT_AS. They are hired one after the other,
// so that none finds that another has taken it.
bool has_room() {
    void * room = mmap(nullptr, STACK + THREAD_DATA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return room != MAP_FAILED && munmap(room, STACK + THREAD_DATA) == 0;
}

worker * hire() {
    if (!has_room()) {
        return nullptr;
    }
    auto * w = new (std::nothrow) worker;
    if (!w) {
        return nullptr;
    }
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    // Signals are for the program's own threads, save those for faults of the thread itself.
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) {
        sigdelset(&blocked, fault);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    pthread_t thread;
    const int refused = pthread_create(&thread, &attributes, serve, w);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (refused) {
        delete w;
        return nullptr;
    }
    w->born.wait_while(0, 0);
    if (w->born.now() == REFUSED) {
        pthread_join(thread, nullptr);
        delete w;
        return nullptr;
    }
    pthread_detach(thread);
    return w;
}

// Take up to `n` workers into team[1] and on; how many threads the team then has.
int gather(pool & p, worker ** team, int n_threads) {
    int n = 1;
    {
        std::lock_guard<std::mutex> lock(p.mutex);
        for (; n < n_threads && p.idle; ++n) {
            team[n] = p.idle;
            p.idle = p.idle->next;
        }
    }
    if (n < n_threads && p.retry_at.load(std::memory_order_relaxed) <= now_ns()) {
        std::lock_guard<std::mutex> lock(p.hiring);
        for (; n < n_threads; ++n) {
            team[n] = hire();
            if (!team[n]) {
                p.retry_at = now_ns() + RETRY_NS;
                break;
            }
        }
    }
    return n;
}

void dismiss(pool & p, worker ** team, int n_threads) {
    std::lock_guard<std::mutex> lock(p.mutex);
    for (int i = n_threads - 1; i > 0; --i) {
        team[i]->next = p.idle;
        p.idle = team[i];
    }
}

}  // namespace

// Spinning in vain costs the processor that the awaited thread may need: it may wait for this very one.
// So each thread spins less after each time in vain, and soon more again when it was worth it.
bool patience::spin(const std::atomic<uint32_t> & value, uint32_t old, int64_t most_ns) {
    if (most_ns <= 0) {
        return value.load(std::memory_order_acquire) != old;
    }
    if (++n_waits % PROBE_EVERY == 0 || ns > most_ns) {
        ns = most_ns;
    }
    int64_t until = 0;
    for (int i = 0;; ++i) {
        if (value.load(std::memory_order_acquire) != old) {
            ns += ns + STEP_NS;
            return true;
        }
        if (i % 16 == 0) {  // the clock costs as much as a pause
            const int64_t t = now_ns();
            if (until == 0) {
                until = t + ns;
            } else if (t >= until) {
                ns -= ns / 4;
                return false;
            }
        }
        pause_a_little();
    }
}

void turnstile::wait_while(uint32_t old, int64_t spin_ns) {
    if (!patient.spin(value, old, spin_ns)) {
        sleep_while(old);
    }
}

void turnstile::wait_for_work(uint32_t old, int64_t spin_ns) {
    if (!between.spin(value, old, spin_ns)) {
        sleep_while(old);
    }
}

void turnstile::sleep_while(uint32_t old) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (value.load(std::memory_order_seq_cst) == old) {
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&value), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void turnstile::wake() {
    if (sleepers.load(std::memory_order_seq_cst) > 0) {
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
}

bool barrier::wait(int n_threads, int64_t spin_ns) {
    // Before the look at `broken`: who breaks it up sets that first and the gate then.
    const uint32_t turn = gate.now();
    if (is_broken()) {
        return false;
    }
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == n_threads - 1) {
        arrived.store(0, std::memory_order_relaxed);
        gate.set(turn + 1);
    } else {
        gate.wait_while(turn, spin_ns);
    }
    return !is_broken();
}

void barrier::break_up() {
    if (!broken.exchange(true, std::memory_order_seq_cst)) {
        gate.set(gate.now() + 1);
    }
}

int usable_processors() {
    // More than cpu_set_t has room for, asked for with a mask of their own size.
    for (size_t n = CPU_SETSIZE; n <= size_t(CPU_SETSIZE) << 6; n *= 2) {
        cpu_set_t * mask = CPU_ALLOC(n);
        if (!mask) {
            break;
        }
        const size_t size = CPU_ALLOC_SIZE(n);
        const int    count = sched_getaffinity(0, size, mask) == 0 ? CPU_COUNT_S(size, mask) : 0;
        CPU_FREE(mask);
        if (count > 0) {
            return count;
        }
    }
    return 1;
}

void run_team(team_work & work, int n_threads) {
    static const int processors = usable_processors();
    worker * team[MAX_TEAM];
    pool &   p = workers();
    const int n = gather(p, team, n_threads < MAX_TEAM ? n_threads : MAX_TEAM);
    // A thread that spins while others wait for a processor keeps it from the threads that it waits for.
    const bool crowded = p.busy.fetch_add(n, std::memory_order_relaxed) + n > processors;
    work.n_threads = n;
    work.spin_ns = crowded ? 0 : p.spin_ns;
    for (int i = 1; i < n; ++i) {
        team[i]->work = &work;
        team[i]->team = team;
        team[i]->index = i;
        team[i]->spin_ns.store(crowded ? 0 : p.between_ns, std::memory_order_relaxed);
        const uint32_t next = team[i]->job.now() + 1, number = next == 0 ? 1 : next;
        team[i]->open.store(number, std::memory_order_release);
        team[i]->job.set_quietly(number);
    }
    wake_next(team, n, 0);
    work.run(work, 0);
    for (int i = 1; i < n; ++i) {
        if (work.may_miss && team[i]->open.exchange(0, std::memory_order_acq_rel) != 0) {
            continue;
        }
        // It has ended when that was the last job that it was given.
        for (uint32_t done = team[i]->done.now(); done != team[i]->job.now(); done = team[i]->done.now()) {
            team[i]->done.wait_while(done, work.spin_ns);
        }
    }
    p.busy.fetch_sub(n, std::memory_order_relaxed);
    dismiss(p, team, n);
}

}  // namespace pykv
