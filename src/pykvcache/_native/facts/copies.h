// Copies between streams, which llama.cpp queues until the next update.
#pragma once

#include <vector>

#include "edit.h"
#include "probe_memory.h"

namespace pykv {

// Backup of the queued copies. llama.cpp appends a copy to two lists, and clears them before it has created the
// object that performs them, so a failure in between would lose copies. Performing a copy twice is harmless.
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

// llama_memory_seq_cp() into an empty sequence: all or nothing; throws on failure.
void copy_whole(const edit_key &, memory * m, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1);

}  // namespace pykv
