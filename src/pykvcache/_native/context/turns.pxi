# The lock of a context's sequences.

cdef object _RLock = threading.RLock


cdef class Turns:
    """A reentrant lock; Ctrl-C is deferred while the main thread holds it.

    A turn begins by reaping dropped sequences and ends by calling subscribers.
    """

    cdef readonly object lock
    cdef readonly object dropped
    cdef object _due
    cdef bint _is_calling
    # Whether nested turns are refused.
    cdef bint _is_exclusive
    cdef Handle _context
    cdef uint64_t _adapters_epoch
    cdef readonly Py_ssize_t depth
    cdef readonly uint64_t turns

    def __cinit__(self, context not None, *args):
        self._context = context.native
        self.lock = _RLock()
        (<Adapted>self._context).turn = self.lock
        self.dropped = collections.deque()
        self._due = collections.deque()

    def __enter__(self):
        self.take()
        return self

    def __exit__(self, kind, error, trace):
        self.give()

    cdef int take(self) except -1:
        if self._context.generation != _generation:
            raise ClosedError("this context belongs to the process before fork(); open a new one")
        # Another thread may hold the turn and wait for the context.
        if self._context.lock.is_mine():
            raise ReentryError("a callback of this context called a sequence of it")
        self.lock.acquire()
        if self._is_exclusive:
            self.lock.release()
            raise ReentryError(
                "called in the middle of another call of this context's sequences: by a signal handler, "
                "a finalizer or a policy, say")
        _defer_sigint()
        self.depth += 1
        self.turns += 1
        if self.dropped or self._adapters_epoch != (<Adapted>self._context).adapters_epoch:
            try:
                self.reap()
                if self._adapters_epoch != (<Adapted>self._context).adapters_epoch:
                    self.renounce()
                    self._adapters_epoch = (<Adapted>self._context).adapters_epoch
            except BaseException:
                self.give()
                raise
        return 0

    cdef int give(self) except -1:
        self.depth -= 1
        try:
            if self._due and not self.depth and not self._is_calling:
                self._is_calling = True
                try:
                    while self._due:
                        self._due.popleft()()
                finally:
                    self._is_calling = False
        finally:
            self.lock.release()
            _release_sigint()
        return 0

    def later(self, call not None):
        """Make a call at the end of this thread's outermost turn, still under the lock.

        Returns False if the thread has no turn and no earlier call waits: make the call now.
        """
        if self._due or self._is_calling or (self.depth and self.lock._is_owned()):
            self._due.append(call)
            return True
        return False

    def drop(self, one):
        """Reap an object now, or at the next turn if one is under way. For finalizers."""
        if self._context.is_closed:
            return
        self.dropped.append(one)
        if self._context.generation != _generation or self._context.lock.is_mine():
            return
        if self.lock.acquire(False):
            try:
                if not self.depth:
                    self.take()
                    self.give()
            finally:
                self.lock.release()

    def reap(self):
        """Free dropped sequences, under the lock; a hook for subclasses."""

    def renounce(self):
        """Invalidate the cells of all sequences after an adapter switch; a hook for subclasses."""


@cython.final
cdef class Checked:
    """The turn of one call of a sequence: checks first, and refuses nested turns."""

    cdef Turns turns
    cdef object check

    def __cinit__(self, Turns turns not None, check=None):
        self.turns = turns
        self.check = check

    def __enter__(self):
        self.turns.take()
        if self.check is not None:
            try:
                self.check()
            except BaseException:
                self.turns.give()
                raise
        self.turns._is_exclusive = True

    def __exit__(self, kind, error, trace):
        self.turns._is_exclusive = False
        self.turns.give()
