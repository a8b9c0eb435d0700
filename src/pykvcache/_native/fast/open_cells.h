// Write access to llama.cpp's cell sets. Used by the files of this folder only.
#pragma once

#include <algorithm>
#include <set>
#include <vector>

#include "edit.h"
#include "probe_memory.h"

namespace pykv {

namespace opened {

PYKV_OPEN(has_shift, llama_kv_cells, has_shift, bool llama_kv_cells::*)
PYKV_OPEN(used, llama_kv_cells, used, std::set<uint32_t> llama_kv_cells::*)
PYKV_OPEN(pos, llama_kv_cells, pos, std::vector<llama_pos> llama_kv_cells::*)
PYKV_OPEN(ext, llama_kv_cells, ext, std::vector<llama_kv_cell_ext> llama_kv_cells::*)
PYKV_OPEN(shift, llama_kv_cells, shift, std::vector<llama_pos> llama_kv_cells::*)
PYKV_OPEN(seq, llama_kv_cells, seq, std::vector<llama_kv_cells::seq_set_t> llama_kv_cells::*)

}  // namespace opened

// Write access to the cells of a sequence's stream; requires the key.
struct open_cells {
    llama_kv_cells & cells;
    uint32_t &       head;  // start of the search for free cells

    open_cells(const edit_key &, llama_kv_cache & cache, llama_seq_id seq)
        // Legal: the member is not const, only its accessor is.
        : cells(const_cast<llama_kv_cells &>(cache.get_cells(seq))),
          head((cache.*member(opened::v_heads()))[stream_of(cache, seq)]) {}

    bool &               has_shift() { return cells.*member(opened::has_shift()); }
    std::set<uint32_t> & used() { return cells.*member(opened::used()); }
    llama_pos &          pos(uint32_t i) { return (cells.*member(opened::pos()))[i]; }
    llama_kv_cell_ext &  ext(uint32_t i) { return (cells.*member(opened::ext()))[i]; }
    llama_pos &          shift(uint32_t i) { return (cells.*member(opened::shift()))[i]; }
    cell_set &           held(llama_seq_id seq) { return (cells.*member(opened::seq_pos()))[seq]; }
    llama_kv_cells::seq_set_t & members(uint32_t i) { return (cells.*member(opened::seq()))[i]; }
};

// Removes a sequence from cells one by one; a cell without sequences becomes free.
class cell_release {
  public:
    cell_release(open_cells & open, llama_seq_id seq) : open(open), seq(seq), hint(open.used().end()) {}

    // `taken`: another sequence is about to take the cell, so it stays used.
    void operator()(uint32_t i, bool taken = false) noexcept {
        auto & members = open.members(i);
        members.reset(seq);
        if (taken || members.any()) {
            return;
        }
        open.pos(i) = -1;
        open.ext(i).reset();
        open.shift(i) = 0;
        // A sequence's cells are mostly contiguous.
        if (hint == open.used().end() || *hint != i) {
            hint = open.used().find(i);
        }
        hint = open.used().erase(hint);
        open.head = std::min(open.head, i);
    }

  private:
    open_cells &                 open;
    llama_seq_id                 seq;
    std::set<uint32_t>::iterator hint;
};

}  // namespace pykv
