# Ctrl-C is put off while the main thread changes sequences or decodes. What its handler raises comes out of the decode
# that it stops, or when the change is over.

cdef unsigned long _main_thread = threading.main_thread().ident


cdef inline bint _is_main_thread() noexcept:
    return PyThread_get_thread_ident() == _main_thread


cdef inline void _defer_sigint() noexcept:
    if _is_main_thread():
        lib.sigint.begin()


cdef inline void _release_sigint() noexcept:
    if _is_main_thread():
        lib.sigint.end()


cdef int _handle_sigint() except -1:
    """Let the handler of a SIGINT that was put off run now; raises what it raises."""
    if _is_main_thread() and lib.sigint.deliver():
        PyErr_CheckSignals()
    return 0
