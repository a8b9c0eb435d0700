/* Included before ggml's ops.cpp (cmake/LlamaCpp.cmake): faster attention of short heads with AVX512-FP16.
 *
 * ggml accumulates V in steps of four vectors and the rest of a row in scalar code. With AVX512-FP16 a step is 128
  * numbers, so heads of 64 use scalar code only, four times slower. Here a step is one vector (32 numbers). That is
  * safe because with AVX512-FP16 only ggml_vec_mad_f16 and ggml_vec_scale_f16 use the step, which keep no sums across
  * vectors. Other instruction sets do keep such sums and stay unchanged. */
#pragma once

#include "simd-mappings.h"

#if defined(__AVX512FP16__) && defined(GGML_F16_STEP) && defined(GGML_F16_EPR)
#undef GGML_F16_STEP
#define GGML_F16_STEP GGML_F16_EPR
#endif
