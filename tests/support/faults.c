/* An allocator that fails on demand, to be preloaded: see faults.py.
 *
 * Counts what the compiled layer, llama.cpp inside it and the C++ library allocate, while it is armed, and
 * fails one of these (or one and all that follow). Python's own allocations go through. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static atomic_long counted, failed, first;
static atomic_int armed, onwards;
static uintptr_t ranges[8][2];
static int n_ranges;

static int find(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size, (void)data;
    const char *name = strrchr(info->dlpi_name, '/');
    name = name ? name + 1 : info->dlpi_name;
    if (strncmp(name, "lib.cpython", 11) != 0 && strncmp(name, "libstdc++", 9) != 0) return 0;
    for (int i = 0; i < info->dlpi_phnum && n_ranges < 8; i++) {
        const ElfW(Phdr) *h = &info->dlpi_phdr[i];
        if (h->p_type == PT_LOAD && (h->p_flags & PF_X)) {
            ranges[n_ranges][0] = info->dlpi_addr + h->p_vaddr;
            ranges[n_ranges++][1] = info->dlpi_addr + h->p_vaddr + h->p_memsz;
        }
    }
    return 0;
}

static int fails(void *caller) {
    if (!armed) return 0;
    uintptr_t at = (uintptr_t)caller;
    for (int i = 0; i < n_ranges; i++) {
        if (at >= ranges[i][0] && at < ranges[i][1]) {
            long n = ++counted;
            if (n == first || (onwards && n > first)) {
                failed++;
                errno = ENOMEM;
                return 1;
            }
            return 0;
        }
    }
    return 0;
}

#define CALLER __builtin_return_address(0)

/* Fail allocation number n, counted from 1; with more, all after it, too. */
void faults_arm(long n, int more) {
    if (n_ranges == 0) dl_iterate_phdr(find, NULL);
    counted = failed = 0;
    first = n;
    onwards = more;
    armed = 1;
}

/* How many failed. */
long faults_disarm(void) {
    armed = 0;
    return failed;
}

long faults_counted(void) { return counted; }

void *malloc(size_t n) { return fails(CALLER) ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return fails(CALLER) ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return fails(CALLER) ? NULL : __libc_realloc(p, n); }
void *memalign(size_t to, size_t n) { return fails(CALLER) ? NULL : __libc_memalign(to, n); }
void *aligned_alloc(size_t to, size_t n) { return fails(CALLER) ? NULL : __libc_memalign(to, n); }

int posix_memalign(void **out, size_t to, size_t n) {
    if (fails(CALLER)) return ENOMEM;
    void *p = __libc_memalign(to, n);
    if (!p) return ENOMEM;
    *out = p;
    return 0;
}

void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset) {
    static void *(*next)(void *, size_t, int, int, int, off_t);
    if (fails(CALLER)) return MAP_FAILED;
    if (!next) next = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    return next(at, n, prot, flags, fd, offset);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *data) {
    static int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (fails(CALLER)) return EAGAIN;
    if (!next) {
        next = (int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))dlsym(
            RTLD_NEXT, "pthread_create");
    }
    return next(thread, attributes, run, data);
}
