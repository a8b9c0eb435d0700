// Defers Ctrl-C while the main thread changes sequences, and handles it as usual right after.
#pragma once

#include <atomic>
#include <csignal>

#include "sync.h"

namespace pykv {

// Called by the main thread with the GIL. `end` passes the signal to Python's own handler, which knows the program's
// handler. On Windows nothing is deferred.
class deferred_sigint {
  public:
    void begin() noexcept {
        if (depth++ == 0) {
            install();
        }
    }
    void end() noexcept {
        if (depth > 0 && --depth == 0 && restore()) {
            raise(SIGINT);
        }
    }
    // Deliver a deferred signal to the program's handler; returns whether there was one.
    bool deliver() noexcept {
        if (depth == 0 || count.load() == 0) {
            return false;
        }
        restore();
        raise(SIGINT);
        install();
        return true;
    }
    // Abort flag of the decode that a signal stops; null for none.
    void stops(abort_flag * decode) noexcept { stopped.store(decode); }

    // Reset in a forked child.
    void forget() noexcept {
        if (depth > 0) {
            depth = 0;
            restore();
        }
    }

  private:
    static_assert(std::atomic<abort_flag *>::is_always_lock_free && std::atomic<int>::is_always_lock_free);
    int                       depth = 0;
    std::atomic<int>          count{0};
    std::atomic<abort_flag *> stopped{nullptr};

#ifdef _WIN32
    void install() noexcept {}
    bool restore() noexcept { return false; }
#else
    struct sigaction before = {};

    static void note(int signal) noexcept;

    void install() noexcept {
        struct sigaction mine = {};
        mine.sa_handler       = note;
        mine.sa_flags         = SA_ONSTACK | SA_RESTART;
        sigaction(SIGINT, &mine, &before);
        if (before.sa_handler == SIG_DFL) {
            sigaction(SIGINT, &before, nullptr);  // the default action ends the process at once
        }
    }
    // Whether a signal arrived since `install`.
    bool restore() noexcept {
        struct sigaction found = {};
        sigaction(SIGINT, &before, &found);
        if (found.sa_handler != note) {
            sigaction(SIGINT, &found, nullptr);  // keep a handler that was installed during the call
        }
        return count.exchange(0) > 0;
    }
#endif
};

inline deferred_sigint sigint;

#ifndef _WIN32
// Runs in any thread. The third signal is not deferred: the program's own code may hang.
inline void deferred_sigint::note(int signal) noexcept {
    if (abort_flag * decode = sigint.stopped.load()) {
        decode->wanted = true;
    }
    if (++sigint.count > 2 && !(sigint.before.sa_flags & SA_SIGINFO) && sigint.before.sa_handler != SIG_IGN) {
        sigint.count = 0;
        sigint.before.sa_handler(signal);
    }
}
#endif

}  // namespace pykv
