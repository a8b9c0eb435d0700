/* Products of matrices in f16 with AVX-512, for prompts: compiled into ggml's CPU code by the build.
 *
 * ggml's own way (llamafile_sgemm) turns both sides into f32 anew for every four by six results, and adds up the
 * sixteen lanes of each result by itself. Here both sides are turned once for a block of results, and the lanes of
 * sixteen results are added up together. Each sum has the same products in the same order: the results are ggml's,
 * bit by bit. What is not taken here goes to llamafile_sgemm. */
#define PYKVCACHE_HALF_MATRICES
#include "half_matrices.h"

#if defined(GGML_USE_LLAMAFILE)

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include <immintrin.h>

#include <algorithm>
#include <memory>
#include <new>

#include "ggml-cpu-impl.h"

namespace {

constexpr int ROWS = 4;     // of A in a tile
constexpr int COLUMNS = 6;  // rows of B in a tile: 24 sums, and what they need fits into 32 registers
constexpr int BLOCK = 32;   // rows of A that are in f32 at once
constexpr int WIDTH = 126;  // rows of B in a piece of work
constexpr int DEPTH = 640;  // of their numbers at once
constexpr int FEW = 24;     // with fewer rows of B turning A does not pay
constexpr int LANES = 16;
constexpr int TILE = ROWS * COLUMNS * LANES;

using half = ggml_fp16_t;

inline __m512 load(const float * p) {
    return _mm512_loadu_ps(p);
}

inline __m512 load(const half * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

void widen(float * to, const half * from, int64_t k) {
    for (int64_t l = 0; l < k; l += 16) {
        _mm512_store_ps(to + l, load(from + l));
    }
}

// The order of _mm512_reduce_add_ps: lanes 8 apart, then 4, 2 and 1.
inline __m512 add_by_8(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}

inline __m512 add_by_4(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

inline __m512 add_by_2(__m512 a, __m512 b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

inline __m512 add_by_1(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

// Four rows of A times N rows of B. What was added up before is in kept, and what is added up if it is not the last.
template <int N, typename T>
void tile(int64_t k, const T * a, int64_t lda, const T * b, int64_t ldb, float * kept, bool first, bool last, float * c, int64_t ldc) {
    __m512 sums[N][ROWS];
    for (int j = 0; j < N; ++j) {
        for (int i = 0; i < ROWS; ++i) {
            sums[j][i] = first ? _mm512_setzero_ps() : _mm512_load_ps(kept + (j * ROWS + i) * LANES);
        }
    }
    for (int64_t l = 0; l < k; l += LANES) {
        __m512 as[ROWS];
        for (int i = 0; i < ROWS; ++i) {
            as[i] = load(a + lda * i + l);
        }
        for (int j = 0; j < N; ++j) {
            const __m512 row = load(b + ldb * j + l);
            for (int i = 0; i < ROWS; ++i) {
                sums[j][i] = _mm512_fmadd_ps(as[i], row, sums[j][i]);
            }
        }
    }
    if (!last) {
        for (int j = 0; j < N; ++j) {
            for (int i = 0; i < ROWS; ++i) {
                _mm512_store_ps(kept + (j * ROWS + i) * LANES, sums[j][i]);
            }
        }
        return;
    }
    const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int at = 0; at < N; at += 4) {
        __m512 by_2[2];
        for (int pair = 0; pair < 2; ++pair) {
            __m512 fours[2];
            for (int one = 0; one < 2; ++one) {
                const auto & s = sums[std::min(at + 2 * pair + one, N - 1)];
                fours[one] = add_by_4(add_by_8(s[0], s[1]), add_by_8(s[2], s[3]));
            }
            by_2[pair] = add_by_2(fours[0], fours[1]);
        }
        const __m512 sixteen = _mm512_permutexvar_ps(turn, add_by_1(by_2[0], by_2[1]));
        float * to = c + ldc * at;
        _mm_storeu_ps(to, _mm512_castps512_ps128(sixteen));
        if (at + 1 < N) {
            _mm_storeu_ps(to + ldc, _mm512_extractf32x4_ps(sixteen, 1));
        }
        if (at + 2 < N) {
            _mm_storeu_ps(to + 2 * ldc, _mm512_extractf32x4_ps(sixteen, 2));
        }
        if (at + 3 < N) {
            _mm_storeu_ps(to + 3 * ldc, _mm512_extractf32x4_ps(sixteen, 3));
        }
    }
}

// The same for `rows` rows of A and `count` of B.
template <typename T>
void tiles(int count, int64_t rows, int64_t k, const T * a, int64_t lda, const T * b, int64_t ldb, float * kept, bool first,
           bool last, float * c, int64_t ldc) {
    for (int64_t i = 0; i < rows; i += ROWS, a += ROWS * lda, c += ROWS) {
        float * sums = first && last ? nullptr : kept + i / ROWS * TILE;
        switch (count) {
            case 1: tile<1>(k, a, lda, b, ldb, sums, first, last, c, ldc); break;
            case 2: tile<2>(k, a, lda, b, ldb, sums, first, last, c, ldc); break;
            case 3: tile<3>(k, a, lda, b, ldb, sums, first, last, c, ldc); break;
            case 4: tile<4>(k, a, lda, b, ldb, sums, first, last, c, ldc); break;
            case 5: tile<5>(k, a, lda, b, ldb, sums, first, last, c, ldc); break;
            default: tile<COLUMNS>(k, a, lda, b, ldb, sums, first, last, c, ldc);
        }
    }
}

// Where numbers are turned into f32, and where unfinished sums wait.
struct scratch {
    std::unique_ptr<float[]> memory;
    float * a = nullptr;
    float * b = nullptr;
    float * kept = nullptr;

    // Where memory is short there is none: numbers are then turned where they are used, as ggml does.
    scratch(int64_t depth, bool keeps) {
        const int64_t wide = (BLOCK + COLUMNS) * depth, sums = keeps ? WIDTH / COLUMNS * (BLOCK / ROWS) * TILE : 0;
        memory.reset(new (std::nothrow) float[wide + sums + LANES]);
        if (memory) {
            a = reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t(63));
            b = a + BLOCK * depth;
            kept = b + COLUMNS * depth;
        }
    }
};

struct product {
    int64_t m, n, k;
    const half * A;
    int64_t lda;
    const half * B;
    int64_t ldb;
    float * C;
    int64_t ldc;

    // Block `x` of the rows of A times stretch `y` of the rows of B, `depth` numbers at once.
    void piece(int64_t x, int64_t y, int64_t depth, const scratch & room) const {
        const int64_t row = x * BLOCK, rows = std::min<int64_t>(BLOCK, m - row);
        const int64_t begin = y * WIDTH, end = std::min<int64_t>(begin + WIDTH, n);
        for (int64_t l = 0; l < k; l += depth) {
            const int64_t length = std::min(depth, k - l);
            const bool first = l == 0, last = l + length == k;
            for (int64_t i = 0; i < rows; ++i) {
                widen(room.a + i * length, A + (row + i) * lda + l, length);
            }
            for (int64_t j = begin; j < end; j += COLUMNS) {
                const int count = int(std::min<int64_t>(COLUMNS, end - j));
                for (int i = 0; i < count; ++i) {
                    widen(room.b + i * length, B + (j + i) * ldb + l, length);
                }
                float * kept = room.kept + (j - begin) / COLUMNS * (BLOCK / ROWS) * TILE;
                tiles(count, rows, length, room.a, length, room.b, length, kept, first, last, C + j * ldc + row, ldc);
            }
        }
    }

    // The same without room for anything.
    void piece(int64_t x, int64_t y) const {
        const int64_t row = x * BLOCK, rows = std::min<int64_t>(BLOCK, m - row);
        const int64_t begin = y * WIDTH, end = std::min<int64_t>(begin + WIDTH, n);
        for (int64_t j = begin; j < end; j += COLUMNS) {
            const int count = int(std::min<int64_t>(COLUMNS, end - j));
            tiles(count, rows, k, A + row * lda, lda, B + j * ldb, ldb, nullptr, true, true, C + j * ldc + row, ldc);
        }
    }

    // Each thread comes here; the work is handed out, and the barriers are placed, as in llamafile_sgemm.
    void compute(const ggml_compute_params * params) const {
        const int64_t steps = (k + DEPTH - 1) / DEPTH;
        const int64_t depth = (k / LANES + steps - 1) / steps * LANES;
        const scratch room(depth, depth < k);
        const int64_t blocks = (m + BLOCK - 1) / BLOCK;
        const int64_t pieces = blocks * ((n + WIDTH - 1) / WIDTH);
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);
        for (int64_t at = params->ith; at < pieces; at = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            if (room.memory) {
                piece(at % blocks, at / blocks, depth, room);
            } else {
                piece(at % blocks, at / blocks);
            }
        }
        ggml_barrier(params->threadpool);
    }
};

}  // namespace
#endif

extern "C" bool pykv_sgemm(const ggml_compute_params * params, int64_t m, int64_t n, int64_t k, const void * A, int64_t lda,
                           const void * B, int64_t ldb, void * C, int64_t ldc, int type_a, int type_b, int type_c) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    if (type_a == GGML_TYPE_F16 && type_b == GGML_TYPE_F16 && type_c == GGML_TYPE_F32 && n >= FEW && k >= LANES &&
        k % LANES == 0 && m % ROWS == 0) {
        product{m, n, k, static_cast<const half *>(A), lda, static_cast<const half *>(B), ldb, static_cast<float *>(C), ldc}
            .compute(params);
        return true;
    }
#endif
    return llamafile_sgemm(params, m, n, k, A, lda, B, ldb, C, ldc, type_a, type_b, type_c);
}

#endif
