// LoRA adapters and control vectors, which change keys and values but not the model.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "llama.h"

namespace pykv {

// A model lists its adapters, and contexts read the list where they build graphs. They share the lock while they
// compute; loading and freeing an adapter take all of it, and do not wait for those that come later.
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

// The adapters that a context applies to its model.
struct adapter_set {
    std::vector<llama_adapter_lora *> loras;
    std::vector<float>                scales;
    std::vector<float>                control;  // layers from 1 on, one after the other; empty without one
};

// Null where it cannot be used: caught() or the notes of the log say why, or `problem` does.
llama_adapter_lora * adapter_load(llama_model * model, const char * path, adapter_lock & lock, std::string & problem) noexcept;
void adapter_free(llama_adapter_lora * adapter, adapter_lock & lock) noexcept;
// Keys and values of its metadata, by turns. CAUGHT where there is no memory for them.
int32_t adapter_metadata(const llama_adapter_lora * adapter, std::vector<std::string> & out) noexcept;
std::vector<llama_token> adapter_invocation(const llama_adapter_lora * adapter);

// Read the directions of a control vector, layer after layer with zeros where it has none; what the file lacks or has
// too much is a problem. CAUGHT where there is no memory for it.
int32_t control_load(const char * path, int32_t n_layer, int32_t n_embd, std::vector<float> & out, std::string & problem) noexcept;

}  // namespace pykv
