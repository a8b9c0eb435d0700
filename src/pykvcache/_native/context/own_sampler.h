// Makes a llama_sampler of a copyable object with `name`, `apply(candidates)`, `accept(token)` and `reset()`.
#pragma once

#include <memory>
#include <utility>

#include "llama.h"

namespace pykv {

template <class Stage> struct own_sampler {
    static Stage & of(const llama_sampler * self) { return *static_cast<Stage *>(self->ctx); }

    static llama_sampler * make(Stage stage) {
        static llama_sampler_i calls = [] {
            llama_sampler_i i{};
            i.name = [](const llama_sampler *) { return Stage::name; };
            i.accept = [](llama_sampler * self, llama_token token) { of(self).accept(token); };
            i.apply = [](llama_sampler * self, llama_token_data_array * found) { of(self).apply(*found); };
            i.reset = [](llama_sampler * self) { of(self).reset(); };
            i.clone = [](const llama_sampler * self) { return make(of(self)); };
            i.free = [](llama_sampler * self) { delete &of(self); };
            return i;
        }();
        auto                  owned = std::make_unique<Stage>(std::move(stage));
        llama_sampler * const made = llama_sampler_init(&calls, owned.get());
        owned.release();  // the sampler frees it
        return made;
    }
};

}  // namespace pykv
