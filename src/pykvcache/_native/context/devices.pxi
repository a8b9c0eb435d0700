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


def transfers():
    """Return transfers since the process began: reads, writes, bytes of each; for tests."""
    cdef lib.transfer_counts n = lib.transfers()
    return n.reads, n.writes, n.bytes_read, n.bytes_written


def hide_host(bint hidden, bint even=False):
    """Treat all tensors as if they were in device memory, or stop doing so; for tests.

    With `even`, of a device that copies evenly spaced runs in one request.
    """
    lib.hide_host(hidden, even)
