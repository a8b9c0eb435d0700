# Choose a copy of ggml's CPU code before any of it runs.

cdef extern from "cpu/cpu.h" namespace "pykv":
    string choose_cpu(const char* wanted) except +
    string cpu_name() except +
    vector[string] cpu_names() except +
    vector[string] c_cpu_features "pykv::cpu_features"() except +

cdef bytes _cpu_wanted = os.environ.get("PYKVCACHE_CPU", "").encode("utf-8", "surrogateescape")
cdef str _cpu_refusal = _text(choose_cpu(_cpu_wanted))
if _cpu_refusal:
    raise ImportError(_cpu_refusal)


def cpu_features():
    """Return this processor's features, among those that compilers may use."""
    return _texts(c_cpu_features())
