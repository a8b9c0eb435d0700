// Calls of llama.h with all C++ exceptions caught.
//
// A safety net behind the checks: ggml's abort callback throws, so that a failure that no check foresaw becomes a code.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "gguf.h"
#include "llama.h"
#include "sync.h"

namespace pykv {

constexpr int32_t CAUGHT = INT32_MIN;  // no function of llama.h returns this value

// Install the log and abort hooks; once, under the GIL.
void install_hooks();

// What this thread's last guarded call caught.
struct failure {
    std::string text = {};          // message of the exception, or ""
    std::string endpoint = {};      // server that was lost during the call, or ""
    bool        no_memory = false;  // whether it was std::bad_alloc
};
const failure & caught() noexcept;
// Warnings and errors that llama.cpp logged on this thread since begin_notes().
void begin_notes() noexcept;
std::string take_notes() noexcept;

// Queue of log lines, drained under the GIL, because the callback must not take the GIL.
void set_log_threshold(int level) noexcept;
void log_warning(const char * text) noexcept;
bool has_log() noexcept;
bool take_log(int & level, std::string & text) noexcept;
// After a fork, the queue's lock may be held by a thread that does not exist in the child.
void renew_log();

// Details of guarded().
struct guard_state {
    int  depth = 0;
    bool caught = false;  // whether there is a text to forget
    bool muted = false;   // during an attempt whose failure is reported elsewhere
};
// Constant-initialised and trivially destroyed, so that access needs no guard call.
inline thread_local guard_state guard;
void note_caught(failure found) noexcept;
void forget_caught();

// While it exists, a broken precondition of ggml throws; for functions declared `except +`.
struct assertions_throw {
    assertions_throw() { ++guard.depth; }
    ~assertions_throw() { --guard.depth; }
    assertions_throw(const assertions_throw &) = delete;
    assertions_throw & operator=(const assertions_throw &) = delete;
};

template <class R, class F> R guarded(R on_error, F && call) noexcept {
    R result = on_error;
    guard_state & mine = guard;
    ++mine.depth;
    try {
        if (mine.caught) {
            forget_caught();
        }
        result = call();
    } catch (const std::bad_alloc &) {
        note_caught({"out of memory", {}, true});
    } catch (const std::exception & error) {
        note_caught({error.what()});
    } catch (...) {
        note_caught({"unknown C++ exception"});
    }
    --mine.depth;
    // A created object is returned anyway: the caller must free it, and using it checks the link.
    if constexpr (!std::is_pointer_v<R> || std::is_const_v<std::remove_pointer_t<R>>) {
        // ggml continued with fabricated replies, so the result is invalid.
        if (any_device_link.load(std::memory_order_relaxed) && watched_links && mine.depth == 0) {
            if (const device_link * lost = lost_link(*watched_links)) {
                note_caught({lost->why(), lost->endpoint});
                result = on_error;
            }
        }
    }
    return result;
}

template <class F> int32_t guarded_void(F && call) noexcept {
    return guarded<int32_t>(CAUGHT, [&] { call(); return 0; });
}

// Why a GGUF must not be loaded, beyond llama.cpp's own checks; "" if it may.
std::string header_problem(const char * path, bool vocab_only) noexcept;
// Whether this build has ggml's AMX code.
#ifdef PYKVCACHE_AMX
constexpr bool USES_AMX = true;
#else
constexpr bool USES_AMX = false;
#endif
// Whether that code is correct for a model: it supports only products of one matrix of weights and one of activations.
bool multiplies_single_matrices(const char * path) noexcept;
inline llama_model * model_load(const char * path, llama_model_params params) noexcept {
    return guarded<llama_model *>(nullptr, [&] { return llama_model_load_from_file(path, params); });
}
inline gguf_context * gguf_open(const char * path) noexcept {
    return guarded<gguf_context *>(nullptr, [&] { return gguf_init_from_file(path, {true, nullptr}); });
}
inline int32_t model_free(llama_model * model) noexcept {
    return guarded_void([&] { llama_model_free(model); });
}
inline llama_context * context_new(llama_model * model, llama_context_params params) noexcept {
    return guarded<llama_context *>(nullptr, [&] { return llama_init_from_model(model, params); });
}
inline int32_t context_free(llama_context * ctx) noexcept {
    return guarded_void([&] { llama_free(ctx); });
}
inline const float * logits_ith(llama_context * ctx, int32_t i) noexcept {
    return guarded<const float *>(nullptr, [&] { return llama_get_logits_ith(ctx, i); });
}
inline const float * embeddings_ith(llama_context * ctx, int32_t i) noexcept {
    return guarded<const float *>(nullptr, [&] { return llama_get_embeddings_ith(ctx, i); });
}
inline const float * embeddings_seq(llama_context * ctx, llama_seq_id seq) noexcept {
    return guarded<const float *>(nullptr, [&] { return llama_get_embeddings_seq(ctx, seq); });
}

}  // namespace pykv
