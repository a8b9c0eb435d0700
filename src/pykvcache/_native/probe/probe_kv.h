// Locations of a sequence's K, V and states, and the transformations applied before storing.
//
// As in probe.h, the lock is held and ids are valid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "probe.h"
#include "transfers.h"

namespace pykv {

// A tensor of a part, seen as (cells, heads, values) with strides in bytes.
struct live_tensor {
    const char * data;  // of stream 0 or of the sequence's stream; null if there is none
    int32_t      type;
    bool         host;  // whether the CPU can read data
    bool         transposed;  // values of V with the cells innermost
    int64_t      n_head, head_dim;
    size_t       cell_stride, head_stride, value_stride;  // value_stride is a block's for block types
    const ggml_tensor * owner;  // the tensor that contains this, at byte `offset`
    size_t              offset;
};

// A cell of a sequence, in order of position.
struct live_cell {
    llama_pos pos;
    uint32_t  cell;
};

// How keys are rotated: the parameters of ggml_rope_ext().
struct rope_facts {
    int32_t  type;     // LLAMA_ROPE_TYPE_*, -1 if the layer is not rotated
    int32_t  n_rot;    // rotated dimensions, starting at `offset`
    int32_t  offset;
    int32_t  n_ctx_orig;
    float    freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
};

// How the model's graph rotates the keys of one layer. If the graph could not be read, `known` is false
// and the facts are the context's settings.
struct key_rope {
    bool                known = false;
    bool                joined = false;  // only a part of each head is rotated, then concatenated with the rest
    rope_facts          facts{-1};
    const ggml_tensor * factors = nullptr;
};

// Sizes of the Hadamard matrices applied to keys and values of a part; 0 for none. llama.cpp's caches report sizes for
// quantised types even if the graph does not apply them: latent attention, most indexes.
struct hadamard_facts {
    int32_t keys, values;
};

bool                   has_part(const memory * m, memory_part part);
std::vector<uint32_t>  part_layers(const memory * m, memory_part part);  // layers of the model
std::vector<live_cell> part_cells(const memory * m, memory_part part, llama_seq_id seq);
hadamard_facts         part_hadamard(const memory * m, memory_part part);  // as applied by the model's graph
hadamard_facts         hadamard_said(const memory * m, memory_part part);  // as reported by the cache

// `which`: 0 keys, 1 values; in a recurrent part 0 is r, 1 is s.
live_tensor tensor_at(const memory * m, memory_part part, uint32_t il, int which, llama_seq_id seq);

// ggml's name of a tensor's buffer type.
std::string buffer_of(const live_tensor & t);

// Contiguous cells.
struct cell_run {
    uint32_t cell, n;
};
inline uint32_t number_of(uint32_t cell) { return cell; }
inline uint32_t number_of(const live_cell & cell) { return cell.cell; }
template <class Cell> std::vector<cell_run> runs_of(const Cell * cells, size_t n) {
    std::vector<cell_run> runs;
    for (size_t i = 0; i < n; ++i) {
        const uint32_t cell = number_of(cells[i]);
        if (i > 0 && cell == runs.back().cell + runs.back().n) {
            ++runs.back().n;
        } else {
            runs.push_back({cell, 1});
        }
    }
    return runs;
}
// Call use(offset, bytes) for each run of cells' rows in a tensor, in a state's order: of transposed values one row per
// value.
template <class F> void each_run(const live_tensor & t, const std::vector<cell_run> & runs, F && use) {
    const int64_t n_head = t.transposed ? t.n_head : 1, n_value = t.transposed ? t.head_dim : 1;
    for (int64_t head = 0; head < n_head; ++head) {
        for (int64_t value = 0; value < n_value; ++value) {
            const size_t start = size_t(head) * t.head_stride + size_t(value) * t.value_stride;
            for (const auto & [cell, n] : runs) {
                use(start + cell * t.cell_stride, n * t.cell_stride);
            }
        }
    }
}
// Queue copies of cells' rows from or to a tensor.
template <class Copies, class Bytes>
void add_rows(Copies & copies, const live_tensor & t, const std::vector<cell_run> & runs, Bytes bytes) {
    each_run(t, runs, [&](size_t at, size_t n) {
        copies.add(t.owner, t.offset + at, n, bytes);
        bytes += n;
    });
}
// Read one tensor immediately. CAUGHT on failure.
int32_t read_rows(const memory * m, memory_part part, uint32_t il, int which, llama_seq_id seq,
                  const std::vector<live_cell> & cells, uint8_t * dst) noexcept;
// Whether cells have an extension: two more M-RoPE positions and the token, three values per cell.
bool has_extended(const memory * m);
void read_extended(const memory * m, memory_part part, llama_seq_id seq, const std::vector<live_cell> & cells, int32_t * dst);

// For layers of part_layers(), except of the recurrent part.
bool               has_keys(const memory * m, uint32_t il);
const key_rope &   rope_at(const memory * m, uint32_t il);
std::vector<float> rope_factors(const key_rope & rope);

// ggml's conversions between float32 and a stored type; `n` is whole blocks.
bool dequantize(ggml_type type, const void * src, float * dst, int64_t n) noexcept;
bool quantize(ggml_type type, const float * src, void * dst, int64_t n) noexcept;
// Bytes of n values of a type; 0 if n is not a multiple of the block size.
size_t bytes_of(int type, int64_t n);
// Values per block, or 0 for an unknown type.
int64_t block_of(int type);

}  // namespace pykv
