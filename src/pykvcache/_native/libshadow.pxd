# Trees of blocks without keys and values, and what hit-density computes; a part of ``shadows``.

from libc.stdint cimport int64_t, uint32_t
from libcpp cimport bool
from libcpp.vector cimport vector


cdef extern from "shadow/bound.h" namespace "pykv::shadow" nogil:
    int64_t most_hits(
        const uint32_t* ids, const int64_t* sizes, const int64_t* lengths, int64_t n_prompts,
        int64_t block_size, int64_t n_blocks) except +


cdef extern from "shadow/density.h" namespace "pykv::shadow" nogil:
    const int KINDS
    const int BUCKETS
    const int ENDS
    void hit_density(const float* ended, double* out)


cdef extern from "shadow/policy.h" namespace "pykv::shadow" nogil:
    cdef cppclass Policy:
        void learned(vector[float]& ended, vector[double]& density) except +


cdef extern from "shadow/tree.h" namespace "pykv::shadow" nogil:
    cdef cppclass Tree:
        Tree(const char* policy, int64_t max_bytes) except +
        int64_t send(const uint32_t* tokens, int64_t n, int64_t block_bytes) except +
        void insert(const uint32_t* tokens, int64_t n, int64_t block_bytes) except +
        int64_t n_known(const uint32_t* tokens, int64_t n)
        int64_t uses_at(const uint32_t* tokens, int64_t n, int64_t place)
        void resize(int64_t max_bytes) except +
        int64_t max_bytes()
        int64_t n_bytes()
        int64_t n_blocks()
        int64_t n_runs()
        int64_t memory()
        const vector[uint32_t]& gone()
        Policy& policy()


cdef extern from "shadow/keys.h" namespace "pykv::shadow" nogil:
    uint32_t next_key(uint32_t key, const unsigned char* tokens, size_t size)


cdef extern from "shadow/votes.h" namespace "pykv::shadow" nogil:
    cdef cppclass BlockVotes:
        BlockVotes(int n_shadows) except +
        void sent(const uint32_t* keys, size_t n) except +
        void gone(uint32_t bits, const uint32_t* keys, size_t n) except +
        void forget(const uint32_t* keys, size_t n)
        void keep(const uint32_t* keys, size_t n) except +
        void drop(uint32_t bits)
        bool knows(uint32_t key)
        uint32_t of(uint32_t key)
        size_t size()
        void place(int64_t run, uint32_t key, int64_t last_use, int64_t end) except +
        void withdraw(int64_t run)
        void weigh(const vector[double]& weights) except +
        int64_t least() except +
        size_t alike(const uint32_t* keys, size_t n)
        int64_t memory()
