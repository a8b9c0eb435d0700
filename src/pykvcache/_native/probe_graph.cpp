// What of the graph of a model would fail at each decode: asked of the graph itself, once a context is there.
#include <algorithm>
#include <cstring>
#include <set>

#include "probe_memory.h"
#include "probe_private.h"

namespace pykv {

namespace {

// The tensors that some node reads.
std::set<const ggml_tensor *> read_tensors(ggml_cgraph * nodes) {
    std::set<const ggml_tensor *> read;
    for (int i = 0; i < ggml_graph_n_nodes(nodes); ++i) {
        const ggml_tensor * t = ggml_graph_node(nodes, i);
        read.insert({t, t->view_src});
        for (const ggml_tensor * source : t->src) {
            if (source) {
                read.insert({source, source->view_src});
            }
        }
    }
    return read;
}

// What llama.cpp fills in at each step, wherever it is, of the inputs of one kind.
class unread_input {
  public:
    explicit unread_input(ggml_cgraph * nodes) : nodes(nodes), read(read_tensors(nodes)) {}

    const char * find(const llm_graph_input_i * input) const {
        if (const auto * in = dynamic_cast<const llm_graph_input_out_ids *>(input)) {
            return is_unread(in->out_ids) ? "picks the tokens that logits are asked of" : nullptr;
        }
        if (const auto * in = dynamic_cast<const llm_graph_input_attn_kv_msa *>(input)) {
            return is_unread(in->self_k_idxs_idx) ? "has an indexer" : nullptr;
        }
        if (const auto * in = dynamic_cast<const llm_graph_input_attn_k *>(input)) {
            return of_keys(in);
        }
        if (const auto * in = dynamic_cast<const llm_graph_input_attn_k_dsa *>(input)) {
            return of_indexed(in);
        }
        if (const auto * in = dynamic_cast<const llm_graph_input_attn_k_dsa_iswa *>(input)) {
            const char * found = of_indexed(in->get_dsa());
            return found ? found : is_unread(in->get_swa()->self_k_idxs) ? "has a window" : nullptr;
        }
        if (const auto * in = dynamic_cast<const llm_graph_input_mem_hybrid *>(input)) {
            return is_unread(in->get_attn()->self_k_idxs) ? "attends" : of_states(in->get_recr());
        }
        if (const auto * in = dynamic_cast<const llm_graph_input_mem_hybrid_k *>(input)) {
            const char * found = of_keys(in->get_attn());
            return found ? found : of_states(in->get_recr());
        }
        if (const auto * in = dynamic_cast<const llm_graph_input_mem_hybrid_iswa *>(input)) {
            const auto * attn = in->get_attn();
            return is_unread(attn->self_k_idxs) && is_unread(attn->self_k_idxs_swa) ? "attends" : of_states(in->get_recr());
        }
        if (const auto * in = dynamic_cast<const llm_graph_input_attn_no_cache *>(input)) {
            if (is_unread(in->self_kq_mask)) {
                return "attends to more than a window";
            }
            return is_unread(in->self_kq_mask_swa) ? "has a window" : nullptr;
        }
        return of_states(dynamic_cast<const llm_graph_input_rs *>(input));
    }

  private:
    ggml_cgraph *                       nodes;
    const std::set<const ggml_tensor *> read;

    // llama.cpp gives memory to what a node reads, and to what was put into the graph by itself.
    bool is_unread(const ggml_tensor * t) const {
        return t && read.count(t) == 0 && ggml_graph_get_tensor(nodes, t->name) != t;
    }

    const char * of_keys(const llm_graph_input_attn_k * in) const {
        return is_unread(in->self_k_idxs) || is_unread(in->self_kq_mask) ? "attends" : nullptr;
    }

    const char * of_indexed(const llm_graph_input_attn_k_dsa * in) const {
        if (is_unread(in->self_k_idxs_mla) || is_unread(in->self_kq_mask_mla)) {
            return "attends to more than a window";
        }
        return is_unread(in->self_k_idxs_lid) || is_unread(in->self_kq_mask_lid) ? "has an indexer" : nullptr;
    }

    const char * of_states(const llm_graph_input_rs * in) const {
        return in && is_unread(in->s_copy) ? "has a recurrent state" : nullptr;
    }
};

// ggml's kernels rotate pairs, and assert that these lie in the row.
std::string rope_fault(const ggml_tensor * t) {
    const int32_t n_rot = t->op_params[1], offset = t->op_params[15];
    if (n_rot % 2 != 0) {
        return "the model rotates " + std::to_string(n_rot) + " dimensions (rope.dimension_count): the number must be even";
    }
    if (offset < 0 || n_rot > t->ne[0] - offset) {
        return "the model rotates " + std::to_string(n_rot) + " dimensions (rope.dimension_count): its heads have " +
               std::to_string(t->ne[0] - offset);
    }
    if (offset % 2 != 0) {
        return "the model rotates the dimensions after the first " + std::to_string(offset) +
               " of a head (rope.dimension_count): their number must be even";
    }
    int32_t sections[4];
    std::memcpy(sections, t->op_params + 11, sizeof sections);
    if ((t->op_params[2] & GGML_ROPE_TYPE_MROPE) && sections[0] <= 0 && sections[1] <= 0 && sections[2] <= 0) {
        return "the model rotates by several positions, none of which has a section (rope.dimension_sections)";
    }
    const int64_t turned = int64_t(sections[0]) + sections[1] + sections[2] + sections[3];
    if ((t->op_params[2] & GGML_ROPE_TYPE_MROPE) && turned > t->ne[0]) {
        return "the sections of the model's rotation have " + std::to_string(turned) +
               " dimensions (rope.dimension_sections): its heads have " + std::to_string(t->ne[0]);
    }
    return {};
}

// llama.cpp copies the first rows of the logits, as many as there are outputs: a graph has to pick those.
bool picks_outputs(const llm_graph_result & result) {
    return !result.get_logits() || std::any_of(result.inputs.begin(), result.inputs.end(), [](const auto & input) {
        return dynamic_cast<const llm_graph_input_out_ids *>(input.get()) != nullptr;
    });
}

// llama.cpp copies rows of the model's width, whatever the graph gives.
std::string embedding_fault(const llm_graph_result & result, const llama_context * ctx) {
    const bool          ranks = ctx->get_cparams().pooling_type == LLAMA_POOLING_TYPE_RANK;
    const auto &        hparams = ctx->get_model().hparams;
    const ggml_tensor * given = result.get_embd_pooled() ? result.get_embd_pooled() : result.get_embd();
    const int64_t       width = ranks ? hparams.n_cls_out : hparams.n_embd_out();
    if (!ctx->get_cparams().embeddings || !given || given->ne[0] == width) {
        return {};
    }
    return "embeddings=True: the graph of this architecture gives embeddings of " + std::to_string(given->ne[0]) +
           " values, and llama.cpp reads " + std::to_string(width);
}

}  // namespace

std::string graph_fault(const llm_graph_result & result, const llama_context * ctx) {
    ggml_cgraph * nodes = result.get_gf();
    for (int i = 0; i < ggml_graph_n_nodes(nodes); ++i) {
        const ggml_tensor * t = ggml_graph_node(nodes, i);
        const std::string   fault = t->op == GGML_OP_ROPE ? rope_fault(t) : operand_fault(t);
        if (!fault.empty()) {
            return fault;
        }
    }
    if (!picks_outputs(result)) {
        return "the graph of this architecture gives logits of all tokens: llama.cpp would give out those of others";
    }
    const std::string embedding = embedding_fault(result, ctx);
    if (!embedding.empty()) {
        return embedding;
    }
    const unread_input unread(nodes);
    for (const auto & input : result.inputs) {
        if (const char * what = unread.find(input.get())) {
            return std::string("no layer of the model ") + what + ", which its architecture takes for granted";
        }
    }
    return {};
}

}  // namespace pykv
