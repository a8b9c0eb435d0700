// Group generate: many generations at once with llama.cpp's samplers, in a BatchGenerator's batches:
// one token of each running request, then new prompts.
#include <math.h>

#include "bench.h"

#define MOST 64

struct request {
    int                    start, length, n_new, arrival;
    int                    seq, made;  // -1: not started
    llama_token            last;
    struct llama_sampler * sampler;
};
static struct request requests[MOST];

// The requests of benchmarks/peers/workload.py.
static int workload(const char * what) {
    const bool arrivals = is(what, "arrivals"), best = is(what, "best");
    const int  n = arrivals ? 48 : best ? 8 : 16;
    for (int i = 0; i < n; ++i) {
        struct request r = { best ? 0 : 100 * i, 32, 64, 0, -1, 0, 0, NULL };
        if (arrivals) {
            r.length = 8 + i * 37 % 57;
            r.n_new = 16 + i * 53 % 81;
            r.arrival = 2 * i;
        }
        requests[i] = r;
    }
    return n;
}

static struct llama_sampler * sampler(uint32_t seed) {
    const struct llama_vocab *   vocab = llama_model_get_vocab(llama_get_model(ctx));
    const llama_logit_bias       none = { llama_vocab_eos(vocab), -1e6f };
    struct llama_sampler * const chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    llama_sampler_chain_add(chain, llama_sampler_init_logit_bias(n_vocab, 1, &none));
    llama_sampler_chain_add(chain, llama_sampler_init_top_k(40));
    llama_sampler_chain_add(chain, llama_sampler_init_temp(0.8f));
    llama_sampler_chain_add(chain, llama_sampler_init_dist(seed));
    return chain;
}

static void add(llama_token token, int pos, int seq, bool logits) {
    const int at = batch.n_tokens++;
    batch.token[at] = token;
    batch.pos[at] = pos;
    batch.n_seq_id[at] = 1;
    batch.seq_id[at][0] = seq;
    batch.logits[at] = logits;
}

// Choose from a row; returns whether that was the last token.
static bool choose(struct request * r, int row) {
    r->last = llama_sampler_sample(r->sampler, ctx, row);
    return ++r->made == r->n_new;
}

void do_many(void) {
    char what[32];
    snprintf(what, sizeof what, "%s", text("what"));
    const int  n = workload(what), slots = (int) number("slots", 16);
    const bool best = is(what, "best");
    int        running[MOST], rows[MOST], n_running = 0, next = 0, ended = 0;
    long       tokens = 0;
    bool       taken[MOST] = { false };
    llama_memory_clear(mem, false);
    double t = now();
    for (int i = 0; i < n; ++i) {
        requests[i].sampler = sampler((uint32_t) i + 1);
    }
    for (int step = 0; ended < n; ++step) {
        // Samples of a prompt wait for its evaluation.
        while (next < n && n_running < slots && requests[next].arrival <= step && !(best && next == 1 && step == 0)) {
            if (requests[next].seq < 0) {
                int seq = 0;
                while (taken[seq]) {
                    ++seq;
                }
                taken[seq] = true;
                requests[next].seq = seq;
            }
            running[n_running++] = next++;
        }
        batch.n_tokens = 0;
        for (int pass = 0; pass < 2; ++pass) {
            for (int i = 0; i < n_running; ++i) {
                struct request * r = &requests[running[i]];
                if (pass == 0 && r->made) {
                    rows[i] = batch.n_tokens;
                    add(r->last, r->length + r->made - 1, r->seq, true);
                } else if (pass == 1 && !r->made) {
                    for (int k = 0; k < r->length; ++k) {
                        add(token_at(r->start + k), k, r->seq, k == r->length - 1);
                    }
                    rows[i] = batch.n_tokens - 1;
                }
            }
        }
        if (batch.n_tokens == 0) {
            continue;
        }
        decode();
        int left = 0;
        for (int i = 0; i < n_running; ++i) {
            struct request * r = &requests[running[i]];
            if (best && step == 0) {
                for (int k = 1; k < n; ++k) {
                    taken[k] = true;
                    requests[k].seq = k;
                    llama_memory_seq_cp(mem, 0, k, -1, -1);
                    choose(&requests[k], rows[i]);
                }
            }
            if (choose(r, rows[i])) {
                llama_memory_seq_rm(mem, r->seq, -1, -1);
                llama_sampler_free(r->sampler);
                taken[r->seq] = false;
                tokens += r->made;
                ++ended;
            } else {
                running[left++] = running[i];
            }
        }
        n_running = left;
    }
    printf("{\"seconds\": %.9f, \"tokens\": %ld}\n", now() - t, tokens);
}
