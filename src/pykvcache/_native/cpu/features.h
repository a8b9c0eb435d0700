/* Processor features that a compiler may use: name, the compiler's macro for it, and where to detect it (on x86 a
 * CPUID register and the registers that the system must save; on ARM an entry of the system's list). */
#pragma once

#define PYKV_CPU_TEXT 40 /* the longest macro's name fits */

#if defined(__x86_64__) || defined(_M_X64)

/* clang-format off */
#define PYKV_CPU_FEATURES(X) \
    X("sse3", __SSE3__, LEAF_1_C, 0, 0) \
    X("ssse3", __SSSE3__, LEAF_1_C, 9, 0) \
    X("sse4_1", __SSE4_1__, LEAF_1_C, 19, 0) \
    X("sse4_2", __SSE4_2__, LEAF_1_C, 20, 0) \
    X("movbe", __MOVBE__, LEAF_1_C, 22, 0) \
    X("popcnt", __POPCNT__, LEAF_1_C, 23, 0) \
    X("avx", __AVX__, LEAF_1_C, 28, AVX) \
    X("f16c", __F16C__, LEAF_1_C, 29, AVX) \
    X("fma", __FMA__, LEAF_1_C, 12, AVX) \
    X("lzcnt", __LZCNT__, LEAF_AMD_C, 5, 0) \
    X("sse4a", __SSE4A__, LEAF_AMD_C, 6, 0) \
    X("xop", __XOP__, LEAF_AMD_C, 11, AVX) \
    X("fma4", __FMA4__, LEAF_AMD_C, 16, AVX) \
    X("tbm", __TBM__, LEAF_AMD_C, 21, 0) \
    X("bmi1", __BMI__, LEAF_7_B, 3, 0) \
    X("avx2", __AVX2__, LEAF_7_B, 5, AVX) \
    X("bmi2", __BMI2__, LEAF_7_B, 8, 0) \
    X("adx", __ADX__, LEAF_7_B, 19, 0) \
    X("avx512f", __AVX512F__, LEAF_7_B, 16, AVX512) \
    X("avx512dq", __AVX512DQ__, LEAF_7_B, 17, AVX512) \
    X("avx512ifma", __AVX512IFMA__, LEAF_7_B, 21, AVX512) \
    X("avx512cd", __AVX512CD__, LEAF_7_B, 28, AVX512) \
    X("avx512bw", __AVX512BW__, LEAF_7_B, 30, AVX512) \
    X("avx512vl", __AVX512VL__, LEAF_7_B, 31, AVX512) \
    X("avx512vbmi", __AVX512VBMI__, LEAF_7_C, 1, AVX512) \
    X("avx512_vbmi2", __AVX512VBMI2__, LEAF_7_C, 6, AVX512) \
    X("gfni", __GFNI__, LEAF_7_C, 8, 0) \
    X("vaes", __VAES__, LEAF_7_C, 9, AVX) \
    X("vpclmulqdq", __VPCLMULQDQ__, LEAF_7_C, 10, AVX) \
    X("avx512_vnni", __AVX512VNNI__, LEAF_7_C, 11, AVX512) \
    X("avx512_bitalg", __AVX512BITALG__, LEAF_7_C, 12, AVX512) \
    X("avx512_vpopcntdq", __AVX512VPOPCNTDQ__, LEAF_7_C, 14, AVX512) \
    X("avx512_vp2intersect", __AVX512VP2INTERSECT__, LEAF_7_D, 8, AVX512) \
    X("avx512_fp16", __AVX512FP16__, LEAF_7_D, 23, AVX512) \
    X("amx_bf16", __AMX_BF16__, LEAF_7_D, 22, AMX) \
    X("amx_tile", __AMX_TILE__, LEAF_7_D, 24, AMX) \
    X("amx_int8", __AMX_INT8__, LEAF_7_D, 25, AMX) \
    X("avx_vnni", __AVXVNNI__, LEAF_7_1_A, 4, AVX) \
    X("avx512_bf16", __AVX512BF16__, LEAF_7_1_A, 5, AVX512) \
    X("avx_ifma", __AVXIFMA__, LEAF_7_1_A, 23, AVX) \
    X("avx_vnni_int8", __AVXVNNIINT8__, LEAF_7_1_D, 4, AVX) \
    X("avx_ne_convert", __AVXNECONVERT__, LEAF_7_1_D, 5, AVX)

#elif defined(__aarch64__) && defined(__linux__)

#define PYKV_CPU_FEATURES(X) \
    X("atomics", __ARM_FEATURE_ATOMICS, HWCAP_1, 8, 0) \
    X("asimdhp", __ARM_FEATURE_FP16_VECTOR_ARITHMETIC, HWCAP_1, 10, 0) \
    X("asimddp", __ARM_FEATURE_DOTPROD, HWCAP_1, 20, 0) \
    X("sve", __ARM_FEATURE_SVE, HWCAP_1, 22, 0) \
    X("sve2", __ARM_FEATURE_SVE2, HWCAP_2, 1, 0) \
    X("i8mm", __ARM_FEATURE_MATMUL_INT8, HWCAP_2, 13, 0) \
    X("bf16", __ARM_FEATURE_BF16, HWCAP_2, 14, 0) \
    X("sme", __ARM_FEATURE_SME, HWCAP_2, 23, 0)

#elif defined(__aarch64__) && defined(__APPLE__)

#define PYKV_CPU_FEATURES(X) \
    X("FEAT_DotProd", __ARM_FEATURE_DOTPROD, "hw.optional.arm.FEAT_DotProd", 0, 0) \
    X("FEAT_I8MM", __ARM_FEATURE_MATMUL_INT8, "hw.optional.arm.FEAT_I8MM", 0, 0) \
    X("FEAT_BF16", __ARM_FEATURE_BF16, "hw.optional.arm.FEAT_BF16", 0, 0) \
    X("FEAT_SME", __ARM_FEATURE_SME, "hw.optional.arm.FEAT_SME", 0, 0)

#else

/* Not detected: the build is assumed to run on the machine that made it. */
#define PYKV_CPU_FEATURES(X) X("", PYKV_NO_SUCH_MACRO, 0, 0, 0)

#endif
/* clang-format on */
