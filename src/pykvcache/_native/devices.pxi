# What ggml computes on, and how often it was asked; servers of ggml's RPC, which tests use as a device.


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
    return [(_text(found[i].name), found[i].kind, _text(found[i].backend), _text(found[i].description),
             found[i].free, found[i].total) for i in range(found.size())]


def max_devices():
    """Return how many devices a model can be given (``llama_max_devices``)."""
    return lib.llama_max_devices()


cdef int _rpc_done(int32_t code, str what) except -1:
    if code == lib.CAUGHT:
        raise _caught_error(what)
    if code == 1:
        raise UnsupportedOperation(what, "this build has no RPC (-DGGML_RPC=ON)", "build")
    return 0


def rpc_connect(bytes endpoint not None):
    """Make the devices of an RPC server, ``b"host:port"``, known to models that are loaded from now on."""
    cdef const char* where = endpoint
    cdef int32_t code
    # When a buffer is freed the server forgets its graph, and a client that asks for it again is ended.
    # Contexts look at this when they are made.
    os.environ["LLAMA_GRAPH_REUSE_DISABLE"] = "1"
    with nogil:
        code = lib.rpc_connect(where)
    _rpc_done(code, "rpc_connect")


def rpc_serve(bytes endpoint not None):
    """Serve this process's CPU over RPC until the process ends; return where it cannot."""
    cdef const char* where = endpoint
    cdef int32_t code
    with nogil:
        code = lib.rpc_serve(where)
    _rpc_done(code, "rpc_serve")


def transfers():
    """Return what was asked of devices since the process began: reads, writes, bytes of each; for tests."""
    cdef lib.transfer_counts n = lib.transfers()
    return n.reads, n.writes, n.bytes_read, n.bytes_written


def hide_host(bint hidden, bint even=False):
    """Treat all tensors as if they lay in the memory of a device, or no longer; for tests.

    With `even`, of one that copies runs at even distances by one request.
    """
    lib.hide_host(hidden, even)
