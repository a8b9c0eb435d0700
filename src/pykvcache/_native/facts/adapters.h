// LoRA adapters and control vectors: they change keys and values, not the model.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "llama.h"

namespace pykv {

// Guards a model's list of adapters, which contexts read while building graphs. Computing takes the lock shared;
// loading and freeing an adapter take it exclusively, ahead of later readers.
class adapter_lock {
  public:
    void lock() {
        gate.lock();
        users.lock();
    }
    void unlock() {
        users.unlock();
        gate.unlock();
    }
    void lock_shared() {
        { const std::lock_guard<std::mutex> passed(gate); }
        users.lock_shared();
    }
    void unlock_shared() { users.unlock_shared(); }

  private:
    std::mutex        gate;
    std::shared_mutex users;
};

inline std::shared_ptr<adapter_lock> new_adapter_lock() { return std::make_shared<adapter_lock>(); }

// Adapters that a context applies.
struct adapter_set {
    std::vector<llama_adapter_lora *> loras;
    std::vector<float>                scales;
    std::vector<float>                control;  // layers from 1 on, one after the other; empty without one
    int64_t                           activated = -1;  // index of the aLoRA, which not all tokens use; -1 without one
};

// LoRA adapters with their scales, as a context holds them.
using adapter_map = std::unique_ptr<std::unordered_map<llama_adapter_lora *, float>>;

// Null on error; `problem`, caught() or the logged notes say why.
llama_adapter_lora * adapter_load(llama_model * model, const char * path, adapter_lock & lock, std::string & problem) noexcept;
void adapter_free(llama_adapter_lora * adapter, adapter_lock & lock) noexcept;
// Metadata as alternating keys and values. CAUGHT if out of memory.
int32_t adapter_metadata(const llama_adapter_lora * adapter, std::vector<std::string> & out) noexcept;
std::vector<llama_token> adapter_invocation(const llama_adapter_lora * adapter);

// Read the directions of a control vector, layer by layer, zeros for missing layers. `problem` names missing or
// superfluous tensors. CAUGHT if out of memory.
int32_t control_load(const char * path, int32_t n_layer, int32_t n_embd, std::vector<float> & out, std::string & problem) noexcept;

}  // namespace pykv
