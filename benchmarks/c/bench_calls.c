// Group 1: cost of one call.
#include "bench.h"

static void fill(const int * tokens, int n) {
    for (int i = 0; i < n; ++i) {
        batch.token[i] = tokens[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = i == n - 1;
    }
    batch.n_tokens = n;
    __asm__ volatile("" ::: "memory");
}

// Empty every sequence except 0, fill it with four tokens, or make it a copy of 0.
void prepare(const char * what) {
    for (int s = 1; s < n_seq_max; ++s) {
        llama_memory_seq_rm(mem, s, -1, -1);
    }
    if (is(what, "remove") || is(what, "remove_part") || is(what, "copy_over")) {
        for (int s = 1; s < n_seq_max; ++s) {
            llama_memory_seq_cp(mem, 0, s, -1, -1);
        }
    } else if (is(what, "add") || is(what, "div")) {
        batch.n_tokens = 0;
        for (int s = 1; s < n_seq_max; ++s) {
            put(64, 1, s, true);
        }
        decode();
    }
}

// The sequences except 0 in a new order each time, because branch prediction learns a short pass.
static int * shuffled(void) {
    static int order[256];
    for (int i = 1; i < n_seq_max; ++i) {
        int other = 1 + rand() % i;
        order[i] = order[other];
        order[other] = i;
    }
    return order;
}

// Seconds of rounds over all sequences except 0; shifts by 1 alternate in direction.
static double pass(const char * what, int rounds, int * calls, const float ** row) {
    static int  tokens[512];  // zeros; the values do not matter
    static float copy[1 << 18];
    const int   n = n_seq_max;
    const int   last = llama_memory_seq_pos_max(mem, 0);
    int64_t     sum = 0;
    double      t;
    *calls = rounds * (n - 1);
    if (is(what, "decode1")) {
        *calls = 16;
        t = now();
        for (int i = 1; i <= 16; ++i) {
            put(last + i, 1, 0, false);
            decode();
        }
        t = now() - t;
        llama_memory_seq_rm(mem, 0, last + 1, -1);
        return t;
    }
    if (is(what, "batch1") || is(what, "batch512")) {
        const int size = is(what, "batch1") ? 1 : 512;
        t = now();
        for (int s = 1; s < n; ++s) {
            fill(tokens, size);
        }
        return now() - t;
    }
    t = 1e18;  // unknown call
    prepare(what);
    const int * order = shuffled();
#define EACH(name, call)                                                                           \
    if (is(what, name)) {                                                                          \
        t = now();                                                                                 \
        for (int r = 0, delta = 1; r < rounds; ++r, delta = -delta) {                              \
            for (int i = 1; i < n; ++i) {                                                          \
                const int s = order[i];                                                            \
                (void) s;                                                                          \
                call;                                                                              \
            }                                                                                      \
        }                                                                                          \
        t = now() - t;                                                                             \
    }
    EACH("pos_max", sum += llama_memory_seq_pos_max(mem, 0))
    EACH("pos_min", sum += llama_memory_seq_pos_min(mem, 0))
    EACH("can_shift", sum += llama_memory_can_shift(mem))
    EACH("copy", llama_memory_seq_cp(mem, 0, s, -1, -1))
    EACH("copy_part", llama_memory_seq_cp(mem, 0, s, 0, 8))
    EACH("copy_over", llama_memory_seq_rm(mem, s, -1, -1); llama_memory_seq_cp(mem, 0, s, -1, -1))
    EACH("remove", llama_memory_seq_rm(mem, s, -1, -1))
    EACH("remove_part", llama_memory_seq_rm(mem, s, 8, 16))
    EACH("keep", llama_memory_seq_keep(mem, 0))
    EACH("add", llama_memory_seq_add(mem, s, -1, -1, delta))
    EACH("div", llama_memory_seq_div(mem, s, -1, -1, 2))
    EACH("logits", *row = llama_get_logits_ith(ctx, -1); memcpy(copy, *row, (size_t) n_vocab * sizeof(float)))
    sink += sum + (int64_t) copy[5];
    return t;
}

void do_call(void) {
    char         what[64];
    int          calls = 1;
    const float * row = NULL;
    double       best = 1e9;
    snprintf(what, sizeof what, "%s", text("what"));
    const double begin = now();
    const long   slices = number("slices", 20);
    const int    rounds = (int) number("rounds", 1);
    const double enough = 1e-3 * (double) number("enough_ms", 60);
    for (long i = 0; i < slices && (i < 5 || now() - begin < enough); ++i) {
        double t = pass(what, rounds, &calls, &row) / calls;
        best = t < best ? t : best;
    }
    prepare("nothing");
    printf(best < 1.0 ? "{\"seconds\": %.12g}\n" : "{\"error\": \"it has no such call\"}\n", best);
}
