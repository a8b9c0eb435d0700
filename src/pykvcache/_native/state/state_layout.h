// The only description of llama.cpp's state layout in code: everything that writes, counts, checks or reads a state
// uses these functions. docs/state-format.md has it as text. Packed, little-endian.
//
// A visitor reads or writes the bytes:
//   magic(value), id(seq), name(arch)   the head
//   field(value, what, rows)            a known number: written, or read and compared
//   cells(part, stream)                 a stream's number of cells and their records; returns the number
//   rows(part, stream, rows, n)         n rows of one kind
#pragma once

#include <cstring>

#include "probe_state.h"

namespace pykv {

constexpr uint32_t SEQ_MAGIC = 0xaf143cd8;  // start of a sequence's state
constexpr size_t   SEQ_HEAD_BYTES = sizeof(uint32_t) + sizeof(llama_seq_id);

// `seq` is -1 for a whole context's state.
template <class Visitor> void visit_head(Visitor & to, llama_seq_id seq, const char * arch) {
    if (seq >= 0) {
        to.magic(SEQ_MAGIC);
        to.id(seq);
    } else {
        to.name(arch);
    }
}

// A cell record: position, number of sequences, extension if the part has one, sequence ids.
constexpr size_t CELL_EXT_BYTES = 3 * sizeof(int32_t);  // llama_kv_cell_ext

constexpr size_t cell_head_bytes(bool extended) {
    return sizeof(llama_pos) + sizeof(uint32_t) + (extended ? CELL_EXT_BYTES : 0);
}

struct cell_head {
    llama_pos       pos;
    uint32_t        n_ids;
    const uint8_t * ext;  // null if the part has none
};

inline cell_head read_cell_head(const uint8_t * at, bool extended) {
    cell_head head;
    std::memcpy(&head.pos, at, sizeof(head.pos));
    std::memcpy(&head.n_ids, at + sizeof(head.pos), sizeof(head.n_ids));
    head.ext = extended ? at + sizeof(head.pos) + sizeof(head.n_ids) : nullptr;
    return head;
}

// Number of ids in a cell of a sequence's state: 1, but 0 in a recurrent part.
inline uint32_t n_ids_of_one(const state_part & part) { return part.part == PART_RECURRENT ? 0 : 1; }

// Bytes of a cell in the state of one sequence.
inline size_t cell_bytes(const state_part & part) {
    return cell_head_bytes(part.extended) + n_ids_of_one(part) * sizeof(llama_seq_id);
}

template <class Visitor> void visit_rows_head(Visitor & to, const state_rows & rows) {
    if (rows.kind != BLOCK_PLE) {
        to.field(rows.type, "the type", &rows);
    }
    if (rows.kind == BLOCK_V_TRANS) {
        to.field(uint32_t(ggml_type_size(ggml_type(rows.type))), "the element size", &rows);
        to.field(rows.n_embd, "the number of values", &rows);
    } else {
        to.field(rows.row_bytes, "the row size", &rows);
    }
}

template <class Visitor> void visit_part(Visitor & to, const state_part & part, const std::vector<state_rows> & kinds) {
    const bool recurrent = part.part == PART_RECURRENT;
    if (!recurrent) {
        to.field(part.n_stream, "the number of streams (kv_unified, n_seq_max)", nullptr);
    }
    for (uint32_t stream = 0; stream < part.n_stream; ++stream) {
        const uint32_t n = to.cells(part, stream);
        if (n == 0 && !recurrent) {
            continue;
        }
        to.field(uint32_t(part.v_trans), "transposition of values (flash_attn off)", nullptr);
        to.field(part.n_layer, "the number of layers", nullptr);
        if (STATES_SAY_ROTATIONS && !recurrent) {
            to.field(uint32_t(part.rotations.keys), "the rotation of keys", nullptr);
            to.field(uint32_t(part.rotations.values), "the rotation of values", nullptr);
        }
        for (const state_rows & rows : kinds) {
            visit_rows_head(to, rows);
            to.rows(part, stream, rows, n);
        }
    }
}

// Base of writing visitors; `Derived` has bytes(data, n).
template <class Derived> class state_output {
  public:
    void magic(uint32_t value) { put(value); }
    void id(llama_seq_id seq) { put(seq); }
    void name(const char * arch) {
        put(uint32_t(std::strlen(arch)));
        self().bytes(arch, std::strlen(arch));
    }
    template <class T> void field(T value, const char *, const state_rows *) { put(value); }

  protected:
    template <class T> void put(T value) { self().bytes(&value, sizeof(value)); }
    void put_cell(const state_part & part, llama_pos pos, const void * ext, const llama_seq_id * ids, uint32_t n_ids) {
        put(pos);
        put(n_ids);
        if (part.extended) {
            self().bytes(ext, CELL_EXT_BYTES);
        }
        self().bytes(ids, n_ids * sizeof(*ids));
    }

  private:
    Derived & self() { return static_cast<Derived &>(*this); }
};

}  // namespace pykv
