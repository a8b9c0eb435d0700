# Convert Python integers and arrays to C. Integers have a typed error for each wrong value; of arrays only
# exact types are read.

cdef inline object _whole(object value, str what):
    """Convert to an int, once and before a lock is taken, because it may run any Python code."""
    return value if type(value) is int else as_index(value, what)


cdef inline long long _index(object value, str what, int* overflow) except? -1:
    """Read an integer; ``bool`` and ``float`` are not integers here."""
    return PyLong_AsLongLongAndOverflow(_whole(value, what), overflow)


cdef inline bint _is_in(object value, long long lo, long long hi, long long* n) except -1:
    """Read an int; return whether it is in ``[lo, hi]``."""
    cdef int overflow = 0
    n[0] = PyLong_AsLongLongAndOverflow(value, &overflow)
    return not overflow and lo <= n[0] <= hi


cdef inline int32_t _seq(object value, int n_seq_max) except -1:
    """A sequence id in ``[0, n_seq_max)``."""
    cdef long long n = 0
    value = _whole(value, "sequence id")
    if not _is_in(value, 0, n_seq_max - 1, &n):
        raise SeqIdTooLarge(value) if value > INT32_MAX else SequenceIdError(value, n_seq_max)
    return <int32_t>n


cdef inline int32_t _p0(object value, str what="p0") except -1:
    """Convert the start of a range; ``None`` is 0."""
    return _position(value, "p0", what, 0)


cdef inline int32_t _p1(object value, str what="p1") except -1:
    """Convert the end of a range; ``None`` is the end of the sequence."""
    return _position(value, "p1", what, INT32_MAX)


cdef inline int32_t _position(object value, str end, str what, int32_t default) except -1:
    cdef long long n = 0
    if value is None:
        return default
    value = _whole(value, what)
    if not _is_in(value, 0, INT32_MAX, &n):
        if value > 0:
            raise P0TooLarge(value) if end == "p0" else P1TooLarge(value)
        raise PositionError(
            f"{what} is {shown(value)}: positions start at 0", value=value, limit=0, **{end: value})
    return <int32_t>n


cdef inline int _range(object p0, object p1, int32_t* a, int32_t* b) except -1:
    """Convert both ends of a range, which may be empty but not reversed."""
    a[0] = _p0(p0)
    b[0] = _p1(p1)
    if a[0] > b[0]:
        raise PositionError(
            f"the range [{a[0]}, {b[0]}) runs backwards: p0 must not be above p1", a[0], b[0])
    return 0


cdef inline long long _int(object value, str what, long long lo, long long hi) except? -1:
    """Convert an integer in ``[lo, hi]``; ``ValueError`` names the limits."""
    cdef long long n = 0
    value = _whole(value, what)
    if not _is_in(value, lo, hi, &n):
        raise ArgumentError(
            f"{what} is {shown(value)}: it must be in [{lo}, {hi}]",
            what=what, value=value, limit=lo if value < lo else hi)
    return n


cdef inline int32_t _token(object value, long long n_vocab) except -1:
    """Convert a token of a vocabulary."""
    cdef long long n = 0
    value = _whole(value, "token")
    if not _is_in(value, 0, n_vocab - 1, &n):
        raise OutOfRangeError(
            f"token {shown(value)} is outside [0, {n_vocab})",
            what="token", value=value, limit=n_vocab - 1)
    return <int32_t>n


cdef object _ndarray = np.ndarray
cdef object _empty = np.empty
cdef object _INT32 = np.dtype(np.int32)
cdef object _INT64 = np.int64
cdef object _INT8 = np.dtype(np.int8)
cdef object _UINT8 = np.dtype(np.uint8)
cdef object _FLOAT32 = np.dtype(np.float32)
cdef object _int32_scalar = np.int32


cdef void* _address(object array) except? NULL:
    """Return where an array's memory is; it stays there while the array exists."""
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    PyBuffer_Release(&view)
    return view.buf


cdef bint _borrow(object values, Py_buffer* view) except -1:
    """Open a contiguous array for reading; return False for anything else."""
    if type(values) is not _ndarray:
        return False
    try:
        PyObject_GetBuffer(values, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
    except (BufferError, ValueError):
        return False
    return True


cdef inline bint _holds_int32(const Py_buffer* view) noexcept:
    cdef const char* form = view.format
    # NumPy prefixes the format of unaligned arrays; the byte order is native anyway.
    if form[0] == c"=" or form[0] == c"^":
        form += 1
    return (view.itemsize == sizeof(int32_t) and (form[0] == c"i" or form[0] == c"l")
            and form[1] == 0)


cdef bint _plain_ints(object values, vector[int32_t]& out) except -1:
    """Copy an int32 vector, or a list or tuple of ints that fit."""
    cdef Py_buffer view
    cdef PyObject** items
    cdef Py_ssize_t i, n
    cdef int overflow = 0
    cdef long long value
    cdef bint taken
    if _borrow(values, &view):
        try:
            taken = view.ndim == 1 and _holds_int32(&view)
            if taken and view.shape[0]:
                out.resize(view.shape[0])
                memcpy(out.data(), view.buf, view.shape[0] * sizeof(int32_t))
        finally:
            PyBuffer_Release(&view)
        return taken
    if type(values) is not list and type(values) is not tuple:
        return False
    n = len(values)
    out.resize(n)
    items = PySequence_Fast_ITEMS(values)
    for i in range(n):
        if not PyLong_CheckExact(<object>items[i]):
            return False
        value = PyLong_AsLongLongAndOverflow(<object>items[i], &overflow)
        if overflow or value < INT32_MIN or value > INT32_MAX:
            return False
        out[i] = <int32_t>value
    return True


cdef bint _plain_int(object value, int32_t* out) except -1:
    """Read an integer in ``[0, INT32_MAX]``."""
    cdef int overflow = 0
    cdef long long number
    if not PyLong_CheckExact(value):
        if type(value) is not _int32_scalar and type(value) is not _INT64:
            return False
        value = value.__index__()
    number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow or number < 0 or number > INT32_MAX:
        return False
    out[0] = <int32_t>number
    return True


cdef object _tokens(const vector[lib.llama_token]& tokens):
    result = np.empty(tokens.size(), np.int32)
    if tokens.size():
        memcpy(_address(result), tokens.data(), tokens.size() * sizeof(int32_t))
    return result


cdef object _floats(const vector[float]& values):
    result = np.empty(values.size(), np.float32)
    if values.size():
        memcpy(_address(result), values.data(), values.size() * sizeof(float))
    return result
