# A lock that is taken and given back without running Python in between: an interrupt (Ctrl-C) can come
# before it is taken or after it was given back, never where it would stay taken.

cdef object _RLock = threading.RLock


cdef class Turns:
    """A reentrant lock that counts how often it was taken; what was dropped meanwhile is reaped."""

    cdef readonly object lock
    cdef readonly object dropped
    cdef readonly Py_ssize_t depth
    cdef readonly uint64_t turns

    def __cinit__(self, *args):
        self.lock = _RLock()
        self.dropped = collections.deque()

    def __enter__(self):
        self.lock.acquire()
        self.depth += 1
        self.turns += 1
        if self.dropped:
            try:
                self.reap()
            except BaseException:
                self.depth -= 1
                self.lock.release()
                raise
        return self

    def __exit__(self, kind, error, trace):
        self.depth -= 1
        self.lock.release()

    def renew(self):
        """Free the lock in a forked child, if another thread of the parent held it.

        Returns whether this thread is not in the middle of something.
        """
        if self.lock.acquire(False):
            self.lock.release()
        else:
            self.lock = _RLock()
            self.depth = 0
        return self.depth == 0

    def reap(self):
        """Free what was dropped; the lock is held. Does nothing here."""


@cython.final
cdef class Checked:
    """Take a turn, and call something with the lock held: what it raises gives the turn back."""

    cdef object turns
    cdef object check

    def __cinit__(self, Turns turns not None, check not None):
        self.turns = turns
        self.check = check

    def __enter__(self):
        self.turns.__enter__()
        try:
            self.check()
        except BaseException:
            self.turns.__exit__(None, None, None)
            raise

    def __exit__(self, kind, error, trace):
        self.turns.__exit__(kind, error, trace)
