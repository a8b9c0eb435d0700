/* Put in front of five of ggml's files by the build (cmake/LlamaCpp.cmake): what they do not check when the
 * system is out of memory.
 *
 * An allocation that they use unseen throws std::bad_alloc, which a guard catches (guarded.h). What was freed
 * is NULL, because the replacement may be the allocation that throws, and the owner is freed later. In programs
 * without guarded.cpp nothing changes. */
#pragma once

#include <stdlib.h>
#include <string.h>

#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml.h"

#ifdef __cplusplus
#include <algorithm>
#include <new>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>
extern "C" {
#endif

__attribute__((weak)) void pykv_no_memory(void);
__attribute__((weak)) void pykv_memory_refused(void);
__attribute__((weak)) ggml_backend_buffer_t pykv_alloc_buffer(ggml_backend_buffer_type_t type, size_t size);

static inline void * pykv_needed(void * memory) {
    if (!memory && pykv_no_memory) {
        pykv_no_memory();
    }
    return memory;
}

static inline int pykv_noted(int refused) {
    if (refused && pykv_memory_refused) {
        pykv_memory_refused();
    }
    return refused;
}

#ifdef __cplusplus
}
#endif

#if defined(PYKVCACHE_GGML)
#include "operands.h"
/* Looked at, but some answer with an assertion. */
#define posix_memalign(out, alignment, size) pykv_noted(posix_memalign(out, alignment, size))
#endif

#if defined(PYKVCACHE_GGML) || defined(PYKVCACHE_GGML_ALLOC) || defined(PYKVCACHE_GGML_BACKEND)
#define malloc(size) pykv_needed(malloc(size))
#define realloc(memory, size) pykv_needed(realloc(memory, size))
#endif

#if defined(PYKVCACHE_GGML) || defined(PYKVCACHE_GGML_BACKEND)
#define calloc(n, size) pykv_needed(calloc(n, size))
#endif

#if defined(PYKVCACHE_GGML_ALLOC)
/* This one's caller has freed what it replaces, and takes NULL for an answer. */
#define calloc(n, size) (strcmp(__func__, "ggml_vbuffer_alloc") == 0 ? calloc(n, size) : pykv_needed(calloc(n, size)))
#define ggml_backend_buft_alloc_buffer(type, size) \
    (pykv_alloc_buffer ? pykv_alloc_buffer(type, size) : ggml_backend_buft_alloc_buffer(type, size))
#endif

#if defined(PYKVCACHE_GGML_ALLOC)
#define free(memory) (free(memory), (memory) = NULL)
#endif

#if defined(PYKVCACHE_GGML_ALLOC) || defined(PYKVCACHE_GGML_BACKEND)
#define ggml_hash_set_free(set) (ggml_hash_set_free(set), memset(set, 0, sizeof(*(set))))
#endif

#if defined(PYKVCACHE_GGML_BACKEND)
#define ggml_free(ctx) (ggml_free(ctx), (ctx) = NULL)
#endif

#if defined(PYKVCACHE_GGML_CPU)
#define ggml_aligned_malloc(size) pykv_needed(ggml_aligned_malloc(size))
#endif

#if defined(PYKVCACHE_GGML_CPU_CPP)
#include "ggml-cpu.h"
#include "repack.h"
#include "traits.h"
/* It compares with NULL what it makes. */
#define new new (std::nothrow)
#endif
