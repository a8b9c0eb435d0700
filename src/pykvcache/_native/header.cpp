// What a damaged header can say that would end the process, or keep it busy for ever.
//
// An assertion can be caught (guarded.h, parallel.cpp), a division by zero cannot.
#include <cmath>
#include <cstring>
#include <memory>

#include "gguf.h"
#include "guarded.h"

namespace pykv {

namespace {

// Keys, without the name of the architecture that they begin with. None of these is ever 0 in a model that works.
constexpr const char * DIVISORS[] = {
    ".attention.group_norm_groups", ".attention.output_group_count", ".experts_per_group", ".full_attention_interval",
    ".ssm.group_count", ".ssm.time_step_rank", ".wkv.head_size",
};
constexpr const char * EPSILONS[] = {
    ".attention.group_norm_epsilon", ".attention.layer_norm_epsilon", ".attention.layer_norm_rms_epsilon",
};

// Loops that run as often as the file says.
constexpr const char * ITERATIONS     = ".hyper_connection.sinkhorn_iterations";
constexpr uint32_t     ITERATIONS_MAX = 1000;

// The mask's arithmetic in int32 adds a window to positions.
constexpr const char * WINDOW     = ".attention.sliding_window";
constexpr uint32_t     WINDOW_MAX = uint32_t(1) << 30;

// Architectures whose loaders divide by the number of heads of the first layer; others may have none.
constexpr const char * HEADS = ".attention.head_count";
constexpr const char * DIVIDED[] = {"deepseek2", "gemma2", "gemma3", "olmo2", "phimoe"};

constexpr const char * USED = ".expert_used_count";
// Those whose loaders do so whatever else is said, of every layer.
constexpr const char * EXPERTS[] = {"qwen35moe", "qwen3next", "qwen4exp"};

bool ends_with(const char * text, const char * end) {
    const size_t n = std::strlen(text), m = std::strlen(end);
    return n >= m && std::strcmp(text + n - m, end) == 0;
}

// Of a number, or of an array's i-th, as llama.cpp takes them; 0 where there is none.
uint32_t value_of_layer(const gguf_context * header, const std::string & key, size_t i) {
    const int64_t id = gguf_find_key(header, key.c_str());
    if (id < 0) {
        return 0;
    }
    const gguf_type type = gguf_get_kv_type(header, id);
    if (type != GGUF_TYPE_ARRAY) {
        return type == GGUF_TYPE_UINT32 ? gguf_get_val_u32(header, id) : 1;  // the load refuses other types
    }
    const gguf_type of = gguf_get_arr_type(header, id);
    if (i >= gguf_get_arr_n(header, id)) {
        return 0;
    }
    if (of == GGUF_TYPE_BOOL) {
        return static_cast<const uint8_t *>(gguf_get_arr_data(header, id))[i];
    }
    return of == GGUF_TYPE_UINT32 || of == GGUF_TYPE_INT32
               ? static_cast<const uint32_t *>(gguf_get_arr_data(header, id))[i] : 0;
}

// How many values a key has; 1 of a number, and where there is none.
size_t values_of(const gguf_context * header, const std::string & key) {
    const int64_t id = gguf_find_key(header, key.c_str());
    return id >= 0 && gguf_get_kv_type(header, id) == GGUF_TYPE_ARRAY ? gguf_get_arr_n(header, id) : 1;
}

// Where the size of a layer's experts is not said, loaders divide by how many of them it uses.
std::string experts_problem(const gguf_context * header, int64_t used, const std::string & arch) {
    if (gguf_get_kv_type(header, used) != GGUF_TYPE_ARRAY) {
        return {};
    }
    const std::string size = arch + ".expert_feed_forward_length", key = arch + USED;
    for (size_t i = 0; i < gguf_get_arr_n(header, used); ++i) {
        if (value_of_layer(header, key, i) == 0 && value_of_layer(header, size, i) == 0 &&
            value_of_layer(header, arch + ".feed_forward_length", i) != 0) {
            return key + " is 0 for layer " + std::to_string(i) + ", and " + size + " too";
        }
    }
    return {};
}

// A key that is not there counts as 0: its loader would divide by that, too.
std::string division_problem(const gguf_context * header) {
    const int64_t id = gguf_find_key(header, "general.architecture");
    if (id < 0 || gguf_get_kv_type(header, id) != GGUF_TYPE_STRING) {
        return {};
    }
    const std::string arch = gguf_get_val_str(header, id);
    for (const char * divided : DIVIDED) {
        if (arch == divided && value_of_layer(header, arch + HEADS, 0) == 0) {
            return arch + HEADS + " is 0, or not there";
        }
    }
    const std::string size = arch + ".expert_feed_forward_length";
    for (const char * divided : EXPERTS) {
        for (size_t i = 0; arch == divided && i < values_of(header, arch + USED); ++i) {
            if (value_of_layer(header, arch + USED, i) == 0 && value_of_layer(header, size, i) == 0) {
                return arch + USED + " is 0 for layer " + std::to_string(i) + ", or not there, and " + size + " too";
            }
        }
    }
    return {};
}

std::string find_problem(const gguf_context * header, bool vocab_only) {
    const std::string division = vocab_only ? std::string() : division_problem(header);
    if (!division.empty()) {
        return division;
    }
    for (int64_t i = 0; i < gguf_get_n_kv(header); ++i) {
        const char *    key = gguf_get_key(header, i);
        const gguf_type type = gguf_get_kv_type(header, i);
        for (const char * end : DIVISORS) {
            if (ends_with(key, end) && type == GGUF_TYPE_UINT32 && gguf_get_val_u32(header, i) == 0) {
                return std::string(key) + " is 0";
            }
        }
        if (ends_with(key, USED)) {
            const std::string problem = experts_problem(header, i, std::string(key, std::strlen(key) - std::strlen(USED)));
            if (!problem.empty()) {
                return problem;
            }
        }
        if (ends_with(key, ITERATIONS) && type == GGUF_TYPE_UINT32 && gguf_get_val_u32(header, i) > ITERATIONS_MAX) {
            return std::string(key) + " is " + std::to_string(gguf_get_val_u32(header, i)) + ": the limit is 1000";
        }
        if (ends_with(key, WINDOW) && type == GGUF_TYPE_UINT32 && gguf_get_val_u32(header, i) > WINDOW_MAX) {
            return std::string(key) + " is " + std::to_string(gguf_get_val_u32(header, i)) + ": the limit is 2^30";
        }
        for (const char * end : EPSILONS) {
            if (ends_with(key, end) && type == GGUF_TYPE_FLOAT32) {
                const float value = gguf_get_val_f32(header, i);
                if (!(value >= 0 && std::isfinite(value))) {
                    return std::string(key) + " is " + std::to_string(value);
                }
            }
        }
    }
    return {};
}

}  // namespace

std::string header_problem(const char * path, bool vocab_only) noexcept {
    std::string problem;
    guard.muted = true;  // the load itself will say what is wrong
    guarded_void([&] {
        const std::unique_ptr<gguf_context, void (*)(gguf_context *)> header(
            gguf_init_from_file(path, {/*no_alloc=*/true, /*ctx=*/nullptr}), gguf_free);
        if (header) {  // other files are refused by the load, with llama.cpp's own words
            problem = find_problem(header.get(), vocab_only);
            problem = problem.empty() ? vocab_problem(header.get()) : problem;
        }
    });
    guard.muted = false;
    return problem;
}

}  // namespace pykv
