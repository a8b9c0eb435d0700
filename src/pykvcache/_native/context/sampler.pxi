# Sampling in stages: bias, grammar, penalties, cuts and temperature, choice.

# llama.cpp's grammar code recurses once per character of a token.
cdef enum:
    PIECE_MAX = 2048


cdef class _Call:
    """A Python stage, and the exception that it raised."""

    cdef object call
    cdef object error

    def __cinit__(self, call):
        self.call = call


cdef cbool _call_stage(void* box, const lib.llama_token* ids, float* logits, size_t n) noexcept with gil:
    """Call a Python stage; the call that asked for the token re-raises its exception."""
    cdef _Call own = <_Call>box
    cdef int32_t[::1] to_ids
    cdef float[::1] values
    try:
        given_ids, given = np.empty(n, np.int32), np.empty(n, np.float32)
        if n == 0:
            return True
        to_ids, values = given_ids, given
        memcpy(&to_ids[0], ids, n * sizeof(int32_t))
        memcpy(&values[0], logits, n * sizeof(float))
        changed = own.call(given_ids, given)
        result = np.asarray(given if changed is None else changed)
        if result.shape != (n,) or result.dtype.kind not in "fiu":
            raise ArgumentError(
                f"a stage returned an array of shape {result.shape} and type {result.dtype}: "
                f"float32, shape ({n},) is expected, or None",
                what="stages", value=result.shape, limit=(n,))
        values = np.ascontiguousarray(result, np.float32)
        if not (np.asarray(values) < np.inf).all():
            raise ArgumentError("a stage returned NaN or infinity", what="stages")
        memcpy(logits, &values[0], n * sizeof(float))
        return True
    except BaseException as error:
        own.error = error
        return False


cdef class Sampler:
    """Own the ``llama_sampler`` of each stage; the grammar keeps its model."""

    cdef lib.chooser it
    cdef Model model
    cdef shared_ptr[lib.llama_model] model_ref
    cdef vector[lib.llama_token_data] candidates
    cdef dict params
    # The samplers of params["stages"], which `it` owns.
    cdef vector[lib.llama_sampler*] stages
    # Python stages, to which the samplers have borrowed pointers.
    cdef list calls
    # Highest token of the bias; -1 without a bias.
    cdef int32_t last_bias
    # Vocabulary size of the last logits or the grammar's model; 0 at first.
    cdef int32_t n_vocab
    # Whether a call is choosing a token; a Python stage may let another thread run.
    cdef bint is_in_use

    def __cinit__(
            self, dict params not None, list stages not None, Model model, tuple begin=None,
            Sampler source=None, bint restarts=False):
        self.params = params
        self.calls = []
        self.it.temperature = params["temperature"]
        self.last_bias = -1
        for token, bias in params["logit_bias"].items():
            self.it.bias.push_back(lib.llama_logit_bias(token, bias))
            self.last_bias = max(self.last_bias, <int32_t>token)
        self.model = model
        if source is not None:
            self.model_ref = source.model_ref
            self.n_vocab = source.n_vocab
            self.it.grammar = _copied(source.it.grammar)
        elif model is not None:
            model.check_open()
            self.n_vocab = model.n_vocab
            self.check_bias(model.n_vocab)
        if source is None and params["grammar"] is not None:
            if model is None:
                raise ArgumentError("a grammar needs a model", what="model")
            self.parse(params["grammar"].encode(), params["grammar_root"].encode(), begin)
        self.add_stages(stages, source, restarts)

    cdef int check_unused(self) except -1:
        """Refuse a call from within a stage, or from another thread while a stage runs."""
        if self.is_in_use:
            raise ReentryError("the sampler is in use: a stage or another thread called it during a call")
        return 0

    cdef int32_t choose(self, const float[::1] row, int32_t* token) except? -1:
        """Choose a token from logits and accept it; return a code of `lib`, CHOSEN if `token` is set."""
        cdef int32_t code
        self.check_unused()
        self.is_in_use = True
        code = self.it.choose(&row[0], <int32_t>row.shape[0], self.candidates, token[0])
        self.is_in_use = False
        return code

    cdef int add_stages(self, list stages, Sampler source, bint restarts) except -1:
        """Make the stages after the grammar, or copy those of `source` with their history.

        A stage is a name and its settings' names, or a call; the last one chooses. Leading penalties are
        kept separate. With `restarts`, stages with a seed are made anew.
        """
        cdef lib.dry_words words
        cdef lib.llama_sampler* one
        cdef Py_ssize_t i, last = len(stages) - 1
        if last < 0 or (source is not None and source.stages.size() != <size_t>len(stages)):
            raise ArgumentError(f"{len(stages)} stages are not a sampler's", what="stages", value=len(stages))
        for i, (stage, settings) in enumerate(stages):
            is_call = callable(stage)
            if is_call:
                # A box of its own also for a copy, so that each finds its own exception.
                box = _Call(stage)
                self.calls.append(box)
                one = _made(lib.sampler_made_of_call(<void*>box, _call_stage))
            elif source is not None and not (restarts and "seed" in settings):
                one = _copied(source.stages[i])
            else:
                if stage == "dry":
                    self.take_words(words)
                one = _made(lib.sampler_made(stage.encode(), self.values_of(settings), words))
            if i == last:
                self.it.choice = one
            elif i == 0 and stage == "penalties":
                self.it.penalties = one
            else:
                if self.it.cuts == NULL:
                    self.it.cuts = _made(lib.sampler_chain())
                _check(lib.sampler_add(self.it.cuts, one), "Sampler")
                if is_call or not lib.sampler_is_plain(stage.encode()):
                    self.it.is_narrowed_further = True
            self.stages.push_back(one)
        self.it.has_call = bool(self.calls)
        return 0

    cdef vector[double] values_of(self, tuple settings) except *:
        return [self.model.n_vocab if one == "n_vocab" else self.params[one] for one in settings]

    cdef int take_words(self, lib.dry_words& words) except -1:
        if self.model.vocab_type == 0:
            raise UnsupportedOperation("Sampler", "DRY needs a vocabulary, and the model has none")
        self.model_ref = self.model.share()
        words.vocab = self.model.vocab
        for text in self.params["dry_sequence_breakers"]:
            words.breakers.push_back(text.encode("utf-8", "surrogatepass"))
        return 0

    cdef int check_pieces(self) except -1:
        """Refuse tokens so long that llama.cpp's grammar code would overflow the stack."""
        cdef int32_t token
        cdef size_t size
        for token in range(lib.llama_vocab_n_tokens(self.model.vocab)):
            size = strlen(lib.llama_vocab_get_text(self.model.vocab, token))
            if size > PIECE_MAX:
                raise UnsupportedOperation(
                    "Sampler",
                    f"token {token} has {size} bytes, and a grammar takes {PIECE_MAX} at most")
        return 0

    cdef int parse(self, bytes text, bytes root, tuple begin) except -1:
        cdef lib.grammar_fault fault
        cdef string prefix
        cdef vector[string] triggers
        fault.at = -1
        if self.model.vocab_type == 0:
            raise UnsupportedOperation("Sampler", "a grammar needs a vocabulary, and the model has none")
        self.model_ref = self.model.share()
        self.check_pieces()
        _check(lib.find_grammar_fault(self.model.vocab, text, fault), "grammar")
        if fault.why.empty():
            lib.begin_notes()
            if begin is not None:
                prefix, triggers = begin
            self.it.grammar = lib.sampler_grammar(self.model.vocab, text, root, prefix.c_str(), triggers)
            notes = _notes()
            _drain_log()
            if self.it.grammar != NULL:
                return 0
            why = _text(lib.caught().text) or notes
            if "left recursion" in why:
                name = _text(fault.rules.at(<size_t>int(why.rpartition(" ")[2])))
                why = f"rule '{name}' can begin with itself (left recursion)"
            elif "does not contain" in why:
                why = f"there is no rule '{root.decode()}' (grammar_root)"
            raise GrammarError(f"the grammar cannot be used: {why}")
        why = _text(fault.why)
        if fault.at < 0:
            raise GrammarError(f"the grammar cannot be parsed: {why}")
        before = text[:fault.at].decode("utf-8", "replace")
        line = before.count("\n") + 1
        column = len(before) - before.rfind("\n")
        rest = text[fault.at:].decode("utf-8", "replace").partition("\n")[0][:20]
        where = f"at {rest!r}" if rest else "at the end of the line" if fault.at < len(text) else "at its end"
        raise GrammarError(
            f"the grammar cannot be parsed: line {line}, column {column}: {why} {where}", line, column)

    def reset(self):
        """Forget accepted tokens; restart the seed and the grammar."""
        self.check_unused()
        _check(self.it.reset(), "reset")

    def clone(self, dict params not None, list stages not None, bint restarts):
        """Return a copy with its history and grammar state; with `restarts`, random numbers begin anew."""
        return Sampler.__new__(Sampler, params, stages, self.model, None, self, restarts)

    def accept(self, token, Model model, bint grammar):
        """Accept a token that was not sampled here; all or nothing."""
        cdef lib.llama_sampler* ahead = NULL
        cdef int32_t t
        self.check_unused()
        if model is not None:
            model.check_open()
            t = _token(token, model.n_vocab)
        else:
            t = _token(token, self.n_vocab or INT32_MAX)
        if grammar and self.it.grammar != NULL:
            # After accepting an illegal token a grammar allows no token at all.
            ahead = _copied(self.it.grammar)
            if lib.sampler_accept(ahead, t) == lib.CAUGHT:
                lib.llama_sampler_free(ahead)
                raise ArgumentError(f"the grammar does not allow token {t} here", what="token", value=t)
        if ((self.it.penalties != NULL and lib.sampler_accept(self.it.penalties, t) == lib.CAUGHT)
                or (self.it.is_narrowed_further and lib.sampler_accept(self.it.cuts, t) == lib.CAUGHT)):
            if ahead != NULL:
                lib.llama_sampler_free(ahead)
            raise _caught_error("accept")
        if ahead != NULL:
            lib.llama_sampler_free(self.it.grammar)
            self.it.grammar = ahead

    def sample(self, Decoding ctx, const float[::1] row not None):
        """Choose a token from a context's or the caller's logits and accept it."""
        cdef int32_t n = self.check_row(ctx, row), token = 0
        cdef int32_t code = self.choose(row, &token)
        if code != lib.CHOSEN:
            raise self.problem(code, ctx is None)
        self.n_vocab = n
        return token

    def logprobs(self, Decoding ctx, const float[::1] row not None):
        """Return the log probability of each token to be sampled next; accept nothing."""
        cdef lib.llama_token_data_array found
        cdef double total = 0, largest
        cdef size_t t
        cdef int32_t code
        result = np.full(row.shape[0], -np.inf, np.float32)
        cdef float[::1] out = result
        cdef lib.llama_sampler* cuts = self.it.cuts
        cdef int32_t n = self.check_row(ctx, row)
        self.check_unused()
        self.it.cuts = _copied(cuts)  # some stages draw random numbers
        self.is_in_use = True
        code = self.it.narrow(&row[0], n, self.candidates)
        self.is_in_use = False
        lib.llama_sampler_free(self.it.cuts)
        self.it.cuts = cuts
        if code != lib.CHOSEN:
            raise self.problem(code, ctx is None)
        found = self.it.found
        if self.params["temperature"] == 0:
            _check(lib.sampler_apply(self.it.choice, &found), "logprobs")
            out[found.data[found.selected].id] = 0
            return result
        largest = found.data[0].logit
        for t in range(found.size):
            largest = max(largest, found.data[t].logit)
        for t in range(found.size):
            total += exp(found.data[t].logit - largest)
        total = log(total)
        for t in range(found.size):
            out[found.data[t].id] = <float>(found.data[t].logit - largest - total)
        return result

    def check(self, Model model not None):
        """Refuse a model that does not fit the sampler's grammar or bias."""
        self.check_model(model, model.n_vocab)

    cdef int32_t check_row(self, Decoding ctx, const float[::1] row) except -1:
        """Return the number of logits; raise if they do not fit this sampler."""
        cdef Py_ssize_t n = row.shape[0]
        self.check_model(None if ctx is None else ctx.model, n)
        return <int32_t>n

    cdef int check_model(self, Model model, Py_ssize_t n) except -1:
        if self.it.grammar != NULL:
            if model is not None and model is not self.model:
                raise ArgumentError("the sampler's grammar was made for another model", what="model")
            if n != self.model.n_vocab:
                raise ArgumentError(
                    f"{n} logits given: the grammar's model has {self.model.n_vocab} tokens",
                    what="logits", value=n, limit=self.model.n_vocab)
        return self.check_bias(n)

    cdef int check_bias(self, Py_ssize_t n) except -1:
        if self.last_bias >= n:
            for token in self.params["logit_bias"]:
                if token >= n:
                    raise OutOfRangeError(
                        f"logit_bias names token {token}: it is outside [0, {n})",
                        what="logit_bias", value=token, limit=n - 1)
        return 0

    cdef object problem(self, int32_t code, bint is_callers):
        cdef int32_t where = self.it.where
        if code == lib.CAUGHT:
            for one in self.calls:
                error = (<_Call>one).error
                if error is not None:
                    (<_Call>one).error = None
                    return error
            stage = self.it.stage
            return _caught_error("grammar" if stage == lib.STAGE_GRAMMAR else
                                 "accept" if stage == lib.STAGE_ACCEPT else "sample")
        if code == lib.CHOICE_NAN or code == lib.CHOICE_INFINITE:
            name, value = ("NaN", NAN) if code == lib.CHOICE_NAN else ("infinite", INFINITY)
            why = f"the logit of token {where} is {name}: nothing can be sampled from these logits"
            if is_callers:
                return ArgumentError(why, what=f"logits[{where}]", value=value, limit="finite, or -inf")
            return OutputNotFinite(why, "logits", None, where, value)
        if code == lib.CHOICE_TOO_LARGE:
            return DecodeError("a bias, penalty or stage makes a logit infinite: choose smaller values")
        if code == lib.CHOICE_NOTHING:
            return InternalError("the sampler chain selected nothing")
        if self.it.grammar == NULL:
            return DecodeError("no token is left: logits, logit_bias and penalties exclude them all")
        return DecodeError(
            "the grammar allows no further token" + (" with this logit_bias" if self.it.bias.size() else ""))


cdef lib.llama_sampler* _made(lib.llama_sampler* sampler) except NULL:
    if sampler == NULL:
        raise _caught_error("Sampler")
    return sampler


cdef lib.llama_sampler* _copied(const lib.llama_sampler* sampler) except? NULL:
    if sampler == NULL:
        return NULL
    return _made(lib.sampler_clone(sampler))
