# What ggml computes on, here and on servers of ggml's RPC, and how often it was asked.


def devices():
    """Return the names of the devices that ggml computes on."""
    return _texts(lib.device_names())


def device_facts():
    """Return (name, kind, backend, description, free, total) of each device; memory in bytes."""
    cdef vector[lib.device_facts] found
    cdef size_t i
    cdef int32_t code
    with nogil:
        code = lib.device_list(found)
    if code == lib.CAUGHT:
        raise _caught_error("devices")
    facts = []
    for i in range(found.size()):
        names = _text(found[i].name), found[i].kind, _text(found[i].backend), _text(found[i].description)
        facts.append((*names, found[i].free, found[i].total))
    return facts


def max_devices():
    """Return how many devices a model can be given (``llama_max_devices``)."""
    return lib.llama_max_devices()


cdef class Server:
    """A server of ggml's RPC that is connected: open as long as this lives, or a model that lies on it."""

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
        """How many devices it has."""
        return self.server.get().devices.size()

    cdef int check(self, str what) except -1:
        cdef const lib.rpc_server* server = self.server.get()
        if server.link.get().is_lost:
            raise DeviceLost(self.endpoint, what, _text(server.link.get().why()))
        return 0

    def register(self):
        """Let every model that is loaded from now on use its devices: for tests."""
        lib.rpc_register(self.server.get()[0])


cdef int _check_rpc(int32_t code, str what) except -1:
    if code == lib.CAUGHT:
        raise _caught_error(what)
    if code == lib.RPC_NO_BUILD:
        raise UnsupportedOperation(
            what, "this build has no RPC: install with CMAKE_ARGS=-DGGML_RPC=ON (on Linux or macOS)", "build")
    if code == lib.RPC_FORKED:
        raise ClosedError("connections to RPC servers belong to the process before fork()")
    return 0


def rpc_serve(str endpoint not None, int n_threads, list devices not None):
    """Serve devices over RPC until the process ends; OSError where it cannot begin."""
    cdef bytes text = endpoint.encode()
    cdef bytes names = ",".join(devices).encode()
    cdef const char* where = text
    cdef const char* c_names = names
    cdef int32_t code
    cdef int error = 0
    with nogil:
        code = lib.rpc_serve(where, n_threads, c_names, error)
    _drain_log()
    _check_rpc(code, "rpc_serve")
    raise OSError(error, os.strerror(error), endpoint)


cdef int _check_lost(const lib.rpc_links& links, str what) except -1:
    """Refuse to go on with what lies on a server that was lost."""
    cdef const lib.rpc_link* lost = lib.lost_link(links)
    if lost != NULL:
        raise DeviceLost(_text(lost.endpoint), what, _text(lost.why()))
    return 0


def transfers():
    """Return what was asked of devices since the process began: reads, writes, bytes of each; for tests."""
    cdef lib.transfer_counts n = lib.transfers()
    return n.reads, n.writes, n.bytes_read, n.bytes_written


def hide_host(bint hidden, bint even=False):
    """Treat all tensors as if they lay in the memory of a device, or no longer; for tests.

    With `even`, of one that copies runs at even distances by one request.
    """
    lib.hide_host(hidden, even)
