# A lock that is taken and given back without running Python in between: an interrupt (Ctrl-C) can come
# before it is taken or after it was given back, never where it would stay taken.

cdef extern from "Python.h":
    void* PyEval_GetFrame()

cdef object _RLock = threading.RLock

# Modules that call what they are given, and may stand between two of ours.
cdef frozenset _CALLERS = frozenset(("contextlib", "functools", "weakref", "threading"))


cdef bint _is_ours(object frame) except -1:
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and (
        name == "pykvcache" or name.startswith("pykvcache.") or name in _CALLERS)


cdef class Turns:
    """A reentrant lock that counts how often it was taken; what was dropped meanwhile is reaped.

    What may call anything, as callbacks may, is called when nobody is in the middle of a turn.
    """

    cdef readonly object lock
    cdef readonly object dropped
    cdef object _due
    cdef bint _is_calling
    cdef Handle _context
    # The frame that has the outermost turn: alive until it gives it back.
    cdef void* _holder
    cdef readonly Py_ssize_t depth
    cdef readonly uint64_t turns

    def __cinit__(self, *args):
        self.lock = _RLock()
        self.dropped = collections.deque()
        self._due = collections.deque()

    def watch(self, Handle context not None):
        """Refuse turns in the middle of a call of this context: of a log handler's, say."""
        self._context = context

    def __enter__(self):
        self.take_turn()
        return self

    # Where memory is short, neither a call with arguments nor `except` is sure to run; `finally` is.
    cdef int take_turn(self) except -1:
        cdef bint is_done = False
        # First: another thread may have the turn, and wait for the context.
        if self._context is not None and self._context.lock.is_mine():
            raise ReentryError("a callback of this context called a sequence of it")
        self.lock.acquire()
        try:
            if self.depth:
                self.refuse_foreign()
            else:
                self.note_holder()
            is_done = True
        finally:
            if not is_done:
                self.lock.release()
        self.depth += 1
        self.turns += 1
        if self.dropped:
            is_done = False
            try:
                self.reap()
                is_done = True
            finally:
                if not is_done:
                    self.depth -= 1
                    self.lock.release()
        return 0

    cdef int note_holder(self) except -1:
        self._holder = PyEval_GetFrame()
        if self._holder == NULL:
            try:
                sys._getframe()  # raises where there is no memory for a frame object
            except ValueError:
                return 0  # no Python code runs in this thread
            self._holder = PyEval_GetFrame()
        return 0

    cdef int refuse_foreign(self) except -1:
        """Raise where code that is not ours stands between the turn that this thread has and this one."""
        if PyEval_GetFrame() == NULL:
            return 0
        frame = <object>PyEval_GetFrame()
        while frame is not None and <void*>frame != self._holder:
            if not _is_ours(frame):
                raise ReentryError(
                    "called in the middle of another call of this context's sequences: by a signal handler, "
                    "a finalizer or a policy, say")
            frame = frame.f_back
        return 0

    def __exit__(self, kind, error, trace):
        self.give_turn()

    cdef int give_turn(self) except -1:
        self.depth -= 1
        if not self._due or self.depth or self._is_calling:
            self.lock.release()
            return 0
        self._is_calling = True
        try:
            while self._due:
                try:
                    self._due[0]()
                except KeyboardInterrupt:
                    raise  # what an interrupt cuts short is called again
                except BaseException:
                    self._due.popleft()
                    raise
                self._due.popleft()
        finally:
            # No other thread can run between the last look and this.
            self._is_calling = False
            self.lock.release()
        return 0

    def later(self, call not None):
        """Make a call at the end of this thread's outermost turn, the lock still held.

        Returns False where it has none, and nothing waits that came before it: to be called now.
        """
        if self._due or self._is_calling or (self.depth and self.lock._is_owned()):
            self._due.append(call)
            return True
        return False

    def renew(self):
        """Free the lock in a forked child, if another thread of the parent held it.

        Returns whether this thread is not in the middle of something.
        """
        if self.lock.acquire(False):
            self.lock.release()
        else:
            self.lock = _RLock()
            self.depth = 0
            self._is_calling = False
        return self.depth == 0

    def reap(self):
        """Free what was dropped; the lock is held. Does nothing here."""


@cython.final
cdef class Checked:
    """Take a turn, and call something with the lock held: what it raises gives the turn back."""

    cdef Turns turns
    cdef object check

    def __cinit__(self, Turns turns not None, check not None):
        self.turns = turns
        self.check = check

    def __enter__(self):
        cdef bint is_done = False
        self.turns.take_turn()
        try:
            self.check()
            is_done = True
        finally:
            if not is_done:
                self.turns.give_turn()

    def __exit__(self, kind, error, trace):
        self.turns.give_turn()
