// Groups 2 and 3: throughput, and the time to the first token.
#include "bench.h"

// A greedy sampler: reads every logit once.
static int first_token(void) {
    const float * row = llama_get_logits_ith(ctx, -1);
    int best = 0;
    for (int i = 1; i < n_vocab; ++i) {
        if (row[i] > row[best]) {
            best = i;
        }
    }
    return best;
}

// `steps` decodes of one token for each of n sequences, or one prompt divided among n sequences.
void do_generate(bool prefill) {
    int n = (int) number("parallel", 1), steps = (int) number("steps", 16), from = (int) number("depth", 32);
    int each = (int) number("tokens", 512) / n;
    llama_memory_clear(mem, false);
    if (!prefill) {
        for (int s = 0; s < n; ++s) {
            extend(s, from);
        }
    }
    double t = now();
    if (prefill) {
        batch.n_tokens = 0;
        for (int s = 0; s < n; ++s) {
            put(0, each, s, true);
        }
        decode();
    }
    t = now() - t;
    for (int i = 0; i < steps && !prefill; ++i) {
        double step = now();
        batch.n_tokens = 0;
        for (int s = 0; s < n; ++s) {
            put(from + i, 1, s, true);
        }
        decode();
        step = now() - step;
        t = i == 0 || step < t ? step : t;
    }
    printf("{\"seconds\": %.9f, \"tokens\": %d}\n", t, prefill ? each * n : n);
}

// One batch after sequence 0's tokens.
void do_append(void) {
    const int n = (int) number("tokens", 64), from = llama_memory_seq_pos_max(mem, 0) + 1;
    double    t = now();
    put(from, n, 0, false);
    decode();
    t = now() - t;
    llama_memory_seq_rm(mem, 0, from, -1);
    printf("{\"seconds\": %.9f, \"tokens\": %d}\n", t, n);
}

// Seconds until sequence 1 has the prefix, and until the first token after its tail.
void do_prefix(void) {
    char   how[32];
    int    n = (int) number("n", 256), tail = (int) number("tail", 16), evaluated = tail;
    size_t count = 0;
    snprintf(how, sizeof how, "%s", text("how"));
    llama_memory_seq_rm(mem, 1, -1, -1);
    double t = now();
    if (is(how, "cold")) {
        extend(1, n);
        evaluated += n;
    } else if (is(how, "fork")) {
        llama_memory_seq_cp(mem, 0, 1, -1, -1);
    } else if (is(how, "memory")) {
        count = llama_state_seq_set_data(ctx, blob, blob_size, 1);
    } else {
        llama_token * tokens = malloc((size_t) n * sizeof(llama_token));
        size_t        got = 0;
        count = llama_state_seq_load_file(ctx, text("path"), 1, tokens, (size_t) n, &got);
        free(tokens);
    }
    double ready = now() - t;
    extend(1, tail);
    sink += first_token();
    printf("{\"ready\": %.9f, \"first\": %.9f, \"evaluated\": %d, \"bytes\": %zu}\n", ready, now() - t, evaluated, count);
    llama_memory_seq_rm(mem, 1, -1, -1);
}
