# The choice of CPU code, logging, errors caught in C++, fork, Ctrl-C.

# A free-threaded interpreter enables the GIL for this module, unless told not to.
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "pykvcache needs the GIL, and PYTHON_GIL=0 (or -X gil=0) keeps it off: "
        "without that setting a free-threaded Python turns it on by itself")


cdef str _text(const string& text):
    """Decode from a pointer: `decode` of a std::string makes a copy that may throw uncaught."""
    return text.data()[:text.size()].decode("utf-8", "replace")


cdef list _texts(const vector[string]& texts):
    cdef size_t i
    cdef list found = []
    for i in range(texts.size()):
        found.append(_text(texts[i]))
    return found


cdef dict _pairs(const vector[string]& texts):
    """Return a dict of alternating keys and values."""
    found = _texts(texts)
    return dict(zip(found[::2], found[1::2]))


# Before any of ggml's CPU code runs.
cdef bytes _cpu_wanted = os.environ.get("PYKVCACHE_CPU", "").encode("utf-8", "surrogateescape")
cdef str _cpu_refusal = _text(lib.choose_cpu(_cpu_wanted))
if _cpu_refusal:
    raise ImportError(_cpu_refusal)


def cpu_features():
    """Return this processor's features, among those that compilers may use."""
    return _texts(lib.cpu_features())


cdef object _logger = logging.getLogger("pykvcache.llama")
_logger.addHandler(logging.NullHandler())

# ggml_log_level -> logging
cdef tuple _LEVELS = (
    logging.NOTSET, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.INFO)

# Number of forks: an object of another generation belongs to the parent process.
cdef int _generation = 0


def _after_fork_in_child():
    global _generation, _main_thread
    _generation += 1
    _main_thread = PyThread_get_thread_ident()
    lib.sigint.forget()
    lib.renew_log()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

lib.install_hooks()

# Ctrl-C is deferred while the main thread changes sequences or decodes. Its handler's exception is raised by
# the stopped decode, or at the end of the change.

cdef object _SIGINT = _signal.SIGINT
cdef object _getsignal = _signal.getsignal
cdef object _raises_interrupt = _signal.default_int_handler
cdef unsigned long _main_thread = threading.main_thread().ident


cdef inline bint _is_main_thread() noexcept:
    return PyThread_get_thread_ident() == _main_thread


cdef inline void _defer_sigint() noexcept:
    if _is_main_thread():
        lib.sigint.begin()


cdef inline void _release_sigint() noexcept:
    if _is_main_thread():
        lib.sigint.end()


cdef bint _stops_decodes() except -1:
    """Whether Ctrl-C stops a decode; a program's own handler decides that itself."""
    return _is_main_thread() and _getsignal(_SIGINT) is _raises_interrupt


cdef int _handle_sigint() except -1:
    """Run the handler of a deferred SIGINT; raises what it raises."""
    if _is_main_thread() and lib.sigint.deliver():
        PyErr_CheckSignals()
    return 0


cdef object _live = weakref.WeakSet()


@atexit.register
def _stop_all():
    with nogil:
        lib.loads.finish()
    for context in list(_live):
        context.stop()


cdef int _sync_log() except -1:
    """Pass the logger's level to C, so that unwanted lines are not copied."""
    cdef int level = _logger.getEffectiveLevel()
    lib.set_log_threshold(
        1 if level <= 10 else 2 if level <= 20 else 3 if level <= 30 else 4 if level <= 40 else 6)
    return 0


cdef int _drain_log() except -1:
    """Pass queued log lines to Python; report exceptions of the logger without raising them."""
    cdef int level = 0
    cdef string text
    if not lib.has_log():
        return 0
    while lib.take_log(level, text):
        line = _text(text).rstrip()
        if line:
            try:
                _logger.log(_LEVELS[level], "%s", line)
            except Exception as error:
                logging.lastResort.handle(logging.LogRecord(
                    "pykvcache", logging.ERROR, __file__, 0,
                    "a log handler raised %r", (error,), None))
    return 0


cdef str _notes():
    """Return what llama.cpp logged about the failure of this thread's call, in one line."""
    cdef string notes = lib.take_notes()
    text = _text(notes)
    cdef dict lines = {}
    for line in text.splitlines():
        if line.strip():
            lines[line.strip()] = None
    return "; ".join(lines)


cdef str _reason():
    """Return why this thread's call failed, from its exception or what llama.cpp logged; pass the log on."""
    text = _text(lib.caught().text) or _notes() or "llama.cpp gave no reason"
    _drain_log()
    return text


cdef int _check(int32_t code, str where) except -1:
    """Raise what a guarded call caught."""
    if code == lib.CAUGHT:
        raise _caught_error(where)
    return 0


cdef object _caught_error(str where):
    cdef const lib.failure* found = &lib.caught()
    text = _text(found.text)
    if not found.endpoint.empty():
        return DeviceLost(_text(found.endpoint), where, text)
    if found.no_memory:
        return MemoryError(f"{where}: out of memory inside llama.cpp")
    return InternalError(f"{where}: llama.cpp failed: {text or 'unknown C++ exception'}")


def system_info() -> dict:
    """Return the version of llama.cpp, its build options, and the CPU code in use.

    ``cpu`` is the copy of ggml's CPU code in use, one of ``cpu_choices`` (best first); ``native`` if
    compiled for the build machine. The environment variable ``PYKVCACHE_CPU``, read at import,
    selects another.
    """
    return {
        "llama_version": lib.llama_version().decode(),
        "supports_gpu_offload": bool(lib.llama_supports_gpu_offload()),
        "is_plain": bool(lib.is_plain()),
        "cpu": _text(lib.cpu_name()),
        "cpu_choices": tuple(_texts(lib.cpu_names())),
        "max_sequences": lib.llama_max_parallel_sequences(),
    }
