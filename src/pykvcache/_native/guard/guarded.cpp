// The hooks behind guarded.h: a log queue and the throwing abort callback.
#include "guarded.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <utility>

#include "ggml-backend.h"

namespace pykv {

namespace {

// Enough for a model load at debug level; if never drained, only the newest lines are kept.
constexpr size_t LOG_LINES_MAX = 4096;

thread_local failure     last;
thread_local std::string notes;

struct log_queue {
    std::mutex                              mutex;
    std::deque<std::pair<int, std::string>> lines;
    int                                     last_level = GGML_LOG_LEVEL_NONE;
};

// Never destroyed: llama.cpp may still log while the process ends.
log_queue *       queue = new log_queue;
std::atomic<bool> log_waiting{false};
std::atomic<int>  log_threshold{GGML_LOG_LEVEL_WARN};

ggml_abort_callback_t previous_abort = nullptr;

void on_log(ggml_log_level level, const char * text, void *) {
    if (guard.muted) {
        return;
    }
    try {
        if (guard.depth > 0 && (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) && notes.size() < 4096) {
            notes += text;
        }
        std::lock_guard<std::mutex> lock(queue->mutex);
        if (level == GGML_LOG_LEVEL_CONT) {
            if (queue->last_level >= log_threshold && !queue->lines.empty()) {
                queue->lines.back().second += text;
            }
            return;
        }
        queue->last_level = level;
        if (level < log_threshold) {
            return;
        }
        if (queue->lines.size() == LOG_LINES_MAX) {
            queue->lines.pop_front();
        }
        queue->lines.emplace_back(level, text);
        log_waiting = true;
    } catch (...) {
        // A lost log line is better than an exception through C.
    }
}

void on_abort(const char * message) {
    if (previous_abort) {
        previous_abort(message);
    }
    if (guard.depth > 0) {
        throw std::runtime_error(message);
    }
    // On a worker thread an exception cannot be caught, so log why the process ends.
    std::fprintf(stderr, "%s\n", message);
}

}  // namespace

void install_hooks() {
    static bool done = false;
    if (done) {
        return;
    }
    done = true;
    llama_log_set(on_log, nullptr);
    previous_abort = ggml_set_abort_callback(on_abort);
    llama_backend_init();
}

const failure & caught() noexcept { return last; }

void note_caught(failure found) noexcept {
    last = std::move(found);
    guard.caught = true;
}

void forget_caught() {
    last = {};
    guard.caught = false;
}

void begin_notes() noexcept { notes.clear(); }
std::string take_notes() noexcept { return std::exchange(notes, {}); }

void set_log_threshold(int level) noexcept { log_threshold = level; }
void log_warning(const char * text) noexcept { on_log(GGML_LOG_LEVEL_WARN, text, nullptr); }
bool has_log() noexcept { return log_waiting.load(std::memory_order_relaxed); }

bool take_log(int & level, std::string & text) noexcept {
    std::lock_guard<std::mutex> lock(queue->mutex);
    if (queue->lines.empty()) {
        log_waiting = false;
        return false;
    }
    level = queue->lines.front().first;
    text = std::move(queue->lines.front().second);
    queue->lines.pop_front();
    return true;
}

void renew_log() { queue = new log_queue; }

}  // namespace pykv
