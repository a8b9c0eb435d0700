// ggml's compute devices, those of a model, and the bytes of a context by buffer type. llama.cpp exposes the last two
// only through C++ functions.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "guarded.h"
#include "llama-ext.h"

namespace pykv {

struct device_facts {
    std::string name, backend, description;
    int         kind;
    uint64_t    free, total;
};

inline int32_t device_list(std::vector<device_facts> & out) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            ggml_backend_dev_t d       = ggml_backend_dev_get(i);
            const char *       backend = ggml_backend_reg_name(ggml_backend_dev_backend_reg(d));
            size_t             free = 0, total = 0;
            ggml_backend_dev_memory(d, &free, &total);
            out.push_back({ggml_backend_dev_name(d), backend, ggml_backend_dev_description(d),
                           int(ggml_backend_dev_type(d)), free, total});
        }
        return 0;
    });
}

// Returns NULL if no device has this name.
inline ggml_backend_dev_t device_named(const char * name) noexcept {
    return guarded<ggml_backend_dev_t>(nullptr, [&] { return ggml_backend_dev_by_name(name); });
}

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

inline std::vector<std::string> devices_of(const llama_model * model) {
    std::vector<std::string> names;
    for (ggml_backend_dev_t device : model_devices(model)) {
        names.emplace_back(ggml_backend_dev_name(device));
    }
    return names;
}

}  // namespace pykv
