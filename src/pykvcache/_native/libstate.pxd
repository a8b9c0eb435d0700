# Our C++ for states, and the object that changes a memory, in the order of its headers. Together with
# libprobe.pxd and libllama.pxd it is ``lib``.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool
from libcpp.string cimport string
from libcpp.vector cimport vector

from pykvcache._native.libprobe cimport *


cdef extern from "probe_state.h" namespace "pykv" nogil:
    enum block_kind:
        BLOCK_CELLS
    enum state_fault:
        STATE_FITS
        STATE_TRUNCATED
        STATE_TRAILING
        STATE_DAMAGED
        STATE_MISMATCH
        STATE_NO_ROOM
        STATE_POSITION
        STATE_VALUE
        STATE_UNKNOWN
    ctypedef struct state_part:
        memory_part part
        uint32_t n_stream
        uint32_t n_cells
        uint32_t n_layer
        bool extended
        bool v_trans
    ctypedef struct state_rows:
        block_kind kind
        uint32_t layer
        int32_t type
        uint32_t n_embd
        uint64_t row_bytes
        uint32_t n_head
        uint32_t head_dim
    ctypedef struct state_block:
        memory_part part
        block_kind kind
        uint32_t stream, layer, n_cells
        uint64_t offset, size
    ctypedef struct state_piece:
        const uint8_t* data
        size_t size

    ctypedef uint32_t part_set
    const part_set NO_PARTS
    const part_set ATTENTION_PARTS
    const part_set WINDOW_PARTS
    const part_set RECURRENT_PARTS
    const part_set PARTIAL_PARTS
    const part_set CELL_PARTS
    const part_set ALL_PARTS
    vector[state_part] state_parts(const memory*, bool v_trans, part_set which) except +
    vector[state_rows] state_rows_of(const memory*, bool v_trans, memory_part) except +
    cdef cppclass fault:
        string why, what
        int64_t value, limit
        bool counted
    state_fault state_check(const memory*, bool v_trans, uint32_t n_seq_max, llama_seq_id, part_set which,
                            const vector[state_piece]&, vector[state_block]& blocks, fault& found,
                            part_set known)
    cdef cppclass seq_state:
        size_t size
    seq_state* seq_state_new(const memory*, bool v_trans, llama_seq_id, llama_pos window_from)
    seq_state* written_state_new(const memory*, llama_seq_id, bool partial)
    seq_state* recurrent_state_new(const memory*, llama_seq_id)
    int32_t seq_state_write(const seq_state*, uint8_t* dst, bool two)
    uint32_t owned_alone(const memory*, llama_seq_id)


cdef extern from "part_edit.h" namespace "pykv" nogil:
    bool window_has_room(const memory*, llama_seq_id, uint32_t n)


cdef extern from "state_layout.h" namespace "pykv" nogil:
    const uint32_t SEQ_MAGIC
    const size_t SEQ_HEAD_BYTES


cdef extern from "state_pieces.h" namespace "pykv" nogil:
    cdef cppclass joined_state:
        vector[state_piece] pieces
    cdef cppclass cell_arrays:
        uint32_t n
        const int32_t* positions
        const int32_t* ext
        const int32_t* offsets
        const llama_seq_id* ids
        vector[const uint8_t*] rows

    int32_t state_join(const memory*, bool v_trans, llama_seq_id, const vector[vector[cell_arrays]]&,
                       joined_state&)
    int32_t state_fit(const memory*, bool v_trans, llama_seq_id, uint32_t n_seq_max,
                      const vector[state_block]&, const vector[state_piece]&, joined_state&)
    size_t n_cell_ids(uint64_t size, uint32_t n, bool extended)
    void read_cells(const uint8_t* at, uint32_t n, bool extended, int32_t* positions, int32_t* ext,
                    int32_t* offsets, llama_seq_id* ids)


cdef extern from "blocks.h" namespace "pykv" nogil:
    cdef cppclass block_layout:
        size_t cell_bytes

    block_layout block_layout_of(const memory*, bool v_trans, memory_part) except +
    bool block_fits(const block_layout&, const uint8_t* data, uint32_t n)
    void block_copy(
        const block_layout&, const uint8_t* src, size_t n_src, size_t first, size_t count,
        uint8_t* dst, size_t n_dst, size_t at)
    int32_t BLOCKS_WRITTEN
    int32_t BLOCKS_VALUES
    int32_t blocks_write(const memory*, bool v_trans, memory_part, llama_seq_id, llama_pos first, uint32_t n,
                         uint32_t last, const vector[uint8_t*]& dst, bool two)
    ctypedef struct block_span:
        const uint8_t* data
        uint32_t n, used
    cdef cppclass block_run:
        llama_pos first
        vector[block_span] blocks
    size_t n_cells(const block_run&)
    int32_t block_join(const memory*, bool v_trans, part_set which, const block_run& attention,
                       const block_run& window, state_piece state, joined_state&)


cdef extern from "sequences.h" namespace "pykv" nogil:
    const int32_t NOTHING_DONE
    const int32_t REFUSED
    cdef cppclass sequence_facts:
        bool open(llama_context*, adapter_lock*)
        int32_t adapt(adapter_set&, adapter_set& before)
        void close()
        const memory* cells()
        uint64_t epoch()
        bool is_pending()
        bool needs_removal(llama_seq_id)
        bool was_damaged(llama_seq_id)
        llama_pos next_pos(llama_seq_id)
        uint64_t input_key(llama_seq_id)
        bool can_resume_at(llama_seq_id, llama_pos p0)
        removal removal_of(llama_seq_id, llama_pos p0, llama_pos p1)
        uint64_t name_version(llama_seq_id) except +
        bool is_version(llama_seq_id, uint64_t id)
        bool row_is_held(size_t row)
        bool was_restored()
        void suspect()
        llama_pos row_pos(size_t row)
        bool rows_are_whole(llama_seq_id)
        void forget_rows()
        void begin()
        int32_t clear(bool data)
        int32_t remove(llama_seq_id, removal what, llama_pos p0, llama_pos p1)
        int32_t keep(llama_seq_id)
        int32_t rewind(llama_seq_id, llama_pos last)
        int32_t copy(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1)
        int32_t shift(llama_seq_id, llama_pos p0, llama_pos p1, llama_pos delta)
        int32_t divide(llama_seq_id, llama_pos p0, llama_pos p1, int d)
        int32_t apply_pending()
        int64_t compact()
        int32_t place(bool v_trans, llama_seq_id, const vector[state_block]& blocks,
                      const vector[state_piece]&, bool two, const llama_pos* firsts)
        int32_t replace(llama_seq_id, const vector[state_piece]&, const llama_pos* firsts)
        int32_t put_back(llama_seq_id, const vector[state_piece]& before)
        int32_t put_part(llama_seq_id, const vector[state_piece]&, llama_pos first, llama_pos last,
                         uint64_t version)
        int32_t decode(const llama_batch&, bool is_first, bool active)
        int32_t encode(const llama_batch&)
