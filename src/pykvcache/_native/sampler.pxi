# A chain of llama.cpp's samplers.

cdef class Sampler:
    """Own a ``llama_sampler`` chain that ends with a choice."""

    cdef lib.llama_sampler* chain
    cdef lib.llama_sampler* grammar
    cdef Model model
    cdef shared_ptr[lib.llama_model] model_ref
    cdef vector[lib.llama_token_data] candidates
    cdef dict params
    cdef int32_t n_vocab

    def __cinit__(self, dict params not None, Model model):
        self.params = params
        self.model = model
        self.n_vocab = 0
        if params["grammar"] is not None:
            if model is None:
                raise ValueError("a grammar needs a model")
            self.build(model, model.share())

    def __dealloc__(self):
        self.free()

    cdef void free(self) noexcept:
        if self.chain != NULL:
            lib.llama_sampler_free(self.chain)
            self.chain = NULL
        if self.grammar != NULL:
            lib.llama_sampler_free(self.grammar)
            self.grammar = NULL

    cdef int build(self, Model model, shared_ptr[lib.llama_model] ref) except -1:
        """Make the chain for a vocabulary; the penalties need to know its size."""
        cdef dict p = self.params
        cdef bytes text, root
        cdef lib.llama_sampler* grammar = NULL
        cdef lib.llama_sampler* chain
        self.free()
        self.model_ref = ref
        if p["grammar"] is not None:
            model.check_vocab()
            text = p["grammar"].encode()
            root = p["grammar_root"].encode()
            lib.begin_notes()
            grammar = lib.sampler_grammar(model.vocab, text, root)
            notes = _notes()
            _drain_log()
            if grammar == NULL:
                why = lib.caught().decode("utf-8", "replace") or notes or "see the GBNF documentation"
                raise ValueError(f"the grammar cannot be parsed: {why}")
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if p["penalty_last_n"] and (
                p["repeat_penalty"] != 1.0 or p["frequency_penalty"] or p["presence_penalty"]):
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_penalties(
                model.n_vocab, p["penalty_last_n"], p["repeat_penalty"],
                p["frequency_penalty"], p["presence_penalty"]))
        if p["temperature"] > 0:
            if p["top_k"] > 0:
                lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_k(p["top_k"]))
            if p["top_p"] < 1:
                lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(p["top_p"], 1))
            if p["min_p"] > 0:
                lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_min_p(p["min_p"], 1))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(p["temperature"]))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(p["seed"]))
        else:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        self.chain = chain
        self.grammar = grammar
        self.n_vocab = model.n_vocab
        return 0

    def reset(self):
        """Forget the tokens that were accepted; the seed starts again."""
        if self.chain != NULL:
            lib.llama_sampler_reset(self.chain)
        if self.grammar != NULL:
            lib.llama_sampler_reset(self.grammar)

    def accept(self, token, Model model not None):
        """Tell the chain about a token that was not sampled by it (a prompt's, for penalties)."""
        model.check_open()
        if self.chain == NULL or self.n_vocab != model.n_vocab:
            self.build(model, model.share())
        cdef int32_t t = model.check_token(token)
        if lib.sampler_accept(self.chain, t) == lib.CAUGHT:
            raise _caught_error("accept")

    def sample(self, Context ctx not None, const float[::1] row not None):
        """Choose a token from a row of the context's logits, and accept it."""
        cdef lib.llama_token_data_array found
        cdef Py_ssize_t t, n = row.shape[0]
        cdef int32_t token
        if self.grammar != NULL and ctx.model is not self.model:
            raise ValueError("the sampler's grammar was made for another model")
        if self.chain == NULL or self.n_vocab != ctx.n_vocab:
            self.build(ctx.model, ctx.model_ref)
        self.candidates.resize(n)
        for t in range(n):
            if row[t] != row[t]:
                raise DecodeError("the logits hold NaN: nothing can be sampled from them")
            self.candidates[t].id = <int32_t>t
            self.candidates[t].logit = row[t]
            self.candidates[t].p = 0
        found.data = self.candidates.data()
        found.size = n
        found.selected = -1
        found.sorted = False
        if self.grammar != NULL:
            if lib.sampler_apply(self.grammar, &found) == lib.CAUGHT:
                raise _caught_error("grammar")
            self.check_allowed(&found)
        if lib.sampler_apply(self.chain, &found) == lib.CAUGHT:
            raise _caught_error("sample")
        if found.selected < 0 or <size_t>found.selected >= found.size:
            raise InternalError("the sampler chain selected nothing")
        token = found.data[found.selected].id
        if self.grammar != NULL and lib.sampler_accept(self.grammar, token) == lib.CAUGHT:
            raise _caught_error("grammar")
        if lib.sampler_accept(self.chain, token) == lib.CAUGHT:
            raise _caught_error("accept")
        return token

    cdef int check_allowed(self, lib.llama_token_data_array* found) except -1:
        cdef size_t t
        for t in range(found.size):
            if found.data[t].logit > -1e30:
                return 0
        raise DecodeError("the grammar allows no further token")
