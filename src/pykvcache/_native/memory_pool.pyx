# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: embedsignature=False, initializedcheck=False, auto_pickle=False, autotestdict=False
# cython: subinterpreters_compatible=no, freethreading_compatible=False
"""Memory of one size that is used again, once nothing refers to it any more.

It comes back in a destructor, where no Ctrl-C can be raised.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.object cimport PyObject
from libc.string cimport memset

import numpy as np

from pykvcache.errors import ArgumentError

cdef extern from "Python.h":
    Py_ssize_t _references "Py_REFCNT"(PyObject* thing)
    PyObject* _kind "(PyObject*)Py_TYPE"(PyObject* thing)

_frombuffer, _uint8 = np.frombuffer, np.dtype(np.uint8)
cdef object _ndarray = np.ndarray

#: Most bytes that pools which were closed leave to later ones of their process.
SPARE_BYTES = 16 << 20

#: Most bytes of a piece; no machine has more.
_LARGEST = 1 << 60


# What is free begins with this.
cdef struct Free:
    Free* next
    Py_ssize_t size


cdef struct Stack:
    Free* top
    Py_ssize_t n_bytes


cdef inline void _push(Stack* stack, void* data, Py_ssize_t size) noexcept:
    cdef Free* one = <Free*>data
    one.next, one.size = stack.top, size
    stack.top = one
    stack.n_bytes += size


cdef inline void* _pop(Stack* stack) noexcept:
    """Return the memory that came last, NULL where there is none; nothing of it says what it was."""
    cdef Free* one = stack.top
    if one != NULL:
        stack.top = one.next
        stack.n_bytes -= one.size
        one.next, one.size = <Free*>NULL, 0
    return one


cdef Stack _spare


def spare_bytes():
    """Return how many bytes closed pools have left to others."""
    return _spare.n_bytes


def drop_spare():
    """Give what closed pools have left back to the allocator."""
    while _spare.top != NULL:
        PyMem_RawFree(_pop(&_spare))


cdef void* _new(Py_ssize_t size) except NULL:
    """Return memory that a closed pool has left, new memory where it had other sizes."""
    cdef void* data = NULL
    if _spare.top != NULL:
        is_fit = _spare.top.size == size
        data = _pop(&_spare)
        if is_fit:
            return data
        PyMem_RawFree(data)
    data = PyMem_RawMalloc(max(size, <Py_ssize_t>sizeof(Free)))
    if data == NULL:
        raise MemoryError(f"no memory for {size} bytes")
    return data


def referred(list things not None, Py_ssize_t own):
    """Return what is in a list that is no array, or that more refers to than so many and the list.

    ``own``: the references of whoever asks.
    """
    cdef Py_ssize_t i
    cdef PyObject* thing
    cdef list found = []
    for i in range(PyList_GET_SIZE(things)):
        thing = PyList_GET_ITEM(things, i)
        if _kind(thing) != <PyObject*>_ndarray or _references(thing) > own + 1:
            found.append(<object>thing)
    return found


@cython.final
@cython.internal
@cython.freelist(64)
@cython.no_gc
cdef class Lent:
    """Memory of a pool, which has it back when this ends."""

    cdef void* data
    cdef Py_ssize_t size
    cdef MemoryPool pool

    def __dealloc__(self):
        if self.data != NULL:
            self.pool.take_back(self.data)

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.size, False, flags)


@cython.final
@cython.no_gc
cdef class MemoryPool:
    """Lends pieces of memory; each call is whole, whatever other threads do.

    Parameters
    ----------
    size
        Bytes of each.
    most_bytes
        Bytes that are kept free; those that are due come on top of it.
    """

    cdef Stack free
    cdef readonly Py_ssize_t size
    #: Bytes that are kept free; what is more stays until `shrink` or `expect`.
    cdef public Py_ssize_t most_bytes
    #: Pieces that something refers to.
    cdef readonly Py_ssize_t n_lent
    #: Bytes that came back and were kept, since it was made.
    cdef readonly Py_ssize_t kept_bytes
    cdef Py_ssize_t due_bytes

    def __cinit__(self, Py_ssize_t size, Py_ssize_t most_bytes):
        if not 1 <= size <= _LARGEST:
            text = f"size is {size}: it must be from 1 to {_LARGEST}"
            raise ArgumentError(text, "size", size, _LARGEST)
        self.size, self.most_bytes = size, most_bytes

    def __dealloc__(self):
        self.shrink_to(0)

    @property
    def n_bytes(self):
        """Bytes that are free, but for those that are due."""
        return max(0, self.free.n_bytes - self.due_bytes)

    def expect(self, Py_ssize_t n):
        """Learn how many pieces are about to be lent: so many may be free, and do not count.

        What was expected before and is not any more goes, where it is too much.
        """
        self.due_bytes = min(max(0, n), _LARGEST // self.size) * self.size
        self.shrink_to(self.most_bytes + self.due_bytes)

    def lend_arrays(self, Py_ssize_t size, Py_ssize_t n):
        """Return n arrays of so many bytes each, whatever they are."""
        cdef list arrays = []
        while len(arrays) < n:
            arrays.append(_frombuffer(self.lend_one(size), _uint8))
        return arrays

    def lend_view(self, Py_ssize_t size):
        """Return memory of so many bytes, whatever they are."""
        return memoryview(self.lend_one(size))

    def add(self):
        """Keep new memory that was written to, if there is room for it; whether there was."""
        cdef void* data
        if not self.has_room():
            return False
        data = PyMem_RawMalloc(max(self.size, <Py_ssize_t>sizeof(Free)))
        if data == NULL:
            raise MemoryError(f"no memory for {self.size} bytes")
        with nogil:
            memset(data, 0, self.size)
        return self.keep(data)

    def shrink(self, Py_ssize_t n_bytes):
        """Give memory back to the allocator until at most so many bytes are free, and what is due."""
        self.shrink_to(n_bytes + self.due_bytes)

    def wipe(self):
        """Write over what is free."""
        cdef Free* one = self.free.top
        while one != NULL:
            memset(<char*>one + sizeof(Free), 0, max(0, self.size - <Py_ssize_t>sizeof(Free)))
            one = one.next

    def close(self):
        """Leave what is free, or a part of it, to later pools, and keep nothing from now on."""
        cdef Py_ssize_t left = min(self.most_bytes, <Py_ssize_t>SPARE_BYTES)
        self.most_bytes = self.due_bytes = 0
        while self.free.top != NULL and self.size <= left:
            left -= self.size
            data = _pop(&self.free)
            memset(data, 0, self.size)
            _push(&_spare, data, self.size)
        self.shrink_to(0)
        while _spare.n_bytes > SPARE_BYTES:
            PyMem_RawFree(_pop(&_spare))

    cdef Lent lend_one(self, Py_ssize_t size):
        if not 0 <= size <= self.size:
            raise ArgumentError(f"{size} bytes: a piece has {self.size}", "size", size, self.size)
        cdef Lent lent = Lent.__new__(Lent)
        lent.pool, lent.size = self, size
        data = _pop(&self.free)
        if data == NULL:
            data = _new(self.size)
        self.n_lent += 1
        lent.data = data
        self.due_bytes = max(0, self.due_bytes - self.size)
        return lent

    cdef void take_back(self, void* data) noexcept:
        self.n_lent -= 1
        if self.keep(data):
            self.kept_bytes += self.size

    cdef bint keep(self, void* data) noexcept:
        if self.has_room():
            _push(&self.free, data, self.size)
            return True
        PyMem_RawFree(data)
        return False

    cdef bint has_room(self) noexcept:
        return self.free.n_bytes + self.size <= self.most_bytes + self.due_bytes

    cdef void shrink_to(self, Py_ssize_t n_bytes) noexcept:
        while self.free.n_bytes > max(0, n_bytes):
            PyMem_RawFree(_pop(&self.free))
