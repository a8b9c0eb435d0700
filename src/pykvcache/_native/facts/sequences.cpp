// Change a context's memory together with the facts about its sequences.
#include <algorithm>
#include <limits>
#include <shared_mutex>

#include "edit.h"
#include "sequences.h"

namespace pykv {

constexpr llama_pos END = std::numeric_limits<llama_pos>::max();

bool sequence_facts::open(llama_context * context, adapter_lock * adapters) noexcept {
    model_adapters = adapters;
    mem = memory_new(context);
    if (!mem) {
        return false;
    }
    ctx = context;
    n_seq_max = llama_seq_id(llama_n_seq_max(ctx));
    traits = traits_of(mem);
    return true;
}

sequence_facts::~sequence_facts() { close(); }

void sequence_facts::close() noexcept {
    memory_delete(mem);
    mem = nullptr;
    ctx = nullptr;
}

// Effects on the facts ------------------------------------------------------------------------

// Cells at `from` or later changed.
void sequence_facts::changed(llama_seq_id seq, llama_pos from) noexcept {
    ++changes;
    freed = true;
    versions.changed(seq, from);
    rows.removed(seq, from);
}

void sequence_facts::removed(llama_seq_id seq, llama_pos from) noexcept {
    changed(seq, from);
    forget_earlier({}, mem, seq);
}

void sequence_facts::moved(llama_seq_id seq, llama_pos from, llama_pos to) noexcept {
    removed(seq, std::min(from, to));
    pending = true;
}

// `dst` became a copy of `src` below `end`; 0 if the copy is not a prefix of src.
void sequence_facts::copied(llama_seq_id src, llama_seq_id dst, llama_pos end) noexcept {
    removed(dst, 0);
    rows.copied(src, dst, end);
    pending = pending || traits.n_stream > 1;
    // The cells depend on the source's encoder input, so the copy needs the same one.
    if (input_key(src) != input_key(dst)) {
        input_keys[size_t(dst)] = 0;
    }
    if (traits.whole_only) {
        set_first({}, mem, dst, extent_of(mem, src).lo);
        share_earlier({}, mem, src, dst);
    }
}

void sequence_facts::restored(llama_seq_id seq, const llama_pos * firsts) noexcept {
    ++changes;
    for (llama_seq_id s = 0; s < n_seq_max; ++s) {
        if (seq < 0 || s == seq) {
            versions.changed(s, 0);
            rows.restored(s);
            damaged.reset(size_t(s));
            set_first({}, mem, s, firsts[s]);
            forget_earlier({}, mem, s);
        }
    }
}

void sequence_facts::cleared() noexcept {
    ++changes;
    freed = true;
    versions.all_changed();
    rows.cleared();
    damaged.reset();
    pending = pending && traits.n_stream > 1;
    forget_earlier({}, mem, -1);
}

void sequence_facts::decoded(const llama_batch & batch) noexcept {
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        if (!batch.logits[i]) {
            continue;
        }
        if (traits.kind == MEMORY_NONE) {
            rows.encoded();
        } else {
            rows.decoded(batch.pos[i], batch.seq_id[i], batch.n_seq_id[i]);
        }
    }
}

// Mark the sequences that a failed decode left unusable until they are removed.
void sequence_facts::failed(const llama_batch & batch, int32_t code, const int32_t * states_before) noexcept {
    const bool stopped = code != -1 && code != REFUSED;
    last_damaged.reset();
    if (stopped && traits.whole_only) {
        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            last_damaged.set(size_t(batch.seq_id[i][0]));
        }
        forget_free_states({}, mem);
        // States change cells before the graph copies their data, so even a sequence
        // outside the batch may have moved without its data.
        for (llama_seq_id s = 0; s < n_seq_max; ++s) {
            if (state_cell(mem, s) != states_before[s]) {
                last_damaged.set(size_t(s));
            }
        }
    }
    if (stopped) {
        roll_back_coupled(batch);
    }
    if (code != -1 && traits.kind != MEMORY_NONE) {
        // A failed search for room may have dropped window cells.
        for (llama_seq_id s = 0; s < n_seq_max; ++s) {
            if (!window_intact(mem, s, next_pos(s))) {
                last_damaged.set(size_t(s));
            }
        }
    }
    damaged |= last_damaged;
}

// llama.cpp rolls a failed step back for only one sequence of each token.
void sequence_facts::roll_back_coupled(const llama_batch & batch) noexcept {
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        const llama_pos pos = batch.pos[i];
        if (batch.n_seq_id[i] < 2) {
            continue;
        }
        llama_pos next = pos + 1;
        for (int32_t j = 0; j < batch.n_seq_id[i]; ++j) {
            next = std::min(next, next_pos(batch.seq_id[i][j]));
        }
        for (int32_t j = 0; pos >= next && j < batch.n_seq_id[i]; ++j) {
            removed(batch.seq_id[i][j], pos);
            remove_cells({}, mem, batch.seq_id[i][j], pos, END);
        }
    }
}

// Changes ---------------------------------------------------------------------------------------------

int32_t sequence_facts::clear(bool data) noexcept {
    const int32_t code = traits.kind != MEMORY_NONE ? clear_cells({}, mem, data) : 0;
    cleared();
    return code;
}

int32_t sequence_facts::adapt(adapter_set & set, adapter_set & before) noexcept {
    ++changes;
    int32_t code;
    {
        const std::shared_lock<adapter_lock> read(*model_adapters);
        code = use_adapters({}, ctx, set, base);
        if (code != 0) {
            return use_adapters({}, ctx, before, base) == 0 ? code : NOTHING_DONE;
        }
    }
    code = clear(false);
    input_keys.fill(0);
    rows.forget();
    return code;
}

int32_t sequence_facts::remove(llama_seq_id seq, llama_pos p0, llama_pos p1) noexcept {
    const removal what = kind_of(seq, p0, p1);
    return what == REMOVE_REFUSED ? REFUSED : remove_as(what, seq, p0, p1);
}

int32_t sequence_facts::remove_as(removal what, llama_seq_id seq, llama_pos p0, llama_pos p1) noexcept {
    if (what == REMOVE_NOTHING) {
        return 0;
    }
    if (what == REMOVE_EMPTY) {
        // Skips llama.cpp's walk over every cell of the cache.
        damaged.reset(size_t(seq));
        return 0;
    }
    if (what == REMOVE_STEPS) {
        changed(seq, p0);
        const int32_t done = step_back({}, mem, seq, p0);
        return done == 0 ? UNEXPECTED : done == CAUGHT ? CAUGHT : 0;
    }
    if (what == REMOVE_WHOLE) {
        p0 = 0;
        p1 = END;
    }
    removed(seq, p0);
    const int32_t code = remove_cells({}, mem, seq, p0, p1);
    if (code == 0) {
        return UNEXPECTED;
    }
    if (code != CAUGHT && what == REMOVE_WHOLE) {
        damaged.reset(size_t(seq));
    }
    return code == CAUGHT ? CAUGHT : 0;
}

int32_t sequence_facts::keep(llama_seq_id seq) noexcept {
    // llama_memory_seq_keep handles one stream only.
    for (llama_seq_id s = 0; s < n_seq_max; ++s) {
        const int32_t code = s != seq ? remove(s, 0, END) : 0;
        if (code != 0) {
            return code;
        }
    }
    return 0;
}

int32_t sequence_facts::rewind(llama_seq_id seq, llama_pos last) noexcept {
    const int32_t code = holds(mem, seq, last + 1, END) ? remove_as(REMOVE_PART, seq, last + 1, END) : 0;
    if (code == 0) {
        damaged.reset(size_t(seq));
    }
    return code;
}

int32_t sequence_facts::copy(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) noexcept {
    const bool begins = p0 <= extent_of(mem, src).lo;
    // llama_memory_seq_cp merges into a unified destination; a copy replaces.
    int32_t code = copies_replace(mem) ? 0 : remove(dst, 0, END);
    if (code == 0) {
        copied(src, dst, begins ? p1 : 0);
        code = copy_cells({}, mem, src, dst, p0, p1);
    }
    return code;
}

int32_t sequence_facts::shift(llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta) noexcept {
    const llama_pos first = first_from(mem, seq, p0);
    if (traits.whole_only) {
        set_first({}, mem, seq, extent_of(mem, seq).lo + delta);
    }
    moved(seq, first, first + delta);
    return add_cells({}, mem, seq, p0, p1, delta);
}

int32_t sequence_facts::divide(llama_seq_id seq, llama_pos p0, llama_pos p1, int d) noexcept {
    const llama_pos first = first_from(mem, seq, p0);
    if (traits.whole_only) {
        set_first({}, mem, seq, extent_of(mem, seq).lo / d);
    }
    moved(seq, first, first / d);
    return divide_cells({}, mem, seq, p0, p1, d);
}

int32_t sequence_facts::apply_pending() noexcept {
    if (!pending) {
        return 0;
    }
    ++changes;
    const int32_t code = flush({}, ctx, mem);
    pending = code != 0;
    return code;
}

int64_t sequence_facts::compact() noexcept {
    ++changes;
    return move_cells_down({}, mem);
}

// States ----------------------------------------------------------------------------------------------

int32_t sequence_facts::place(bool v_trans, llama_seq_id seq, const std::vector<state_block> & blocks,
                              const std::vector<state_piece> & pieces, bool two, const llama_pos * firsts) noexcept {
    const int32_t code = state_place({}, mem, v_trans, seq, blocks, pieces, two);
    if (code == 1) {
        restored(seq, firsts);
    }
    return code;
}

int32_t sequence_facts::read(llama_seq_id seq, const std::vector<state_piece> & pieces) noexcept {
    if (seq < 0) {
        ++changes;
        versions.all_changed();
        rows.cleared();
        forget_earlier({}, mem, -1);
    } else {
        // llama.cpp does not clear the destination if the state is empty.
        removed(seq, 0);
        if (remove_cells({}, mem, seq, 0, END) == CAUGHT) {
            return CAUGHT;
        }
    }
    begin_notes();
    return state_read({}, mem, seq, false, pieces);
}

int32_t sequence_facts::replace(llama_seq_id seq, const std::vector<state_piece> & pieces,
                                const llama_pos * firsts) noexcept {
    rows_before = rows.now();
    const int32_t code = read(seq, pieces);
    if (code == 0) {
        restored(seq, firsts);
    }
    return code;
}

int32_t sequence_facts::put_back(llama_seq_id seq, const std::vector<state_piece> & before) noexcept {
    const int32_t code = read(seq, before);
    if (code == 0) {
        rows.back_to(rows_before);
    }
    return code;
}

int32_t sequence_facts::put_part(llama_seq_id seq, const std::vector<state_piece> & pieces, llama_pos first,
                                 llama_pos last, uint64_t version) noexcept {
    // The recurrent state may be of other tokens than the sequence had.
    removed(seq, versions.is_true(seq, version) ? last + 1 : 0);
    begin_notes();
    int32_t code = drop_parts({}, mem, seq);
    if (code != CAUGHT) {
        code = state_read({}, mem, seq, true, pieces);
    }
    if (code != CAUGHT) {
        code = cut_attention({}, mem, seq, last + 1);
    }
    set_first({}, mem, seq, first);
    if (code == 0) {
        damaged.reset(size_t(seq));
    }
    return code;
}

// Computing -------------------------------------------------------------------------------------------

// Record where recurrent sequences begin, which their memory does not store.
void sequence_facts::note_first_tokens(const llama_batch & batch) noexcept {
    for (int32_t i = batch.n_tokens - 1; i >= 0; --i) {
        const llama_seq_id seq = batch.seq_id[i][0];
        if (extent_of(mem, seq).n == 0) {
            set_first({}, mem, seq, batch.pos[i]);
        }
    }
}

int32_t sequence_facts::decode(const llama_batch & batch, bool is_first, bool active) noexcept {
    int32_t states[N_SEQ];
    if (is_first) {
        rows.begin();
    }
    if (guarded_void([&] { rows.reserve(batch); }) == CAUGHT) {
        return NOTHING_DONE;
    }
    if (suspected && freed) {
        if (zero_free_states({}, mem) == CAUGHT) {
            return NOTHING_DONE;
        }
        freed = false;
    }
    for (llama_seq_id s = 0; traits.whole_only && s < n_seq_max; ++s) {
        states[s] = state_cell(mem, s);
    }
    if (traits.kind == MEMORY_RECURRENT) {
        note_first_tokens(batch);
    }
    ++changes;
    begin_notes();
    int32_t code;
    {
        const std::shared_lock<adapter_lock> read(*model_adapters);
        const bool swaps = base && !active;
        if (swaps) {
            swap_adapters({}, ctx, base);
        }
        code = run_decode({}, ctx, batch);
        if (swaps) {
            swap_adapters({}, ctx, base);
        }
    }
    if (code == 0) {
        decoded(batch);
        note_earlier({}, ctx, mem, batch, states);
    } else {
        if (code != -1 && code != REFUSED) {
            forget_earlier({}, mem, -1);
        }
        rows.forget();
        last_damaged.reset();
        settle_searches({}, mem);
        if (code != CAUGHT) {
            failed(batch, code, states);
        }
    }
    return code;
}

int32_t sequence_facts::encode(const llama_batch & batch) noexcept {
    rows.begin();
    if (guarded_void([&] { rows.reserve(batch); }) == CAUGHT) {
        return NOTHING_DONE;
    }
    ++changes;
    begin_notes();
    int32_t code;
    {
        const std::shared_lock<adapter_lock> read(*model_adapters);
        code = run_encode({}, ctx, batch);
    }
    if (code != 0) {
        rows.forget();
        return code;
    }
    input_keys.fill(0);
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        rows.encoded();
        for (int32_t j = 0; j < batch.n_seq_id[i]; ++j) {
            uint64_t & key = input_keys[size_t(batch.seq_id[i][j])];
            key = key * 1000003 + uint64_t(i) + 1;
        }
    }
    return 0;
}

}  // namespace pykv
