#include "copies.h"

namespace pykv {

namespace opened {

PYKV_OPEN(waiting, llama_kv_cache, sc_info, llama_kv_cache::stream_copy_info llama_kv_cache::*)

}  // namespace opened

void waiting_copies::keep(llama_kv_cache * cache) {
    if (cache) {
        auto & list = cache->*member(opened::waiting());
        all.push_back({ &list, list });
    }
}

waiting_copies::waiting_copies(const memory & m) {
    keep(m.base);
    keep(m.swa);
    // Indexes and compressed cells, copied along.
    if (auto * dsa = dynamic_cast<llama_kv_cache_dsa *>(m.mem)) {
        keep(dsa->get_lid());
    } else if (auto * dsa_iswa = dynamic_cast<llama_kv_cache_dsa_iswa *>(m.mem)) {
        keep(dsa_iswa->get_dsa()->get_lid());
    } else if (auto * msa = dynamic_cast<llama_kv_cache_msa *>(m.mem)) {
        keep(msa->get_idx());
    } else if (auto * idx = dynamic_cast<llama_memory_hybrid_idx *>(m.mem)) {
        keep(idx->get_mem_idx());
    } else if (auto * dsv4 = dynamic_cast<llama_kv_cache_dsv4 *>(m.mem)) {
        for (llama_kv_cache * cache : { dsv4->get_csa(), dsv4->get_hca(), dsv4->get_lid() }) {
            keep(cache);
        }
        for (auto * state : { dsv4->get_csa_state(), dsv4->get_hca_state(), dsv4->get_lid_state() }) {
            if (state) {
                all.push_back({ &state->sc_info, state->sc_info });
            }
        }
    }
}

void waiting_copies::put_back() noexcept {
    for (kept & one : all) {
        one.list->ssrc.swap(one.was.ssrc);
        one.list->sdst.swap(one.was.sdst);
    }
}

void copy_whole(const edit_key &, memory * m, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) {
    waiting_copies waiting(*m);
    try {
        m->mem->seq_cp(src, dst, p0, p1);
    } catch (...) {
        waiting.put_back();
        m->mem->seq_rm(dst, -1, -1);
        throw;
    }
}

}  // namespace pykv
