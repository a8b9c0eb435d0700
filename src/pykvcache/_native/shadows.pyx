# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: embedsignature=False, initializedcheck=False, auto_pickle=False, autotestdict=False
# cython: subinterpreters_compatible=no, freethreading_compatible=False
"""Trees of blocks without keys and values: what a policy would find and keep, quickly.

llama.cpp has no part in this. A line with ``lib.`` is C.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

from pykvcache._native cimport libshadow as lib

from operator import index

from pykvcache.errors import ArgumentError, ClosedError
from pykvcache.errors._shown import shown

N_BUCKETS = lib.BUCKETS

# Sums of them are numbers of 64 bits, too; no machine has more.
_MOST_BYTES = 1 << 60
_LARGEST_BLOCK = 1 << 34

# There are 2 to that number of heaps.
_MOST_SHADOWS = 10

#: Policies whose choices a shadow makes; `policies.POLICIES` has the classes.
POLICIES = frozenset((
    "lru", "fifo", "lfu", "slru", "s3fifo", "cost-aware", "hit-density", "adaptive",
    "llama-server", "mlx-lm", "vllm"))


def most_hits(
    const uint32_t[::1] ids, const int64_t[::1] sizes, const int64_t[::1] lengths,
    int64_t block_size, int64_t n_blocks,
):
    """Return how many tokens a cache of so many blocks finds that knows the future.

    Of the blocks of all prompts, and of how many blocks and tokens each prompt has.
    """
    cdef int64_t i, n = 0
    if n_blocks < 0 or not 1 <= block_size <= _LARGEST_BLOCK:
        text = f"{n_blocks} blocks of {block_size}: at least 0, of 1 to {_LARGEST_BLOCK}"
        raise ArgumentError(text, "n_blocks", (n_blocks, block_size), _LARGEST_BLOCK)
    if len(sizes) != len(lengths):
        text = f"{len(sizes)} sizes and {len(lengths)} lengths"
        raise ArgumentError(text, "lengths", len(lengths), len(sizes))
    for i in range(len(sizes)):
        if not 0 <= sizes[i] <= len(ids) - n:
            raise ArgumentError(
                f"prompt {i} has {sizes[i]} of {len(ids) - n} blocks", f"sizes[{i}]", sizes[i], len(ids) - n)
        n += sizes[i]
    if n == 0:
        return 0
    return lib.most_hits(&ids[0], &sizes[0], &lengths[0], len(sizes), block_size, n_blocks)


def hit_density(bytes ended not None):
    """Hits per time to be expected of each kind and age, as float64: see `Shadow.learned`."""
    cdef Py_ssize_t n = lib.KINDS * lib.BUCKETS
    cdef vector[float] counts
    cdef bytes out
    if PyBytes_GET_SIZE(ended) != <Py_ssize_t>(lib.ENDS * n * sizeof(float)):
        size = lib.ENDS * n * sizeof(float)
        raise ArgumentError(f"{len(ended)} bytes instead of {size}", "ended", len(ended), size)
    counts.resize(lib.ENDS * n)
    memcpy(counts.data(), PyBytes_AS_STRING(ended), lib.ENDS * n * sizeof(float))
    out = PyBytes_FromStringAndSize(NULL, n * sizeof(double))
    lib.hit_density(counts.data(), <double*><void*>PyBytes_AS_STRING(out))
    return out


cdef inline bytes _bytes(const void* values, size_t size):
    return PyBytes_FromStringAndSize(<const char*>values, <Py_ssize_t>size)


cdef inline const uint32_t* _numbers(bytes values) noexcept:
    return <const uint32_t*><void*>PyBytes_AS_STRING(values)


cdef int64_t _bounded(object size, object most) except? -1:
    return <int64_t>max(0, min(index(size), most))


cdef inline Py_ssize_t _count(bytes values) noexcept:
    return PyBytes_GET_SIZE(values) // 4


def block_keys(bytes tokens not None, Py_ssize_t step, uint32_t start_key):
    """Return a number for each full block, of the path up to and with it, as uint32."""
    if step < 1:
        raise ArgumentError(f"step is {step}: it must be at least 1", "step", step, 1)
    cdef Py_ssize_t i, n = PyBytes_GET_SIZE(tokens) // step
    cdef const unsigned char* at = <const unsigned char*>PyBytes_AS_STRING(tokens)
    cdef bytes keys = PyBytes_FromStringAndSize(NULL, 4 * n)
    cdef uint32_t* out = <uint32_t*><void*>PyBytes_AS_STRING(keys)
    cdef uint32_t key = start_key
    for i in range(n):
        key = lib.next_key(key, at + i * step, step)
        out[i] = key
    return keys


def last_key(bytes tokens not None, Py_ssize_t step, Py_ssize_t n_blocks, uint32_t start_key):
    """Return the last one of `block_keys`; the first one of no blocks."""
    if step < 1 or not 0 <= n_blocks <= PyBytes_GET_SIZE(tokens) // step:
        text = f"{n_blocks} blocks of {step} bytes are not in {len(tokens)}"
        raise ArgumentError(text, "n_blocks", (n_blocks, step), len(tokens))
    cdef Py_ssize_t i
    cdef const unsigned char* at = <const unsigned char*>PyBytes_AS_STRING(tokens)
    cdef uint32_t key = start_key
    for i in range(n_blocks):
        key = lib.next_key(key, at + i * step, step)
    return key


@cython.final
cdef class BlockVotes:
    """Which shadows hold each block, and which run the fewest of them would keep.

    Blocks are known by their numbers, runs by one that whoever asks has given them.
    """

    cdef lib.BlockVotes* votes
    cdef readonly int n_shadows

    def __cinit__(self, int n_shadows):
        if not 1 <= n_shadows <= _MOST_SHADOWS:
            text = f"{n_shadows} shadows: from 1 to {_MOST_SHADOWS} have votes"
            raise ArgumentError(text, "n_shadows", n_shadows, _MOST_SHADOWS)
        self.n_shadows = n_shadows
        self.votes = new lib.BlockVotes(n_shadows)

    def __dealloc__(self):
        del self.votes

    def __len__(self):
        return self.votes.size()

    def __contains__(self, uint32_t key):
        return self.votes.knows(key)

    def sent(self, bytes keys not None):
        """Note that all shadows are sent these blocks."""
        self.votes.sent(_numbers(keys), _count(keys))

    def gone(self, uint32_t bits, bytes keys not None):
        """Note that the shadows of these bits let these blocks go."""
        self.votes.gone(bits, _numbers(keys), _count(keys))

    def forget(self, bytes keys not None):
        """Forget blocks."""
        self.votes.forget(_numbers(keys), _count(keys))

    def keep(self, bytes keys not None):
        """Forget all blocks but these."""
        self.votes.keep(_numbers(keys), _count(keys))

    def drop(self, uint32_t bits):
        """Note that the shadows of these bits vote no more."""
        self.votes.drop(bits)

    def of(self, uint32_t key):
        """Return the votes of a block, a bit for each shadow; all, if nobody knows it."""
        return self.votes.of(key)

    def place(self, int64_t run, uint32_t key, int64_t last_use, int64_t end):
        """Note that a run may leave, whose last block has this key, after a path of so many."""
        self.votes.place(run, key, last_use, end)

    def withdraw(self, int64_t run):
        """Note that a run may not leave any more."""
        self.votes.withdraw(run)

    def weigh(self, list weights not None):
        """Give each shadow's votes a weight."""
        if len(weights) != self.n_shadows:
            text = f"{len(weights)} weights of {self.n_shadows} shadows"
            raise ArgumentError(text, "weights", len(weights), self.n_shadows)
        self.votes.weigh(weights)

    def least(self):
        """Return the run whose last block has the fewest votes, by weight; -1 if there is none."""
        return self.votes.least()

    def alike(self, bytes keys not None):
        """Return how many of the last of some blocks have the same votes as the last one."""
        return self.votes.alike(_numbers(keys), _count(keys)) if _count(keys) else 0

    @property
    def memory(self):
        """What it takes itself, in bytes."""
        return self.votes.memory()


@cython.final
cdef class Shadow:
    """What a tree with a policy and a budget would hold; each block is one number of 32 bits.

    Nothing here is safe for several threads, beyond that each call is whole. One that had no memory
    for a call knows no more what it holds: its other calls raise.
    """

    cdef lib.Tree* tree
    cdef bint is_spent
    cdef readonly str policy

    def __cinit__(self, str policy not None, max_bytes):
        if policy not in POLICIES:
            raise ArgumentError(
                f"there is no policy {shown(policy)}", "policy", policy, tuple(sorted(POLICIES)))
        cdef bytes name = policy.encode()
        self.policy = policy
        self.tree = new lib.Tree(name, _bounded(max_bytes, _MOST_BYTES))

    def __dealloc__(self):
        del self.tree

    cdef int begin(self) except -1:
        if self.is_spent:
            raise ClosedError("this shadow had no memory for a call: make another one", "shadow")
        self.is_spent = True
        return 0

    def send(self, bytes tokens not None, block_bytes):
        """Look a prompt up as a use, and add what is new; return how many blocks were known."""
        cdef int64_t size = _bounded(block_bytes, _LARGEST_BLOCK)
        self.begin()
        found = self.tree.send(_numbers(tokens), _count(tokens), size)
        self.is_spent = False
        return found

    def insert(self, bytes tokens not None, block_bytes):
        """Add what is new, and count no use."""
        cdef int64_t size = _bounded(block_bytes, _LARGEST_BLOCK)
        self.begin()
        self.tree.insert(_numbers(tokens), _count(tokens), size)
        self.is_spent = False

    def n_known(self, bytes tokens not None):
        """Return how many blocks of a path are held; no use is counted."""
        return self.tree.n_known(_numbers(tokens), _count(tokens))

    def uses_at(self, bytes tokens not None, int64_t place):
        """Return how often the block at a place of a path was used; 0 where it is not held."""
        if place < 0:
            return 0
        return self.tree.uses_at(_numbers(tokens), _count(tokens), place)

    def tell(self, BlockVotes votes not None, uint32_t bits):
        """Let the votes know what left during the last call."""
        cdef const vector[uint32_t]* gone = &self.tree.gone()
        votes.votes.gone(bits, gone.data(), gone.size())

    @property
    def gone(self):
        """The numbers of the blocks that left during the last call, as uint32."""
        cdef const vector[uint32_t]* gone = &self.tree.gone()
        return _bytes(gone.data(), gone.size() * sizeof(uint32_t))

    @property
    def max_bytes(self):
        """The budget. Lowering it evicts at once."""
        return self.tree.max_bytes()

    @max_bytes.setter
    def max_bytes(self, value):
        cdef int64_t size = _bounded(value, _MOST_BYTES)
        self.begin()
        self.tree.resize(size)
        self.is_spent = False

    @property
    def n_bytes(self):
        """What its blocks would take."""
        return self.tree.n_bytes()

    @property
    def n_blocks(self):
        """How many blocks it holds."""
        return self.tree.n_blocks()

    @property
    def n_runs(self):
        """Of how many runs."""
        return self.tree.n_runs()

    @property
    def memory(self):
        """What it takes itself, in bytes."""
        return self.tree.memory()

    def learned(self):
        """Return what hit-density has counted, as float32, and by what it chooses, as float64 or nothing."""
        cdef vector[float] ended
        cdef vector[double] density
        self.tree.policy().learned(ended, density)
        return (
            _bytes(ended.data(), ended.size() * sizeof(float)),
            _bytes(density.data(), density.size() * sizeof(double)),
        )
