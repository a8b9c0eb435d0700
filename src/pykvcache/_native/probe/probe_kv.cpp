// The live tensors of a memory, in llama.cpp's layout.
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-cpp.h"
#include "guarded.h"
#include "probe_kv.h"
#include "probe_memory.h"
#include "transfers.h"

namespace pykv {

namespace {

// Holds descriptors of views, no data.
class scratch {
  public:
    ggml_context * get() const { return ctx.get(); }

  private:
    std::vector<char> room = std::vector<char>(4 * ggml_tensor_overhead());
    ggml_context_ptr  ctx{ggml_init({room.size(), room.data(), true})};
};

// K or V of the stream of a sequence: (value, head, cell), or (cell, head, value) where it is transposed.
const ggml_tensor * stream_tensor(ggml_context * ctx, const llama_kv_cache * cache, uint32_t il, int which,
                                  llama_seq_id seq) {
    llama_kv_cache::slot_info where;
    where.s0 = where.s1 = stream_of(*cache, seq);
    ggml_tensor * t = which == 0 ? cache->get_k(ctx, int32_t(il), cache->get_size(), where)
                                 : cache->get_v(ctx, int32_t(il), cache->get_size(), where);
    // A view outside a graph has no buffer, which some backends require.
    t->buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return t;
}

live_tensor located(const ggml_tensor * t) {
    live_tensor live{};
    live.data = static_cast<const char *>(t->data);
    live.owner = t->view_src ? t->view_src : t;
    live.offset = t->view_src ? t->view_offs : 0;
    live.type = t->type;
    live.host = is_host(t);
    return live;
}

live_tensor attention_tensor(const memory * m, memory_part part, uint32_t il, int which, llama_seq_id seq) {
    if (which == 1 && hparams_of(m, part).is_mla()) {
        return {};
    }
    const scratch ctx;
    const ggml_tensor * t = stream_tensor(ctx.get(), cache_of(m, part), il, which, seq);
    const bool transposed = which == 1 && t->nb[1] > t->nb[2];
    live_tensor live = located(t);
    live.transposed = transposed;
    live.n_head = t->ne[1];
    live.head_dim = transposed ? t->ne[2] : t->ne[0];
    live.cell_stride = transposed ? t->nb[0] : t->nb[2];
    live.head_stride = t->nb[1];
    live.value_stride = transposed ? t->nb[2] : t->nb[0];
    return live;
}

live_tensor state_tensor(const memory * m, uint32_t il, int which) {
    const ggml_tensor * t = which == 0 ? m->recurrent->r_l[il] : m->recurrent->s_l[il];
    if (!t) {
        return {};
    }
    live_tensor live = located(t);
    live.n_head = 1;
    live.head_dim = which == 0 ? m->hparams->n_embd_r() : m->hparams->n_embd_s();
    live.value_stride = ggml_type_size(t->type);
    live.head_stride = live.cell_stride = ggml_row_size(t->type, live.head_dim);
    return live;
}

}  // namespace

bool has_part(const memory * m, memory_part part) {
    return part == PART_RECURRENT ? m->recurrent != nullptr : cache_of(m, part) != nullptr;
}

std::vector<uint32_t> part_layers(const memory * m, memory_part part) {
    if (part != PART_RECURRENT) {
        const auto * cache = cache_of(m, part);
        return cache ? cache->get_layer_ids() : std::vector<uint32_t>{};
    }
    std::vector<uint32_t> layers;
    for (uint32_t il = 0; m->recurrent && il < m->recurrent->r_l.size(); ++il) {
        if (m->recurrent->r_l[il] || m->recurrent->s_l[il]) {
            layers.push_back(il);
        }
    }
    return layers;
}

std::vector<live_cell> part_cells(const memory * m, memory_part part, llama_seq_id seq) {
    std::vector<live_cell> result;
    if (part == PART_RECURRENT) {
        // As in llama_memory_recurrent::state_write: a pending copy refers to its source.
        for (uint32_t i = 0; m->recurrent && i < m->recurrent->size; ++i) {
            const auto & cell = m->recurrent->cells[i];
            if (cell.has_seq_id(seq)) {
                const uint32_t plane = m->recurrent->n_rs_seq ? m->recurrent->rs_idx[seq] : 0;
                result.push_back({cell.pos, plane * m->recurrent->size + (cell.src >= 0 ? uint32_t(cell.src) : i)});
            }
        }
        return result;
    }
    const auto * cache = cache_of(m, part);
    if (!cache) {
        return result;
    }
    const auto & cells = cache->get_cells(seq);
    // Cells outside the window do not count, even if they still exist.
    const llama_pos first = part == PART_WINDOW ? window_start(m, cells.seq_pos_max(seq)) : 0;
    for (const auto & [pos, cell] : held_cells(cells, seq)) {
        if (pos >= first) {
            result.push_back({pos, cell});
        }
    }
    return result;
}

hadamard_facts part_hadamard(const memory * m, memory_part part) {
    const auto found = m->turned.find(part);
    return found == m->turned.end() ? hadamard_facts{0, 0} : found->second;
}

hadamard_facts hadamard_said(const memory * m, memory_part part) {
    const assertions_throw scope;
    const auto * cache = part == PART_RECURRENT ? nullptr : cache_of(m, part);
    if (!cache) {
        return {0, 0};
    }
    const scratch ctx;
    const ggml_tensor * k = cache->build_input_k_rot(ctx.get());
    const ggml_tensor * v = cache->build_input_v_rot(ctx.get());
    return {k ? int32_t(k->ne[0]) : 0, v ? int32_t(v->ne[0]) : 0};
}

live_tensor tensor_at(const memory * m, memory_part part, uint32_t il, int which, llama_seq_id seq) {
    const assertions_throw scope;
    return part == PART_RECURRENT ? state_tensor(m, il, which)
                                  : attention_tensor(m, part, il, which, seq);
}

std::string buffer_of(const live_tensor & t) { return ggml_backend_buffer_name(t.owner->buffer); }

int32_t read_rows(const memory * m, memory_part part, uint32_t il, int which, llama_seq_id seq,
                  const std::vector<live_cell> & cells, uint8_t * dst) noexcept {
    return guarded_void([&] {
        tensor_reads reads;
        add_rows(reads, tensor_at(m, part, il, which, seq), runs_of(cells.data(), cells.size()), dst);
        reads.run();
    });
}

bool has_extended(const memory * m) { return m->base && m->base->has_cell_ext(); }

void read_extended(const memory * m, memory_part part, llama_seq_id seq, const std::vector<live_cell> & cells, int32_t * dst) {
    const assertions_throw scope;
    const auto & held = cache_of(m, part)->get_cells(seq);
    for (const auto & cell : cells) {
        const auto ext = held.ext_get(cell.cell);
        *dst++ = ext.x;
        *dst++ = ext.y;
        *dst++ = ext.tok;
    }
}

int64_t block_of(int type) {
    return type < 0 || type >= GGML_TYPE_COUNT ? 0 : ggml_blck_size(ggml_type(type));
}

size_t bytes_of(int type, int64_t n) {
    const int64_t block = block_of(type);
    return block == 0 || n < 0 || n % block != 0 ? 0 : size_t(n / block) * ggml_type_size(ggml_type(type));
}

bool dequantize(ggml_type type, const void * src, float * dst, int64_t n) noexcept {
    return guarded<bool>(false, [&] {
        const auto convert = ggml_get_type_traits(type)->to_float;
        if (convert) {
            convert(src, dst, n);
        }
        return convert != nullptr;
    });
}

bool quantize(ggml_type type, const float * src, void * dst, int64_t n) noexcept {
    return guarded<bool>(false, [&] {
        ggml_cpu_init();  // tables, once
        // The conversion that ggml_set_rows uses to store K and V.
        const auto convert = ggml_get_type_traits_cpu(type)->from_float;
        if (convert) {
            convert(src, dst, n);
        }
        return convert != nullptr;
    });
}

}  // namespace pykv
