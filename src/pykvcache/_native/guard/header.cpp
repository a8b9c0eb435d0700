// Checks of a file's header before the load: zeros that llama.cpp would divide by (a SIGFPE cannot be caught), and
// whether ggml's AMX code suits the architecture's graphs.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "ggml-cpp.h"
#include "guarded.h"
#include "probe_memory.h"

namespace pykv {

namespace {

// Suffixes of keys that must not be 0.
constexpr const char * DIVISORS[] = {
    ".attention.group_norm_groups", ".attention.output_group_count", ".experts_per_group", ".full_attention_interval",
    ".ssm.group_count", ".ssm.time_step_rank", ".wkv.head_size",
};
// Architectures whose loaders divide by the first layer's number of heads; in others a layer may have none.
constexpr const char * BY_HEADS[] = {"deepseek2", "gemma2", "gemma3", "olmo2", "phimoe"};
// Architectures that divide by the number of used experts if the expert size is not given.
constexpr const char * BY_EXPERTS[] = {"qwen35moe", "qwen3next", "qwen4exp"};

// First value of a key; 0 if missing. Loaders refuse other types.
uint32_t first_value(const gguf_context * header, const std::string & key) {
    const int64_t id = gguf_find_key(header, key.c_str());
    if (id < 0) {
        return 0;
    }
    if (gguf_get_kv_type(header, id) == GGUF_TYPE_UINT32) {
        return gguf_get_val_u32(header, id);
    }
    if (gguf_get_kv_type(header, id) != GGUF_TYPE_ARRAY) {
        return 1;
    }
    const gguf_type of = gguf_get_arr_type(header, id);
    return (of == GGUF_TYPE_UINT32 || of == GGUF_TYPE_INT32) && gguf_get_arr_n(header, id) > 0
               ? *static_cast<const uint32_t *>(gguf_get_arr_data(header, id)) : 0;
}

template <size_t n> bool is_among(const std::string & name, const char * const (&names)[n]) {
    return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

std::string architecture(const gguf_context * header) {
    const int64_t id = gguf_find_key(header, "general.architecture");
    return id < 0 || gguf_get_kv_type(header, id) != GGUF_TYPE_STRING ? "" : gguf_get_val_str(header, id);
}

std::string layer_problem(const gguf_context * header) {
    const std::string arch = architecture(header);
    for (const char * end : DIVISORS) {
        const std::string key = arch + end;
        if (gguf_find_key(header, key.c_str()) >= 0 && first_value(header, key) == 0) {
            return key + " is 0";
        }
    }
    const std::string heads = arch + ".attention.head_count", used = arch + ".expert_used_count";
    if (is_among(arch, BY_HEADS) && first_value(header, heads) == 0) {
        return heads + " is 0 or missing";
    }
    if (is_among(arch, BY_EXPERTS) && first_value(header, used) == 0 &&
        first_value(header, arch + ".expert_feed_forward_length") == 0) {
        return used + " is 0 or missing";
    }
    return {};
}

std::string vocab_problem(const gguf_context * header) {
    const int64_t id = gguf_find_key(header, "tokenizer.ggml.tokens");
    const bool    is_empty = id >= 0 && gguf_get_kv_type(header, id) == GGUF_TYPE_ARRAY && gguf_get_arr_n(header, id) == 0;
    return is_empty ? "tokenizer.ggml.tokens is empty" : "";
}

}  // namespace

std::string header_problem(const char * path, bool vocab_only) noexcept {
    std::string problem;
    guard.muted = true;  // the load itself reports other errors
    guarded_void([&] {
        const gguf_context_ptr header(gguf_init_from_file(path, {/*no_alloc=*/true, /*ctx=*/nullptr}));
        if (header) {
            problem = vocab_problem(header.get());
            problem = problem.empty() && !vocab_only ? layer_problem(header.get()) : problem;
        }
    });
    guard.muted = false;
    return problem;
}

bool multiplies_single_matrices(const char * path) noexcept {
    return guarded(false, [&] {
        ggml_context *         made = nullptr;
        const gguf_context_ptr header(gguf_init_from_file(path, {/*no_alloc=*/true, &made}));
        const ggml_context_ptr tensors(made);
        const llm_arch         arch = header ? llm_arch_from_string(architecture(header.get())) : LLM_ARCH_UNKNOWN;
        // Recurrent layers multiply one matrix of activations per sequence of the batch.
        bool single = arch != LLM_ARCH_UNKNOWN && !llm_arch_is_recurrent(arch) && !llm_arch_is_hybrid(arch);
        for (ggml_tensor * t = tensors ? ggml_get_first_tensor(made) : nullptr; t && single; t = ggml_get_next_tensor(made, t)) {
            // AMX code does not handle products of experts' weights (ggml_mul_mat_id).
            single = (ggml_n_dims(t) <= 2 || std::strstr(t->name, "_exps")) && ggml_nelements(t) < INT32_MAX;
        }
        return single;
    });
}

}  // namespace pykv
