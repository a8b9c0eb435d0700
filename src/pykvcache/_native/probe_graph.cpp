// What llama.cpp would read wrong of an architecture's graph: asked of the graph itself.
#include <algorithm>

#include "probe_memory.h"
#include "probe_private.h"

namespace pykv {

namespace {

// llama.cpp copies the first rows of the logits, as many as there are outputs: a graph has to pick those.
bool picks_outputs(const llm_graph_result & result) {
    return !result.get_logits() || std::any_of(result.inputs.begin(), result.inputs.end(), [](const auto & input) {
        return dynamic_cast<const llm_graph_input_out_ids *>(input.get()) != nullptr;
    });
}

}  // namespace

std::string graph_fault(const llm_graph_result & result, const llama_context * ctx) {
    if (!picks_outputs(result)) {
        return "the graph of this architecture gives logits of all tokens: llama.cpp would return those of others";
    }
    // llama.cpp copies rows of the model's width, whatever the graph gives.
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
