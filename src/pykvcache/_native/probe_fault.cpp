// What of a loaded model would end the process once it is used.
#include "probe_memory.h"

namespace pykv {

namespace {

// llama.cpp divides by the head size of an index that no layer writes to, and reads the indexer of a layer that has
// none. Where `same` is true its other caches are rotated as indexes are.
const char * compressed_fault(const llama_hparams & hparams, bool same) {
    uint32_t n_index = 0, n_heavy = 0;
    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        n_index += hparams.dsv4_compress_ratios[il] == 4;
        n_heavy += hparams.dsv4_compress_ratios[il] == 128;
    }
    if (n_index == 0) {
        return "no layer is compressed by 4 (attention.compress_ratios): none writes an index";
    }
    return same && n_heavy == 0 ? "no layer is compressed by 128 (attention.compress_ratios)" : nullptr;
}

const char * indexed_fault(const llama_hparams & hparams, bool windows, bool same) {
    uint32_t n_index = 0, n_swa = 0, n_blind = 0;
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        const bool full = hparams.is_indexer_full(il);
        n_index += full;
        n_swa += hparams.is_swa(il);
        n_blind += !full && !hparams.is_swa(il);
    }
    if (n_index == 0) {
        return "no layer has an indexer (attention.indexer.types)";
    }
    if (windows && n_blind > 0) {
        return "a layer that attends to everything has no indexer (attention.indexer.types)";
    }
    if (windows && same && (n_swa == 0 || n_swa == hparams.n_layer())) {
        return "all its layers have a window, or none has (attention.sliding_window_pattern)";
    }
    return nullptr;
}

const char * index_fault(const llama_model & model) {
    const auto & hparams = model.hparams;
    const bool   same    = hparams.n_embd_head_k_full == hparams.indexer_head_size;
    switch (model.arch) {
        case LLM_ARCH_DEEPSEEK4:
            return compressed_fault(hparams, same);
        case LLM_ARCH_DOTS3NOTE:
        case LLM_ARCH_GLM_DSA:
            return indexed_fault(hparams, model.arch == LLM_ARCH_DOTS3NOTE, same);
        default:
            return nullptr;
    }
}

}  // namespace

const char * model_fault(const llama_model & model) {
    const auto & hparams = model.hparams;
    if (model.arch == LLM_ARCH_T5 || model.arch == LLM_ARCH_T5ENCODER) {
        const auto & layer = model.layers.at(0);
        if (!layer.attn_rel_b_enc || (model.arch == LLM_ARCH_T5 && !layer.attn_rel_b)) {
            return "the position biases of its first layer are missing";
        }
    }
    if (model.arch == LLM_ARCH_AFMOE && hparams.swa_type == LLAMA_SWA_TYPE_NONE) {
        return "it has no window (attention.sliding_window), which its graph takes for granted";
    }
    if (hparams.n_deepstack_layers > 0 && hparams.n_deepstack_layers >= hparams.n_layer()) {
        return "its last layer adds a picture's embeddings (n_deepstack_layers), of more tokens than it computes";
    }
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if (hparams.rope_type != LLAMA_ROPE_TYPE_NONE && hparams.n_head(il) > 0 && hparams.n_rot(il) > hparams.n_embd_head_k(il)) {
            return "rope.dimension_count is larger than a head";
        }
    }
    return index_fault(model);
}

}  // namespace pykv
