// Loads adapters, with the checks that llama.cpp omits.
#include <cmath>
#include <cstdlib>
#include <memory>

#include "adapters.h"
#include "ggml-cpp.h"
#include "guarded.h"
#include "probe_memory.h"

namespace pykv {

namespace {

bool can_multiply(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 || (ggml_get_type_traits(t->type)->to_float && ggml_get_type_traits(t->type)->from_float_ref);
}

// llama.cpp checks only two dimensions; other mismatches would show while computing.
std::string problem_of(const llama_adapter_lora & adapter) {
    if (!std::isfinite(adapter.alpha)) {
        return "adapter.lora.alpha is not finite";
    }
    if (adapter.ab_map.empty()) {
        return "it changes no tensor";
    }
    for (const auto & [name, pair] : adapter.ab_map) {
        for (const ggml_tensor * t : {pair.a, pair.b}) {
            if (!can_multiply(t)) {
                return "tensor '" + name + "' has a type that weights cannot have";
            }
        }
        // For token embeddings, rows of A are looked up.
        const bool    is_lookup = name == "token_embd.weight";
        const int64_t rank = is_lookup ? pair.a->ne[0] : pair.a->ne[1];
        if (rank < 1 || rank != pair.b->ne[0] || pair.a->ne[2] != pair.b->ne[2] || pair.a->ne[3] != pair.b->ne[3]) {
            return "the two matrices of tensor '" + name + "' do not fit each other";
        }
    }
    return "";
}

}  // namespace

llama_adapter_lora * adapter_load(llama_model * model, const char * path, adapter_lock & lock, std::string & problem) noexcept {
    return guarded<llama_adapter_lora *>(nullptr, [&]() -> llama_adapter_lora * {
        const std::lock_guard<adapter_lock> alone(lock);
        llama_adapter_lora * const adapter = llama_adapter_lora_init(model, path);
        if (adapter) {
            problem = problem_of(*adapter);
            if (!problem.empty()) {
                llama_adapter_lora_free(adapter);
                return nullptr;
            }
        }
        return adapter;
    });
}

void adapter_free(llama_adapter_lora * adapter, adapter_lock & lock) noexcept {
    guarded_void([&] {
        const std::lock_guard<adapter_lock> alone(lock);
        llama_adapter_lora_free(adapter);
    });
}

int32_t adapter_metadata(const llama_adapter_lora * adapter, std::vector<std::string> & out) noexcept {
    return guarded_void([&] {
        for (const auto & [key, value] : adapter->gguf_kv) {
            out.push_back(key);
            out.push_back(value);
        }
    });
}

std::vector<llama_token> adapter_invocation(const llama_adapter_lora * adapter) { return adapter->alora_invocation_tokens; }

int32_t control_load(const char * path, int32_t n_layer, int32_t n_embd, std::vector<float> & out, std::string & problem) noexcept {
    return guarded_void([&] {
        ggml_context * data = nullptr;
        const gguf_context_ptr file(gguf_init_from_file(path, {false, &data}));
        const ggml_context_ptr tensors(data);
        if (!file) {
            problem = "it is not a GGUF file, or cut short";
            return;
        }
        out.assign(static_cast<size_t>(n_layer) * static_cast<size_t>(n_embd), 0);
        size_t n = 0;
        for (ggml_tensor * t = ggml_get_first_tensor(data); t; t = ggml_get_next_tensor(data, t)) {
            const std::string name(ggml_get_name(t));
            if (name.rfind("direction.", 0) != 0) {
                continue;
            }
            char *     end = nullptr;
            const long layer = std::strtol(name.c_str() + 10, &end, 10);
            if (*end || end == name.c_str() + 10 || layer < 1 || layer >= n_layer) {
                problem = "tensor '" + name + "' names none of the layers 1 to " + std::to_string(n_layer - 1);
            } else if (t->type != GGML_TYPE_F32 || ggml_nelements(t) != n_embd || t->ne[0] != n_embd) {
                problem = "tensor '" + name + "' is no vector of " + std::to_string(n_embd) + " numbers of type F32";
            } else {
                const float * const from = ggml_get_data_f32(t);
                float * const       to = out.data() + static_cast<size_t>(layer) * static_cast<size_t>(n_embd);
                for (int32_t i = 0; i < n_embd; ++i) {
                    to[i] += from[i];
                }
                ++n;
                continue;
            }
            return;
        }
        if (n == 0) {
            problem = "it has no tensor direction.1, direction.2, ...";
        }
    });
}

}  // namespace pykv
