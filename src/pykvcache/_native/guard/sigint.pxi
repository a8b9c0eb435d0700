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
