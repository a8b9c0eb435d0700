// Bytes of a context by buffer type, and the devices of a model, which llama.cpp exposes only through
// C++ functions.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "guarded.h"
#include "llama-ext.h"

namespace pykv {

struct buffer_bytes {
    std::string name;
    uint64_t    model = 0, context = 0, compute = 0;
};

inline int32_t memory_breakdown(const llama_context * ctx, std::vector<buffer_bytes> & out) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        std::map<std::string, buffer_bytes> found;  // summed: two types may share a name
        for (const auto & [type, bytes] : llama_get_memory_breakdown(ctx)) {
            buffer_bytes & one = found[ggml_backend_buft_name(type)];
            one.model += bytes.model;
            one.context += bytes.context;
            one.compute += bytes.compute;
        }
        for (auto & [name, one] : found) {
            one.name = name;
            out.push_back(one);
        }
        return 0;
    });
}

inline std::vector<ggml_backend_dev_t> model_devices(const llama_model * model) {
    std::vector<ggml_backend_dev_t> devices;
    for (int i = 0; i < llama_model_n_devices(model); ++i) {
        devices.push_back(llama_model_get_device(model, i));
    }
    return devices;
}

// The devices of a model.
inline std::vector<std::string> devices_of(const llama_model * model) {
    std::vector<std::string> names;
    for (int i = 0; i < llama_model_n_devices(model); ++i) {
        names.emplace_back(ggml_backend_dev_name(llama_model_get_device(model, i)));
    }
    return names;
}

}  // namespace pykv
