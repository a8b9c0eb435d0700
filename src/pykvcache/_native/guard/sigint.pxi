# Ctrl-C is put off while the main thread changes sequences or decodes. What its handler raises comes out of
# the decode that it stops, or when the change is over.

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
    """Whether Ctrl-C ends a decode; a handler of the program's own decides that itself."""
    return _is_main_thread() and _getsignal(_SIGINT) is _raises_interrupt


cdef int _handle_sigint() except -1:
    """Let the handler of a SIGINT that was put off run now; raises what it raises."""
    if _is_main_thread() and lib.sigint.deliver():
        PyErr_CheckSignals()
    return 0
