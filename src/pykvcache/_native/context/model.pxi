# The model: weights and vocabulary, shared by contexts and thread-safe.

cdef cbool _progress_gate(float fraction, void* data) noexcept nogil:
    if lib.loads.is_exiting():
        return False
    return _on_progress(fraction, data) if data != NULL else True


cdef cbool _on_progress(float fraction, void* data) noexcept with gil:
    """Call the Python callback; an exception stops the load and is raised afterwards."""
    cdef list box = <list>data
    try:
        go_on = box[0](fraction) is not False
        box[2] = not go_on
        return go_on
    except BaseException as error:
        box[1] = error
        return False


cdef class Model:
    cdef shared_ptr[lib.llama_model] ref
    cdef int generation
    cdef shared_ptr[lib.adapter_lock] adapters
    cdef const lib.llama_vocab* vocab
    cdef lib.text_vocab texts
    cdef lib.model_facts facts
    cdef readonly int32_t n_vocab, n_ctx_train, n_embd, n_layer, n_head, n_head_kv, n_swa
    cdef int32_t n_embd_out
    cdef readonly int rope_type
    cdef int vocab_type
    cdef readonly bint is_recurrent, is_hybrid, has_encoder, has_decoder, vocab_only
    cdef bint is_diffusion
    cdef readonly object size, n_params, state_values  # values of a recurrent state, over all layers
    cdef readonly tuple cell_sizes  # values of K and V per cell, over all layers
    cdef readonly str description
    cdef readonly object chat_template
    cdef readonly dict metadata
    cdef readonly tuple devices
    # Connections to RPC servers that hold layers; empty if all layers are local.
    cdef lib.device_links links

    def __cinit__(self, bytes path not None, dict params not None, object progress):
        cdef lib.llama_model_params p = lib.llama_model_default_params()
        cdef const char* c_path = path
        cdef lib.llama_model* model
        cdef list box = [progress, None, False]  # callback, its exception, whether it cancelled
        cdef string problem
        cdef vector[lib.ggml_backend_dev_t] devices
        cdef vector[float] split
        cdef vector[shared_ptr[lib.rpc_server]] servers
        cdef lib.ggml_backend_dev_t device
        self.generation = _generation
        self.adapters = lib.new_adapter_lock()
        p.n_gpu_layers = params["n_gpu_layers"]
        p.split_mode = <lib.llama_split_mode><int>params["split_mode"]
        p.load_mode = <lib.llama_load_mode><int>params["load_mode"]
        p.main_gpu = params["main_gpu"]
        for server in params["servers"]:
            servers.push_back((<Server?>server).server)
            for device in servers.back().get().devices:
                devices.push_back(device)
        if params["devices"] is not None:
            for name in params["devices"]:
                devices.push_back(lib.device_named(<bytes?>name))
        if params["devices"] is not None or servers.size():
            if devices.size() > lib.llama_max_devices():
                raise ArgumentError(
                    f"{devices.size()} devices: llama.cpp takes {lib.llama_max_devices()}", "devices",
                    devices.size(), lib.llama_max_devices())
            if p.main_gpu >= max(1, <int>devices.size()):
                raise ArgumentError(
                    f"main_gpu is {p.main_gpu}: there are {devices.size()} devices", "main_gpu",
                    p.main_gpu, devices.size())
            devices.push_back(NULL)
            p.devices = devices.data()
        if params["tensor_split"] is not None:
            split.resize(lib.llama_max_devices(), 0)  # llama.cpp copies all of it
            for i, share in enumerate(params["tensor_split"]):
                split[<size_t>i] = <float>share
            p.tensor_split = split.data()
        p.vocab_only = params["vocab_only"]
        p.check_tensors = params["check_tensors"]
        p.use_extra_bufts = params["use_extra_bufts"]
        p.progress_callback = _progress_gate
        p.progress_callback_user_data = <void*>box if progress is not None else NULL
        _sync_log()
        with nogil:
            problem = lib.header_problem(c_path, p.vocab_only)
            if p.use_extra_bufts and lib.USES_AMX:
                p.use_extra_bufts = lib.multiplies_single_matrices(c_path)
        if not problem.empty():
            raise ModelLoadError.of(os.fsdecode(path), _text(problem))
        with nogil:
            lib.loads.begin()
            lib.begin_notes()
            model = lib.model_load(c_path, p)
            lib.loads.end()
        if model != NULL:
            self.ref = lib.own_model_on(model, servers)
            self.links = lib.rpc_links_of(model)
        why = _reason()
        if box[1] is not None:
            raise box[1]
        _check_lost(self.links, "load")
        if model == NULL:
            for server in params["servers"]:
                (<Server>server).check("load")
            if box[2]:
                why = "cancelled by the progress callback"
            raise ModelLoadError.of(os.fsdecode(path), why)
        _check(lib.read_vocab(lib.llama_model_get_vocab(model), self.texts), "load")
        self.vocab_only = p.vocab_only
        self.read_facts()
        if self.n_layer == 0 and not self.vocab_only:
            raise ModelLoadError.of(os.fsdecode(path), "nextn_predict_layers leaves no layer")

    cdef int read_facts(self) except -1:
        cdef const lib.llama_model* m = self.ref.get()
        cdef const char* template
        self.vocab = lib.llama_model_get_vocab(m)
        self.vocab_type = lib.llama_vocab_type(self.vocab)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)
        self.n_ctx_train = lib.llama_model_n_ctx_train(m)
        self.n_embd = lib.llama_model_n_embd(m)
        self.n_layer = lib.llama_model_n_layer(m)
        self.n_swa = lib.llama_model_n_swa(m)
        self.rope_type = lib.llama_model_rope_type(m)
        self.is_recurrent = lib.llama_model_is_recurrent(m)
        self.is_hybrid = lib.llama_model_is_hybrid(m)
        self.has_encoder = lib.llama_model_has_encoder(m)
        self.is_diffusion = lib.llama_model_is_diffusion(m)
        self.has_decoder = lib.llama_model_has_decoder(m)
        self.size = lib.llama_model_size(m)
        self.n_params = lib.llama_model_n_params(m)
        self.n_embd_out = self.n_embd
        if self.n_layer > 0 and not self.vocab_only:
            self.n_head = lib.llama_model_n_head(m)
            self.n_head_kv = lib.llama_model_n_head_kv(m)
            self.facts = lib.look_at_model(m)
            self.n_embd_out = self.facts.n_embd_out
        self.cell_sizes = self.facts.k_per_cell, self.facts.v_per_cell
        self.state_values = self.facts.state_values
        self.devices = tuple(_texts(lib.devices_of(m)))
        self.description = _text(lib.description_of(m))
        self.metadata = _pairs(lib.metadata_of(m))
        template = lib.llama_model_chat_template(m, NULL)
        self.chat_template = None if template == NULL else template.decode("utf-8", "replace")
        return 0

    cdef shared_ptr[lib.llama_model] share(self) except *:
        self.check_open()
        return self.ref

    cdef int check_open(self) except -1:
        if self.generation != _generation:
            raise ClosedError("this model belongs to the process before fork(); load it again")
        if self.ref.get() == NULL:
            raise ClosedError("the model is closed")
        return 0

    cdef int check_vocab(self) except -1:
        self.check_open()
        if self.vocab_type == 0:
            raise UnsupportedOperation("tokenize", "the model has no vocabulary")
        return 0

    def close(self):
        """Release the model; its contexts keep it alive."""
        self.ref.reset()

    @property
    def is_closed(self):
        return self.ref.get() == NULL or self.generation != _generation

    def heads_divisible(self, int ggml_type, bint keys):
        self.check_open()
        return lib.heads_divisible(self.ref.get(), <lib.ggml_type>ggml_type, keys)

    def special_tokens(self):
        """Return (bos, eos, eot, sep, nl, pad, mask, decoder_start); -1 for none."""
        self.check_open()
        v = self.vocab
        return (
            lib.llama_vocab_bos(v), lib.llama_vocab_eos(v), lib.llama_vocab_eot(v),
            lib.llama_vocab_sep(v), lib.llama_vocab_nl(v), lib.llama_vocab_pad(v),
            lib.llama_vocab_mask(v), lib.llama_model_decoder_start_token(self.ref.get()))

    def adds_special(self):
        self.check_open()
        return bool(lib.llama_vocab_get_add_bos(self.vocab)), bool(lib.llama_vocab_get_add_eos(self.vocab))

    def is_eog(self, token):
        cdef int32_t c_token = _token(token, self.n_vocab)
        self.check_vocab()  # last: converting a token may run anything
        return bool(lib.llama_vocab_is_eog(self.vocab, c_token))

    def tokenize(self, bytes text not None, bint add_special, bint parse_special):
        """Tokenize: find special tokens, call ``llama_tokenize`` between them; without the GIL."""
        cdef const char* c_text = text
        cdef size_t size = len(text)
        cdef lib.token_list out
        cdef int32_t code
        self.check_text(text)
        cdef shared_ptr[lib.llama_model] keep = self.ref
        with nogil:
            code = lib.tokenize(self.texts, c_text, size, add_special, parse_special, out)
        _drain_log()
        _check(code, "tokenize")
        if not out.problem.empty():
            raise UnsupportedOperation("tokenize", _text(out.problem))
        return _tokens(out.tokens)

    def tokenize_whole(self, bytes text not None, bint add_special, bint parse_special):
        """Call ``llama_tokenize`` on a whole text; for tests."""
        cdef vector[lib.llama_token] out
        self.check_text(text)
        _check(
            lib.tokenize_whole(self.vocab, text, len(text), add_special, parse_special, out),
            "tokenize_whole")
        return _tokens(out)

    cdef int check_text(self, bytes text) except -1:
        self.check_vocab()
        if len(text) > INT32_MAX - 16:
            raise ArgumentError(
                f"text of {len(text)} bytes is too long: the limit is {INT32_MAX - 16}",
                what="text", value=len(text), limit=INT32_MAX - 16)
        return 0

    def detokenize(
            self, const int32_t[::1] tokens not None, bint remove_special, bint unparse_special,
            size_t limit):
        """Do what ``llama_detokenize`` does and return bytes; without the GIL."""
        cdef Py_ssize_t i, n = tokens.shape[0]
        cdef vector[lib.llama_token] copy
        cdef string out
        cdef int32_t code, token
        self.check_vocab()
        copy.reserve(n)
        for i in range(n):
            token = tokens[i]
            if token < 0 or token >= self.n_vocab:
                raise OutOfRangeError(
                    f"token {token} (at {i}) is outside [0, {self.n_vocab})",
                    what=f"tokens[{i}]", value=token, limit=self.n_vocab - 1)
            copy.push_back(token)
        cdef shared_ptr[lib.llama_model] keep = self.ref
        with nogil:
            code = lib.detokenize(self.vocab, copy, remove_special, unparse_special, limit, out)
        _drain_log()
        _check(code, "detokenize")
        if not code:
            raise ArgumentError(
                f"the text of {n} tokens is too long: the limit is {limit} bytes",
                what="tokens", value=n, limit=limit)
        return out.data()[:out.size()]

    def token_to_piece(self, token, bint special):
        cdef vector[char] out
        cdef int32_t got, c_token
        c_token = _token(token, self.n_vocab)
        self.check_vocab()  # last: converting a token may run anything
        out.resize(64)
        while True:
            got = lib.token_to_piece(self.vocab, c_token, out.data(), <int32_t>out.size(), special)
            if got == lib.CAUGHT:
                raise _caught_error("token_to_piece")
            if got >= 0:
                return out.data()[:got]
            out.resize(<size_t>(-got))


def split_text(bytes text not None, list patterns not None, bint byte_encode, bint with_std_regex):
    """Split a text into words by patterns, with our matcher or std::regex; for tests."""
    return lib.split_text(text, patterns, byte_encode, with_std_regex)


def multiplies_single_matrices(bytes path not None):
    """Return whether ggml's AMX code computes a model correctly; for tests."""
    return bool(lib.multiplies_single_matrices(path))


def gguf_layout(bytes path not None):
    """Return the offset of a GGUF file's data, and (offset, size) of its tensors."""
    cdef const char* c_path = path
    cdef lib.gguf_context* file
    cdef int64_t i
    with nogil:
        file = lib.gguf_open(c_path)
    _drain_log()
    if file == NULL:
        raise ModelLoadError(f"{os.fsdecode(path)} is not a GGUF file any more")
    try:
        places = []
        for i in range(lib.gguf_get_n_tensors(file)):
            places.append((lib.gguf_get_tensor_offset(file, i), lib.gguf_get_tensor_size(file, i)))
        return lib.gguf_get_data_offset(file), places
    finally:
        lib.gguf_free(file)
