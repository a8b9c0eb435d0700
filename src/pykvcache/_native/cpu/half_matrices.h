/* Put in front of ggml's ggml-cpu.c by the build (cmake/LlamaCpp.cmake): where it multiplies matrices by
 * llamafile_sgemm, half_matrices.cpp is asked first. */
#pragma once

#if defined(GGML_USE_LLAMAFILE)
#include <stdbool.h>
#include <stdint.h>

#include "ggml.h"
struct ggml_compute_params;
#include "llamafile/sgemm.h"

#ifdef __cplusplus
extern "C" {
#endif
bool pykv_sgemm(const struct ggml_compute_params * params, int64_t m, int64_t n, int64_t k, const void * A, int64_t lda,
                const void * B, int64_t ldb, void * C, int64_t ldc, int type_a, int type_b, int type_c);
#ifdef __cplusplus
}
#endif

#if !defined(PYKVCACHE_HALF_MATRICES)
#define llamafile_sgemm pykv_sgemm
#endif
#endif
