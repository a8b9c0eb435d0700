# RPC servers: models on several machines.

cdef extern from "rpc/servers.h" namespace "pykv" nogil:
    cppclass rpc_server:
        shared_ptr[lib.device_link] link
        vector[lib.ggml_backend_dev_t] devices
    const int32_t RPC_NO_BUILD
    const int32_t RPC_LOST
    const int32_t RPC_FORKED
    int32_t rpc_open(const char* endpoint, int64_t timeout_ms, shared_ptr[rpc_server]& out, string& why)
    void rpc_register(const rpc_server&)
    int32_t c_rpc_serve "pykv::rpc_serve"(const char* endpoint, int n_threads, const char* devices)
    shared_ptr[lib.llama_model] own_model_on(lib.llama_model*, const vector[shared_ptr[rpc_server]]&) except +
    lib.device_links rpc_links_of(const lib.llama_model*) except +


cdef class Server:
    """A connected RPC server; stays open as long as this object or a model on it exists."""

    cdef shared_ptr[rpc_server] server
    cdef readonly str endpoint

    def __cinit__(self, str endpoint not None, double timeout):
        cdef bytes text = endpoint.encode()
        cdef const char* where = text
        cdef string why
        cdef int64_t ms = max(1, <int64_t>(timeout * 1000))
        cdef int32_t code
        self.endpoint = endpoint
        with nogil:
            code = rpc_open(where, ms, self.server, why)
        if code == RPC_LOST:
            raise DeviceLost(endpoint, "connect", _text(why))
        _check_rpc(code, "connect")

    @property
    def n_devices(self):
        return self.server.get().devices.size()

    cdef int check(self, str what) except -1:
        cdef const rpc_server* server = self.server.get()
        if server.link.get().is_lost:
            raise DeviceLost(self.endpoint, what, _text(server.link.get().why()))
        return 0

    def register(self):
        """Let all models loaded from now on use its devices; for tests."""
        rpc_register(self.server.get()[0])


cdef int _check_rpc(int32_t code, str what) except -1:
    _check(code, what)
    if code == RPC_NO_BUILD:
        raise UnsupportedOperation(
            what, "this build has no RPC: GGML_RPC=ON builds it, on Linux and macOS", "build")
    if code == RPC_FORKED:
        raise ClosedError("connections to RPC servers belong to the process before fork()")
    return 0


def rpc_serve(str endpoint not None, int n_threads, list devices not None):
    """Serve devices over RPC until the process ends; OSError if it cannot listen."""
    cdef bytes text = endpoint.encode()
    cdef bytes names = ",".join(devices).encode()
    cdef const char* where = text
    cdef const char* c_names = names
    cdef int32_t code
    with nogil:
        code = c_rpc_serve(where, n_threads, c_names)
    _drain_log()
    _check_rpc(code, "rpc_serve")
    raise OSError(f"cannot listen at {endpoint}")
