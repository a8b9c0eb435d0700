// ggml's compute devices.
#pragma once

#include <string>
#include <vector>

#include "ggml-backend.h"
#include "guarded.h"

namespace pykv {

inline std::vector<std::string> device_names() {
    std::vector<std::string> names;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        names.emplace_back(ggml_backend_dev_name(ggml_backend_dev_get(i)));
    }
    return names;
}

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

}  // namespace pykv
