// Where a sequence's K, V and states lie, and what was done to them before they were stored.
//
// Nothing here changes anything but move_rows(), for who has the key. As in probe.h: the lock is held, ids are valid.
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
    const char * data;  // of stream 0, or of the sequence's own; null where there is none
    int32_t      type;
    bool         host;  // whether data may be read by the CPU
    bool         transposed;  // values of V with the cells innermost
    int64_t      n_head, head_dim;
    size_t       cell_stride, head_stride, value_stride;  // value_stride is a block's for block types
    const ggml_tensor * owner;  // the tensor that this is a part of, and from which byte on
    size_t              offset;
};

// A cell of a sequence, in order of position.
struct live_cell {
    llama_pos pos;
    uint32_t  cell;
};

// How keys are rotated: the parameters of ggml_rope_ext().
struct rope_facts {
    int32_t  type;     // LLAMA_ROPE_TYPE_*, -1 where the layer is not rotated
    int32_t  n_rot;    // dimensions that are rotated, from `offset` on
    int32_t  offset;
    int32_t  n_ctx_orig;
    float    freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
};

// How the model's graph rotates the keys of one layer. Where nothing could be read from it, `known` is
// false and the facts are those of the context's settings.
struct key_rope {
    bool                known = false;
    bool                joined = false;  // only a part of each head is rotated, and put beside the rest
    rope_facts          facts{-1};
    const ggml_tensor * factors = nullptr;
};

// Edges of the Hadamard matrices that keys and values of a part are multiplied by; 0: they are not. llama.cpp's caches
// say that of quantised ones, and several graphs do not do it: latent attention, most indexes.
struct hadamard_facts {
    int32_t keys, values;
};

bool                   has_part(const memory * m, memory_part part);
std::vector<uint32_t>  part_layers(const memory * m, memory_part part);  // layers of the model
std::vector<live_cell> part_cells(const memory * m, memory_part part, llama_seq_id seq);
bool                   in_window(const memory * m, llama_pos pos, llama_pos next);
hadamard_facts         part_hadamard(const memory * m, memory_part part);  // as the model's graph does it
hadamard_facts         hadamard_said(const memory * m, memory_part part);  // as the cache says it

// `which`: keys 0, values 1; of a recurrent part the two states, r 0 and s 1.
live_tensor tensor_at(const memory * m, memory_part part, uint32_t il, int which, llama_seq_id seq);

// What a tensor lies in, as ggml calls it.
std::string buffer_of(const live_tensor & t);

// Cells that lie side by side.
struct cell_run {
    uint32_t cell, n;
};
std::vector<cell_run> runs_of(const live_cell * cells, size_t n);
// Ask for the rows of cells, in their order; of transposed values one row per value. Returns the end of what is written.
uint8_t * add_rows(tensor_reads & reads, const live_tensor & t, const std::vector<cell_run> & runs, uint8_t * dst);
// The same for one tensor, at once. CAUGHT on failure.
int32_t read_rows(const memory * m, memory_part part, uint32_t il, int which, llama_seq_id seq,
                  const std::vector<live_cell> & cells, uint8_t * dst) noexcept;
// Where a cell's data goes.
struct cell_move {
    uint32_t from, to;
};

class edit_key;  // edit.h

// Copy the data of cells to other cells of the stream of `seq`, none of which is a source. Throws.
void move_rows(const edit_key & key, const memory * m, memory_part part, uint32_t il, int which, llama_seq_id seq,
               const std::vector<cell_move> & moves);
// Whether cells have more than a position: two more of M-RoPE, and the token. Three values per cell.
bool has_extended(const memory * m);
void read_extended(const memory * m, memory_part part, llama_seq_id seq, const std::vector<live_cell> & cells, int32_t * dst);

// Of a layer of part_layers(), not of the recurrent part.
bool               has_keys(const memory * m, uint32_t il);
const key_rope &   rope_at(const memory * m, uint32_t il);
std::vector<float> rope_factors(const key_rope & rope);
// For tests: what is read of a layer while the context's reserved graph stores copies of its sources,
// as a scheduler leaves it, or while every graph does.
key_rope rope_beside_copies(const llama_context * ctx, const memory * m, uint32_t il, bool everywhere);

// ggml's conversions between float32 and a stored type; `n` is whole blocks.
bool dequantize(ggml_type type, const void * src, float * dst, int64_t n) noexcept;
bool quantize(ggml_type type, const float * src, void * dst, int64_t n) noexcept;
// Bytes of n values of a type that is a whole number of blocks, or 0.
size_t bytes_of(int type, int64_t n);
// Values per block, or 0 for an unknown type.
int64_t block_of(int type);

}  // namespace pykv
