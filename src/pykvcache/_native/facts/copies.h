// Copies between streams, which wait in lists of llama.cpp's for the next update.
#pragma once

#include <vector>

#include "edit.h"
#include "probe_memory.h"

namespace pykv {

// What waits, kept so that a failure in between loses none of it: llama.cpp notes a copy in two lists, one after the
// other, and takes them all before what carries them out is made. Copying twice is as good as once.
class waiting_copies {
  public:
    explicit waiting_copies(const memory & m);
    void put_back() noexcept;

  private:
    struct kept {
        llama_kv_cache::stream_copy_info * list;
        llama_kv_cache::stream_copy_info   was;
    };
    std::vector<kept> all;
    void keep(llama_kv_cache * cache);
};

// llama_memory_seq_cp() into a sequence that holds nothing: all of it, or it throws and holds nothing again.
void copy_whole(const edit_key &, memory * m, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1);

}  // namespace pykv
