# LoRA adapters, and contexts that use them.

cdef class Adapter:
    """Own a ``llama_adapter_lora``; freed when neither the program nor a context refers to it."""

    cdef lib.llama_adapter_lora* it
    cdef shared_ptr[lib.llama_model] model_ref
    cdef shared_ptr[lib.adapter_lock] lock
    cdef int generation
    cdef readonly dict metadata
    cdef readonly tuple invocation

    def __cinit__(self, Model model not None, bytes path not None):
        cdef const char* c_path = path
        cdef string problem
        cdef vector[string] texts
        self.generation = _generation
        self.model_ref = model.share()
        self.lock = model.adapters
        if model.vocab_only:
            raise UnsupportedOperation(
                "load_adapter", "the model was loaded with vocab_only=True: it has no weights")
        if lib.is_remote(model.links):
            raise UnsupportedOperation("load_adapter", "layers of the model lie on RPC servers")
        _sync_log()
        with nogil:
            lib.begin_notes()
            self.it = lib.adapter_load(self.model_ref.get(), c_path, self.lock.get()[0], problem)
        why = _reason()
        if self.it == NULL:
            raise ModelLoadError.of(os.fsdecode(path), _text(problem) or why)
        _check(lib.adapter_metadata(self.it, texts), "load_adapter")
        self.metadata = _pairs(texts)
        self.invocation = tuple(lib.adapter_invocation(self.it))

    def __dealloc__(self):
        if self.it != NULL and self.generation == _generation:
            with nogil:
                lib.adapter_free(self.it, self.lock.get()[0])


def control_vector(bytes path not None, int32_t n_layer, int32_t n_embd):
    """Return the directions of a control vector's file: float32, shape (n_layer, n_embd)."""
    cdef const char* c_path = path
    cdef vector[float] values
    cdef string problem
    cdef int32_t code
    with nogil:
        code = lib.control_load(c_path, n_layer, n_embd, values, problem)
    _drain_log()
    _check(code, "load_control_vector")
    if not problem.empty():
        raise ModelLoadError.of(os.fsdecode(path), _text(problem))
    return _floats(values).reshape(n_layer, n_embd)


cdef class Adapted(Decoding):
    """``llama_set_adapters_lora`` and ``llama_set_adapter_cvec``, behind checks."""

    cdef lib.adapter_set used
    # The adapters in use, and the lock of the context's sequences.
    cdef tuple adapters
    cdef object turn
    #: Digests that identify them; empty without adapters.
    cdef readonly tuple adapter_names
    #: The same without the activated adapter (aLoRA), and the tokens that activate it; empty without one.
    cdef readonly tuple base_names
    cdef readonly tuple invocation
    #: Changes with every switch; cells computed before a switch are invalid.
    cdef uint64_t adapters_epoch

    def __cinit__(self, *args):
        self.adapter_names = self.base_names = self.invocation = ()

    def set_adapters(
            self, tuple names not None, tuple base_names not None, tuple adapters not None,
            tuple scales not None, const float[::1] control=None):
        """Use these from now on and clear the memory. All or nothing."""
        cdef lib.adapter_set wanted
        cdef Adapter one
        cdef tuple invocation = ()
        if self.turn is not None and self.turn._is_owned():
            raise ReentryError("adapters cannot change in the middle of a call of this context's sequences")
        for adapter, scale in zip(adapters, scales):
            one = <Adapter?>adapter
            if one.model_ref.get() != self.model_ref.get():
                raise ArgumentError("an adapter belongs to another model, or to one loaded again", "adapters")
            if one.invocation:
                wanted.activated = <int64_t>wanted.loras.size()
                invocation = one.invocation
            wanted.loras.push_back(one.it)
            wanted.scales.push_back(<float>scale)
        if control is not None:
            wanted.control.assign(&control[0], &control[0] + control.shape[0])
        if lib.is_remote(self.links):
            raise UnsupportedOperation("set_adapters", "layers of the model lie on RPC servers")
        with contextlib.nullcontext() if self.turn is None else self.turn:
            self.adapt(wanted)
            self.adapter_names = names
            self.base_names = base_names
            self.invocation = invocation
            self.adapters = adapters  # last: freeing the previous ones lets other threads run

    cdef int adapt(self, lib.adapter_set& wanted) except -1:
        cdef int32_t code
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        _sync_log()
        with nogil:
            lib.begin_notes()
            code = self.seqs.adapt(wanted, self.used)
        why = _reason()
        if code == lib.NOTHING_DONE:
            raise self.fail("set_adapters")
        if code != 0:
            raise UnsupportedOperation("set_adapters", f"this context cannot compute with them: {why}")
        self.forget_outputs("the adapters changed")
        self.used = wanted
        self.adapters_epoch += 1
        return 0
