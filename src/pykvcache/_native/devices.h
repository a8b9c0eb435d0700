// Which devices ggml computes on, and those of another process over ggml's RPC, where the build has it.
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
            ggml_backend_dev_t d = ggml_backend_dev_get(i);
            size_t             free = 0, total = 0;
            ggml_backend_dev_memory(d, &free, &total);
            out.push_back({ggml_backend_dev_name(d), ggml_backend_reg_name(ggml_backend_dev_backend_reg(d)),
                           ggml_backend_dev_description(d), int(ggml_backend_dev_type(d)), free, total});
        }
        return 0;
    });
}

// NULL if no device has this name.
inline ggml_backend_dev_t device_named(const char * name) noexcept {
    return guarded<ggml_backend_dev_t>(nullptr, [&] { return ggml_backend_dev_by_name(name); });
}

template <class F> F rpc_function(const char * name) {
    ggml_backend_reg_t reg = ggml_backend_reg_by_name("RPC");
    return reg ? reinterpret_cast<F>(ggml_backend_reg_get_proc_address(reg, name)) : nullptr;
}

// Make the devices of a server known to models that are loaded from now on. 1: this build has no RPC.
inline int32_t rpc_connect(const char * endpoint) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        const auto add = rpc_function<ggml_backend_reg_t (*)(const char *)>("ggml_backend_rpc_add_server");
        if (!add) {
            return 1;
        }
        ggml_backend_register(add(endpoint));
        return 0;
    });
}

// Serve this process's CPU until the process ends; returns if it cannot. 1: this build has no RPC.
inline int32_t rpc_serve(const char * endpoint) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        using serve = void (*)(const char *, const char *, size_t, size_t, ggml_backend_dev_t *);
        const auto         start = rpc_function<serve>("ggml_backend_rpc_start_server");
        ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        if (!start || !cpu) {
            return 1;
        }
        start(endpoint, nullptr, 1, 1, &cpu);
        return 0;
    });
}

}  // namespace pykv
