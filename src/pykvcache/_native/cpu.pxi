# Which of ggml's CPU code runs: chosen before any of it does.

cdef bytes _cpu_wanted = os.environ.get("PYKVCACHE_CPU", "").encode("utf-8", "surrogateescape")
cdef str _cpu_refusal = _text(lib.choose_cpu(_cpu_wanted))
if _cpu_refusal:
    raise ImportError(_cpu_refusal)


def cpu_features():
    """Return the names of what this processor has, of all that compilers may use."""
    return _texts(lib.cpu_features())


cdef list _texts(const vector[string]& texts):
    cdef size_t i
    cdef list found = []
    for i in range(texts.size()):
        found.append(_text(texts[i]))
    return found
