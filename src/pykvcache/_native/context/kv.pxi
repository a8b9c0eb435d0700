# A live cache as arrays: where tensors are, and reading them under the lock.

# Types that NumPy has; others are passed as bytes of blocks.
cdef dict _FORMATS = {0: (b"f", 4), 1: (b"e", 2), 30: (b"H", 2)}


@cython.no_gc_clear  # releasing an array over this memory needs the context
@cython.final
cdef class Memory3D:
    """Read-only memory of a context as a buffer, which keeps the context from being freed."""

    cdef Handle owner
    cdef Region region
    cdef Py_ssize_t shape[3]
    cdef Py_ssize_t strides[3]

    def __init__(self, *args, **kwargs):
        raise TypeError("Memory3D is made by read_regions()")

    def __dealloc__(self):
        if self.owner is not None:
            self.owner.exports -= 1
            self.owner.free_late()

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        cdef Region r = self.region
        if flags & 0x1:  # PyBUF_WRITABLE
            raise BufferError("views of a cache are read-only")
        self.shape = r.shape
        self.strides = r.strides
        buffer.buf = <void*>r.data
        buffer.obj = self
        buffer.len = r.shape[0] * r.shape[1] * r.shape[2] * r.itemsize
        buffer.itemsize = r.itemsize
        buffer.readonly = 1
        buffer.ndim = 3
        buffer.format = r.format
        buffer.shape = self.shape
        buffer.strides = self.strides
        buffer.suboffsets = NULL
        buffer.internal = NULL


@cython.final
cdef class Region:
    """Part of a live tensor, shape (tokens, heads, values); valid until cells change."""

    cdef readonly Handle owner
    cdef uint64_t epoch
    cdef const char* data
    cdef Py_ssize_t shape[3]
    cdef Py_ssize_t strides[3]
    cdef Py_ssize_t itemsize
    cdef bytes format

    def __init__(self, *args, **kwargs):
        raise TypeError("Region is made by Context.take()")

    @property
    def is_valid(self):
        """Whether the cells are unchanged, so that reading succeeds."""
        return not self.owner.is_closed and self.epoch == self.owner.seqs.epoch()


cdef Region _region(
        Handle owner, lib.live_tensor t, Py_ssize_t n, Py_ssize_t first, Py_ssize_t step):
    cdef Region r = Region.__new__(Region)
    r.owner = owner
    r.epoch = owner.seqs.epoch()
    r.data = t.data + first * <Py_ssize_t>t.cell_stride
    r.shape = [n, t.n_head, t.head_dim]
    r.strides = [step * <Py_ssize_t>t.cell_stride, t.head_stride, t.value_stride]
    if t.type in _FORMATS:
        r.format, r.itemsize = _FORMATS[t.type]
    else:
        r.format, r.itemsize = b"B", 1
        r.shape[2] = lib.bytes_of(t.type, t.head_dim)
        r.strides[2] = 1
    return r


def read_regions(list regions, func):
    """Call ``func(*arrays)`` over regions of one context, under its lock.

    The result of `func` must not refer to the arrays: it is used without the lock.
    """
    if not regions:
        raise ArgumentError("there are no regions to read", what="regions")
    cdef Handle owner = (<Region?>regions[0]).owner  # kept until _read_regions has unlocked it
    return _read_regions(owner, regions, func)


cdef object _read_regions(Handle owner, list regions, object func):
    cdef Region region
    cdef Memory3D memory
    cdef list arrays = []
    cdef lib.scoped_lock locked
    owner.lock_read(locked)
    for region in regions:
        if region.owner is not owner:
            raise ArgumentError("the regions are of different contexts", what="regions")
        if region.epoch != owner.seqs.epoch():
            raise StaleViewError("the cache was changed since this view was made: make a new one")
        memory = Memory3D.__new__(Memory3D)
        memory.region = region
        memory.owner = owner
        owner.exports += 1
        arrays.append(np.asarray(memory))
    return func(*arrays)


cdef class Arrays(Cells):
    def tensors(self, str part not None):
        """Return (layer, (type, heads, dim) of keys, the same of values or None) of one part.

        For the recurrent part: of the states r and s, each of which a layer may lack.
        """
        cdef lib.memory_part which = _part(part)
        cdef lib.live_tensor a, b
        cdef uint32_t il
        cdef list result = []
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        for il in lib.part_layers(self.mem, which):
            a = lib.tensor_at(self.mem, which, il, 0, 0)
            b = lib.tensor_at(self.mem, which, il, 1, 0)
            result.append((
                il,
                (a.type, a.n_head, a.head_dim) if a.data != NULL else None,
                (b.type, b.n_head, b.head_dim) if b.data != NULL else None))
        return result

    def hadamard(self, str part not None):
        """Return the sizes of the Hadamard matrices applied to K and V; 0 for none."""
        cdef lib.hadamard_facts facts
        cdef lib.memory_part which = _part(part)
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        facts = lib.part_hadamard(self.mem, which)
        return facts.keys, facts.values

    def rope(self, uint32_t layer):
        """Return how the graph rotates a layer's keys; None if it has none or does not rotate them."""
        settings = self.rope_settings(layer)
        return None if settings is None or (settings["known"] and settings["type"] < 0) else settings

    def rope_settings(self, uint32_t layer):
        """Return the rotation settings of a layer; None if it has no keys.

        Equal settings of one model rotate alike. ``known`` is False if the graph does something that these
        settings do not describe. If it could not be read, they are the context's.
        """
        cdef lib.key_rope rope
        cdef vector[float] factors
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        if not lib.has_keys(self.mem, layer):
            return None
        rope = lib.rope_at(self.mem, layer)
        with nogil:
            factors = lib.rope_factors(rope)
        _check_lost(self.links, "kv")
        return {
            **dict(rope.facts),
            "known": bool(rope.known),
            "joined": bool(rope.joined),
            "freq_factors": _floats(factors),
        }

    def take(self, seq_id, bint copy):
        """Return a sequence's cells: per part (part, positions, extended or None, layers).

        The recurrent part has its first position in place of `extended`. Layers are (layer, type,
        data, type, data): K and V, or the states r and s, one of which may be None. Data is bytes
        (tokens, heads, bytes of a head), or a `Region` if not copied. Tokens are ordered by
        position; pending updates are applied first.
        """
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef lib.memory_part part
        cdef vector[lib.live_cell] cells
        cdef int32_t[::1] pos
        cdef int32_t[:, ::1] ext
        cdef list parts = []
        cdef Py_ssize_t i
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.need_memory("kv")
        self.check_usable()
        self.check_readable(seq)
        self.apply_pending()
        for name in _PARTS:
            part = <lib.memory_part><int>_PARTS[name]
            if not lib.has_part(self.mem, part):
                continue
            cells = lib.part_cells(self.mem, part, seq)
            positions = np.empty(cells.size(), np.int32)
            pos = positions
            for i in range(<Py_ssize_t>cells.size()):
                pos[i] = cells[i].pos
            extended = None
            if part == lib.PART_RECURRENT:
                extended = lib.extent_of(self.mem, seq).lo
            elif lib.has_extended(self.mem):
                extended = np.empty((cells.size(), 3), np.int32)
                if cells.size():
                    ext = extended
                    lib.read_extended(self.mem, part, seq, cells, &ext[0, 0])
            parts.append((name, positions, extended, self.layers_of(part, seq, cells, copy)))
        return parts

    cdef int check_readable(self, int32_t seq) except -1:
        if self.traits.kind == lib.MEMORY_OTHER or self.traits.picks_blocks:
            raise UnsupportedOperation(
                "kv", f"the layout of {_text(self.traits.name)} is not known here")
        return self.need_whole("kv", seq)

    cdef list layers_of(
            self, lib.memory_part part, int32_t seq, vector[lib.live_cell]& cells, bint copy):
        cdef Py_ssize_t i, n = <Py_ssize_t>cells.size(), first = 0, step = 1
        cdef uint32_t il
        cdef int which
        cdef list layers = []
        cdef list layer
        cdef lib.live_tensor t
        if n:
            first = cells[0].cell
        if n > 1:
            step = <Py_ssize_t>cells[1].cell - first
        for i in range(n if not copy else 0):
            if <Py_ssize_t>cells[i].cell != first + i * step:
                raise UnsupportedOperation(
                    "kv", f"the {n} cells of sequence {seq} are not evenly spaced in the cache: "
                    "read a copy, with copy=True", "sequence")
        for il in lib.part_layers(self.mem, part):
            layer = [il]
            for which in range(2):
                t = lib.tensor_at(self.mem, part, il, which, seq)
                if t.data == NULL:
                    layer += [None, None]
                elif copy:
                    layer += [t.type, self.copy_rows(part, il, which, seq, cells, t)]
                elif t.host:
                    layer += [t.type, _region(self, t, n, first, step)]
                else:
                    raise UnsupportedOperation(
                        "kv", f"layer {il} lies in the memory of a device ({_text(lib.buffer_of(t))}): "
                        "read a copy, with copy=True",
                        "context")
            layers.append(tuple(layer))
        return layers

    cdef object copy_rows(
            self, lib.memory_part part, uint32_t il, int which, int32_t seq,
            vector[lib.live_cell]& cells, lib.live_tensor t):
        cdef Py_ssize_t n = <Py_ssize_t>cells.size()
        cdef size_t head = lib.bytes_of(t.type, t.head_dim)
        cdef uint8_t[::1] view
        cdef int32_t code
        rows = np.empty(n * t.n_head * head, np.uint8)
        if rows.size:
            view = rows
            with nogil:
                code = lib.read_rows(self.mem, part, il, which, seq, cells, &view[0])
            _check(code, "kv")
        if not t.transposed:
            return rows.reshape(n, t.n_head, head)
        rows = rows.view(f"V{t.cell_stride}").reshape(t.n_head, t.head_dim, n).transpose(2, 0, 1)
        return np.ascontiguousarray(rows).view(np.uint8).reshape(n, t.n_head, head)


def largest_value(uint64_t n, bint as_f16=False):
    """Return the largest value that rows of n values may hold without overflowing products."""
    return lib.largest_value(n, as_f16)


def dequantize(int ggml_type, const uint8_t[::1] data not None):
    """Convert stored values to float32 (the type's ``to_float``)."""
    cdef Py_ssize_t size = lib.bytes_of(ggml_type, lib.block_of(ggml_type)), n
    cdef float[::1] view
    cdef bint done
    if size == 0 or data.shape[0] % size != 0:
        raise ArgumentError(
            f"{data.shape[0]} bytes are not whole blocks of type {ggml_type}",
            what="bytes", value=data.shape[0], limit=ggml_type)
    n = data.shape[0] // size * lib.block_of(ggml_type)
    result = np.empty(n, np.float32)
    if n == 0:
        return result
    view = result
    with nogil:
        done = lib.dequantize(<lib.ggml_type>ggml_type, &data[0], &view[0], n)
    if not done:
        raise ArgumentError(f"ggml cannot convert type {ggml_type} to float32", what="type", value=ggml_type)
    return result


def quantize(int ggml_type, const float[::1] values not None):
    """Convert finite float32 values to a stored type, as llama.cpp does when it stores K and V."""
    cdef Py_ssize_t n = values.shape[0]
    cdef size_t size = lib.bytes_of(ggml_type, n)
    cdef uint8_t[::1] view
    cdef bint done
    if n == 0:
        return np.empty(0, np.uint8)
    if size == 0:
        raise ArgumentError(
            f"{n} values are not whole blocks of type {ggml_type}", what="values", value=n, limit=ggml_type)
    if not np.isfinite(values).all():
        raise ArgumentError("the values hold NaN or infinity", what="values")
    result = np.empty(size, np.uint8)
    view = result
    with nogil:
        done = lib.quantize(<lib.ggml_type>ggml_type, &values[0], &view[0], n)
    if not done:
        raise ArgumentError(f"ggml cannot convert float32 to type {ggml_type}", what="type", value=ggml_type)
    return result
