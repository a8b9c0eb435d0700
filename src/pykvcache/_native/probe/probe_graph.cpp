// Finds in a model's graph what llama.cpp or ggml would compute or read wrong.
#include <algorithm>
#include <cstring>

#include "probe_memory.h"

namespace pykv {

namespace {

// llama.cpp copies the first n_outputs rows of the logits, so the graph must select the output rows.
bool picks_outputs(const llm_graph_result & result) {
    return !result.get_logits() || std::any_of(result.inputs.begin(), result.inputs.end(), [](const auto & input) {
        return dynamic_cast<const llm_graph_input_out_ids *>(input.get()) != nullptr;
    });
}

// ggml's AMX code supports one matrix of weights and one contiguous matrix of activations.
bool suits_amx(const ggml_tensor * t) {
    if (t->op != GGML_OP_MUL_MAT || !t->src[0]->buffer ||
        std::strcmp(ggml_backend_buffer_name(t->src[0]->buffer), "AMX") != 0) {
        return true;
    }
    return ggml_is_matrix(t->src[0]) && ggml_is_matrix(t->src[1]) && ggml_is_contiguous(t->src[1]);
}

}  // namespace

std::string graph_fault(const llm_graph_result & result, const llama_context * ctx) {
    for (int i = 0; i < ggml_graph_n_nodes(result.get_gf()); ++i) {
        if (!suits_amx(ggml_graph_node(result.get_gf(), i))) {
            return "ggml's AMX code would compute this architecture's products wrong: load the model with use_extra_bufts=False";
        }
    }
    if (!picks_outputs(result)) {
        return "the graph of this architecture gives logits of all tokens: llama.cpp would return those of others";
    }
    // llama.cpp copies rows of the model's width, whatever the graph's width is.
    const auto &        params = ctx->get_cparams();
    const auto &        hparams = ctx->get_model().hparams;
    const ggml_tensor * given = result.get_embd_pooled() ? result.get_embd_pooled() : result.get_embd();
    const int64_t       width = params.pooling_type == LLAMA_POOLING_TYPE_RANK ? hparams.n_cls_out : hparams.n_embd_out();
    if (params.embeddings && given && given->ne[0] != width) {
        return "embeddings=True: the graph of this architecture gives embeddings of " + std::to_string(given->ne[0]) +
               " values, and llama.cpp reads " + std::to_string(width);
    }
    return {};
}

}  // namespace pykv
