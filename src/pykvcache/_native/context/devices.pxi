# ggml's devices, here and on RPC servers, and counts of transfers.

def devices():
    """Return the names of the devices that ggml computes on."""
    return [facts[0] for facts in device_facts()]


def device_facts():
    """Return (name, kind, backend, description, free, total) of each device; memory in bytes."""
    cdef vector[lib.device_facts] found
    cdef size_t i
    cdef int32_t code
    with nogil:
        code = lib.device_list(found)
    _check(code, "devices")
    facts = []
    for i in range(found.size()):
        names = _text(found[i].name), found[i].kind, _text(found[i].backend), _text(found[i].description)
        facts.append((*names, found[i].free, found[i].total))
    return facts


def max_devices():
    return lib.llama_max_devices()


cdef int _check_lost(const lib.device_links& links, str what) except -1:
    """Raise ``DeviceLost`` if a connection was lost."""
    cdef const lib.device_link* lost = lib.lost_link(links)
    if lost != NULL:
        raise DeviceLost(_text(lost.endpoint), what, _text(lost.why()))
    return 0


cdef class Server:
    """A connected RPC server; stays open as long as this object or a model on it exists."""

    cdef shared_ptr[lib.rpc_server] server
    cdef readonly str endpoint

    def __cinit__(self, str endpoint not None, double timeout):
        cdef bytes text = endpoint.encode()
        cdef const char* where = text
        cdef string why
        cdef int64_t ms = max(1, <int64_t>(timeout * 1000))
        cdef int32_t code
        self.endpoint = endpoint
        with nogil:
            code = lib.rpc_open(where, ms, self.server, why)
        if code == lib.RPC_LOST:
            raise DeviceLost(endpoint, "connect", _text(why))
        _check_rpc(code, "connect")

    @property
    def n_devices(self):
        return self.server.get().devices.size()

    cdef int check(self, str what) except -1:
        cdef const lib.rpc_server* server = self.server.get()
        if server.link.get().is_lost:
            raise DeviceLost(self.endpoint, what, _text(server.link.get().why()))
        return 0

    def register(self):
        """Let all models loaded from now on use its devices; for tests."""
        lib.rpc_register(self.server.get()[0])


cdef int _check_rpc(int32_t code, str what) except -1:
    _check(code, what)
    if code == lib.RPC_NO_BUILD:
        raise UnsupportedOperation(
            what, "this build has no RPC: GGML_RPC=ON builds it, on Linux and macOS", "build")
    if code == lib.RPC_FORKED:
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
        code = lib.rpc_serve(where, n_threads, c_names)
    _drain_log()
    _check_rpc(code, "rpc_serve")
    raise OSError(f"cannot listen at {endpoint}")


def transfers():
    """Return transfers since the process began: reads, writes, bytes of each; for tests."""
    cdef lib.transfer_counts n = lib.transfers()
    return n.reads, n.writes, n.bytes_read, n.bytes_written


def hide_host(bint hidden, bint even=False):
    """Treat all tensors as if they were in device memory, or stop doing so; for tests.

    With `even`, of a device that copies evenly spaced runs in one request.
    """
    lib.hide_host(hidden, even)
