/* Put in front of ggml's ops.cpp by the build (cmake/LlamaCpp.cmake): attention of short heads with AVX512-FP16.
 *
 * ggml adds V up in steps of four vectors, and what is left of a row one number at a time. With AVX512-FP16 a
 * step is 128 numbers: of a head of 64 that left everything, four times slower. Here a step is one vector, 32.
 * With AVX512-FP16 the step serves ggml_vec_mad_f16 and ggml_vec_scale_f16 alone, which keep no sums from one
 * vector to the next. Elsewhere sums of several vectors depend on it, too: nothing is changed there. */
#pragma once

#include "simd-mappings.h"

#if defined(__AVX512FP16__) && defined(GGML_F16_STEP) && defined(GGML_F16_EPR)
#undef GGML_F16_STEP
#define GGML_F16_STEP GGML_F16_EPR
#endif
