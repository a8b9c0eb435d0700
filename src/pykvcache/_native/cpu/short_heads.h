/* Put in front of ggml's ops.cpp by the build (cmake/LlamaCpp.cmake): attention of heads that are no multiple
 * of ggml's step.
 *
 * ggml adds V up in steps of four vectors, and what is left of a row one number at a time: of a head of 64 on a
 * processor with AVX512-FP16 (a step of 128) that is everything, four times slower. A step of one vector adds
 * the same numbers in the same order. The step is used by ggml_vec_mad_f16 and ggml_vec_scale_f16 alone, which
 * keep no sums from one vector to the next. */
#pragma once

#include "simd-mappings.h"

#if (defined(__AVX__) || defined(__AVX512F__)) && defined(GGML_F16_STEP) && defined(GGML_F16_EPR)
#undef GGML_F16_STEP
#define GGML_F16_STEP GGML_F16_EPR
#endif
